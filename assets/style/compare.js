// Runs once for the rounds of a comparison; gradio provides `element`, `trigger` and `watch`.
const acts = ["stop_side", "use_starter", "choose_side", "clear_all", "draw_again"];
const phone = matchMedia("(max-width: 759px)");
const shared = (window.compeerCompare ??= { opened: new Set(), seen: new Map(), round: "" });

// Announce each reply once, when it is complete.
const live = document.createElement("div");
live.className = "vh";
live.setAttribute("aria-live", "polite");
(document.querySelector("main") || document.body).append(live);
let announced = null;

// During generation the HTML under the pointer is replaced many times a second, so a click may never fire.
// These buttons act on pointerdown; a click without a pointer comes from the keyboard.
const pressed = ".switch [data-side], [data-act=stop_side]";
element.addEventListener("pointerdown", (event) => {
  const target = event.button === 0 && event.target.closest(pressed);
  if (target) act(target);
});
element.addEventListener("click", (event) => {
  const target = event.target.closest(".switch [data-side], [data-act]");
  if (target && !(target.matches(pressed) && event.detail)) act(target);
});
function act(button) {
  if (button.matches(".switch [data-side]")) return show(Number(button.dataset.side));
  if (!acts.includes(button.dataset.act)) return;
  if (button.dataset.act === "use_starter")
    setTimeout(() => document.querySelector("#compare-message textarea")?.focus(), 400);
  trigger(button.dataset.act, { number: Number(button.dataset.number ?? -1) });
}

// On a phone one side is shown at a time; the choice is stored outside the HTML that is replaced.
const frame = element.closest("#compare-talk") ?? element;
function show(side) {
  frame.dataset.shown = String(side);
  shared.opened.add(side);
  for (const button of element.querySelectorAll(".switch [data-side]"))
    button.setAttribute("aria-pressed", String(Number(button.dataset.side) === side));
  look();
}

let touch = null;
element.addEventListener("touchstart", (event) => {
  touch = event.target.closest(".sides") ? event.changedTouches[0] : null;
}, { passive: true });
element.addEventListener("touchend", (event) => {
  if (!touch || !phone.matches) return;
  const across = event.changedTouches[0].clientX - touch.clientX;
  const down = event.changedTouches[0].clientY - touch.clientY;
  const sides = element.querySelectorAll(".side").length;
  const next = Number(frame.dataset.shown || 0) + (across < 0 ? 1 : -1);
  if (Math.abs(across) > 60 && Math.abs(across) > 2 * Math.abs(down) && next >= 0 && next < sides) show(next);
}, { passive: true });

// A reply counts as seen once its beginning and its end have been on screen.
function look() {
  const bar = document.querySelector("#compare-ballot .ballot.is-open");
  const covered = bar && getComputedStyle(bar).position === "sticky" ? bar.getBoundingClientRect().top : innerHeight;
  const floor = Math.min(innerHeight, covered);
  for (const side of element.querySelectorAll('.side[data-state="done"]')) {
    const reply = side.querySelector("[data-reply]");
    if (!reply || reply.offsetParent === null) continue;
    const box = reply.getBoundingClientRect();
    const number = Number(side.dataset.side);
    const seen = shared.seen.get(number) ?? { top: false, end: false };
    seen.top ||= box.top >= -4 && box.top < floor;
    seen.end ||= box.bottom > 0 && box.bottom <= floor + 4;
    shared.seen.set(number, seen);
  }
  window.dispatchEvent(new Event("compeer-compare"));
}
addEventListener("scroll", look, { passive: true });
addEventListener("resize", look, { passive: true });
phone.addEventListener("change", look);

function settle() {
  const round = element.querySelector("[data-round]")?.dataset.round ?? "";
  if (round !== shared.round) {
    shared.round = round;
    shared.opened.clear();
    shared.seen.clear();
    frame.dataset.shown = "0";
    if (round) element.querySelector(".asked")?.scrollIntoView({ block: "nearest" });
  }
  show(Number(frame.dataset.shown || 0));
  // The page may have moved down to the message box: show the message with its help card.
  const card = element.querySelector("[role=status] > .risk")?.dataset.card;
  if (card && card !== shared.card) element.querySelector(".asked").scrollIntoView({ block: "nearest" });
  shared.card = card;
  const whole = [...element.querySelectorAll("[data-announce]")];
  const fresh = announced === null ? [] : whole.filter((each) => !announced.has(each.dataset.announce));
  if (fresh.length) live.textContent = fresh.map((each) => each.textContent).join(" ");
  announced = new Set(whole.map((each) => each.dataset.announce));
}

// A redraw drops the focus; restore it to the same button.
let focused = null;
element.addEventListener("focusin", (event) => (focused = event.target.dataset?.keep ?? null));
element.addEventListener("focusout", (event) => {
  if (event.relatedTarget) focused = null;
});
watch("value", () => {
  settle();
  if (focused && (document.activeElement === document.body || !document.activeElement))
    element.querySelector(`[data-keep="${focused}"]`)?.focus({ preventScroll: true });
});
requestAnimationFrame(settle);
