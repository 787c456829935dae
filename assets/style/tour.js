// Runs once for the tour; gradio provides `element` and `watch`. All steps are in the page; one is shown by hiding
// the others. Only the count of votes is fetched, and the tour works without it.
const kept = { step: Number(new URLSearchParams(location.search).get("step")) || 1, pick: null };
const tour = () => element.querySelector(".t-tour");
const count = () => Number(tour()?.dataset.count ?? 0);
const visible = () => Boolean(tour()) && tour().offsetParent !== null;
const isFull = () => Boolean(document.fullscreenElement) && document.fullscreenElement === element.closest("#tour");

function remember() {
  if (!visible()) return;
  const address = new URL(location.href);
  address.searchParams.set("screen", "tour");
  address.searchParams.set("step", kept.step);
  history.replaceState(history.state, "", address);
}

function show(step, { announce = true } = {}) {
  const root = tour();
  if (!root) return;
  kept.step = Math.min(Math.max(step, 1), count());
  let title = "";
  for (const slide of root.querySelectorAll(".t-slide")) {
    slide.hidden = Number(slide.dataset.step) !== kept.step;
    if (!slide.hidden) title = slide.querySelector("h2").textContent;
  }
  for (const dot of root.querySelectorAll("[data-go]")) {
    const number = Number(dot.dataset.go);
    if (number === kept.step) dot.setAttribute("aria-current", "step");
    else dot.removeAttribute("aria-current");
    dot.classList.toggle("is-past", number < kept.step);
  }
  const current = root.querySelector("[aria-current=step]");
  const strip = current.closest("ol");
  strip.scrollLeft = current.offsetLeft - strip.clientWidth / 2 + current.offsetWidth / 2;
  for (const move of root.querySelectorAll("[data-move]")) {
    const to = kept.step + Number(move.dataset.move);
    move.setAttribute("aria-disabled", String(to < 1 || to > count()));
  }
  root.querySelector(".t-where").textContent = root.dataset.where.replace("%n", kept.step);
  if (announce) {
    root.querySelector("[data-said]").textContent = root.dataset.announce.replace("%n", kept.step).replace("%t", title);
    const top = root.getBoundingClientRect().top;
    if (isFull()) element.closest("#tour").scrollTop = 0;
    else if (top < 0) window.scrollBy(0, top - 60);
  }
  remember();
  if (root.querySelector(`.t-slide[data-step="${kept.step}"] [data-live]`)) askForVotes(root);
}

async function askForVotes(root) {
  const place = root.querySelector("[data-live]");
  try {
    const answer = await fetch(root.dataset.liveAddress);
    if (!answer.ok) throw new Error(answer.status);
    place.innerHTML = await answer.text(); // made by the server's template, which escapes
  } catch {
    place.textContent = root.dataset.liveFailed;
  }
}

function pick(name) {
  kept.pick = name;
  for (const button of tour().querySelectorAll("[data-pick]"))
    button.setAttribute("aria-pressed", String(button.dataset.pick === name));
  for (const section of tour().querySelectorAll("[data-case]")) section.hidden = section.dataset.case !== name;
}

// Put the message of the slide into the box of another screen, unless a draft is in it.
function tryLive(screen) {
  const all = [...tour().querySelectorAll(".t-said blockquote")];
  const said = all.find((one) => !one.closest(".t-slide[hidden], .t-case[hidden]"));
  const box = document.querySelector(`${screen === "compare" ? "#compare-message" : "#message"} textarea`);
  if (!said || !box || box.value.trim()) return;
  box.value = said.textContent;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

async function toggleFull() {
  const root = element.closest("#tour");
  try {
    if (document.fullscreenElement) await document.exitFullscreen();
    else await root.requestFullscreen();
  } catch {
    // The browser may refuse full screen.
  }
}

const acts = {
  full: toggleFull,
  keys: () => tour().querySelector("dialog").showModal(),
  close: () => tour().querySelector("dialog").close(),
};

element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-go], [data-move], [data-pick], [data-act]");
  if (!button || button.getAttribute("aria-disabled") === "true") return;
  if (button.dataset.go) show(Number(button.dataset.go));
  else if (button.dataset.move) show(kept.step + Number(button.dataset.move));
  else if (button.dataset.pick) pick(button.dataset.pick);
  else acts[button.dataset.act]?.();
});

function fit() {
  const root = tour();
  if (!root) return;
  const zoom = innerWidth < 760 ? 1 : Math.min(innerWidth / 1280, innerHeight / 720);
  root.style.setProperty("--zoom", zoom);
  const button = root.querySelector("[data-act=full]");
  button.textContent = isFull() ? button.dataset.on : button.dataset.off;
}
document.addEventListener("fullscreenchange", fit);
window.addEventListener("resize", fit);

// A page further where more of the step is out of sight, else a step: what a presentation remote needs.
function turn(direction) {
  const page = isFull() ? element.closest("#tour") : document.scrollingElement;
  const { top, bottom } = tour().getBoundingClientRect();
  const more = direction > 0 ? bottom > innerHeight + 4 : top < -4;
  const to = kept.step + direction;
  if (!more && to >= 1 && to <= count()) show(to);
  else page.scrollBy(0, direction * 0.85 * innerHeight);
}

const notes = () => tour().querySelectorAll(".t-speaker");
function toggleNotes() {
  const open = !notes()[0].open;
  for (const note of notes()) note.open = open;
}

const keys = {
  ArrowRight: () => show(kept.step + 1),
  ArrowLeft: () => show(kept.step - 1),
  Home: () => show(1),
  End: () => show(count()),
  PageDown: () => turn(1),
  PageUp: () => turn(-1),
  f: toggleFull,
  n: toggleNotes,
  p: () => tour().querySelector("[data-act=print]").click(),
  "?": acts.keys,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || !visible()) return;
  // Leave keys to text fields, and the arrows to elements that scroll sideways.
  if (event.target.closest("input, textarea, select, [contenteditable=true], [role=combobox], .t-scroll")) return;
  if (document.querySelector("dialog[open]")) return;
  const name = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const act = keys[name];
  if (!act) return;
  event.preventDefault();
  act();
});

// The URL names the step only while the tour is open.
document.addEventListener("click", (event) => {
  const tab = event.target.closest("#screens button[role=tab]");
  const link = event.target.closest("[data-screen]");
  if (!tab && !link) return;
  if (isFull()) document.exitFullscreen();
  if (link?.closest(".t-try")) tryLive(link.dataset.screen);
  setTimeout(() => {
    if (visible()) show(kept.step, { announce: false });
    else {
      const address = new URL(location.href);
      address.searchParams.delete("step");
      history.replaceState(history.state, "", address);
    }
  });
});

function settle() {
  if (!tour()) return;
  fit();
  if (kept.pick) pick(kept.pick);
  show(kept.step, { announce: false });
}
watch("value", settle);
requestAnimationFrame(settle);
// The tab may open before or after the content arrives.
new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && remember()).observe(element);
