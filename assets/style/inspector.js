// Runs once for the inspector; gradio provides `element`, `trigger` and `watch`.
const acts = ["pick_turn", "keep_step", "try_strategy", "each_strategy", "switch_reply", "compare_reply"];
const open = new Set();
const drafts = new Map();
const away = ["keep_step", "try_strategy", "switch_reply", "compare_reply"];
let held = null;
let scrolled = 0;

// An update replaces the panel and would reset its scroll position.
element.addEventListener("scroll", (event) => {
  if (event.target.classList.contains("inspector")) scrolled = event.target.scrollTop;
}, true);
// A new reply is shown from the top.
const fromTheTop = () => {
  scrolled = 0;
  if (element.getBoundingClientRect().top < 0) element.scrollIntoView({ block: "start" });
};

// The data attributes of a button or form, with numbers parsed.
const told = (data) => {
  const said = { turn: Number(data.turn), reply: Number(data.reply ?? 0) };
  for (const name of ["part", "strategy"]) if (data[name] !== undefined) said[name] = data[name];
  return said;
};

// Highlight the words of the conversation that the quotation under the pointer, or with the focus, repeats.
const quoted = globalThis.Highlight && new Highlight(); // an old browser shows the link alone
if (quoted) CSS.highlights.set("quoted", quoted);
const wordsOf = (link) => document.getElementById(link.hash.slice(1));
const point = () => {
  quoted?.clear();
  const link = element.querySelector(".quotation:hover") ?? element.querySelector(".quotation:focus");
  const text = link && wordsOf(link)?.firstChild;
  if (!text) return;
  // The server counts characters, and the browser counts an emoji twice.
  const units = (count) => [...text.data].slice(0, count).join("").length;
  const range = new Range();
  range.setStart(text, units(Number(link.dataset.start)));
  range.setEnd(text, units(Number(link.dataset.end)));
  quoted?.add(range);
};
for (const name of ["mouseover", "mouseout", "focusin", "focusout"]) element.addEventListener(name, point);

element.addEventListener("click", (event) => {
  const link = event.target.closest(".quotation");
  if (link) {
    event.preventDefault(); // following the link would take the focus from it
    wordsOf(link)?.scrollIntoView({ block: "center" });
    return;
  }
  const button = event.target.closest("[data-act]");
  if (button && !button.disabled && acts.includes(button.dataset.act)) {
    if (button.dataset.act === "try_strategy") open.delete("strategy");
    if (away.includes(button.dataset.act)) fromTheTop();
    trigger(button.dataset.act, told(button.dataset));
    return;
  }
  const summary = event.target.closest("summary");
  if (!summary) return;
  const fold = summary.parentElement;
  // The click fires before <details> toggles; a key press on a summary is a click too.
  if (fold.open) open.delete(fold.dataset.fold);
  else open.add(fold.dataset.fold);
});

element.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  const { text, ...labels } = Object.fromEntries(new FormData(form));
  if (form.dataset.form === "best_of") {
    trigger("best_of", { turn: Number(form.dataset.turn), size: Number(labels.size) });
  } else if (form.dataset.form === "edit_step") {
    open.delete(form.closest("details").dataset.fold);
    fromTheTop();
    trigger("edit_step", { ...told(form.dataset), text, labels });
  }
});

// Preserve typed text across updates.
element.addEventListener("input", (event) => {
  const form = event.target.form;
  if (form?.dataset.key) drafts.set(form.dataset.key, Object.fromEntries(new FormData(form)));
});
element.addEventListener("reset", (event) => drafts.delete(event.target.dataset.key));

// Preserve the focus if its element still exists.
const nameOf = (target) => {
  const { act, turn, reply, part, strategy, quotation } = target.dataset;
  if (quotation) return `[data-quotation="${quotation}"]`;
  if (act) return `[data-act="${act}"]` + Object.entries({ turn, reply, part, strategy })
    .filter(([, value]) => value !== undefined && !(act === "pick_turn"))
    .map(([name, value]) => `[data-${name}="${CSS.escape(value)}"]`).join("");
  const fold = target.closest("details");
  if (target.tagName === "SUMMARY" && fold) return `details[data-fold="${fold.dataset.fold}"] > summary`;
  if (target.tagName === "H2") return "h2"; // where the focus went when what held it was gone
  const form = target.closest("form");
  if (form && target.name) return `form[data-form="${form.dataset.form}"]${form.dataset.part ? `[data-part="${form.dataset.part}"]` : ""} [name="${target.name}"]`;
  return form ? "h2" : null;
};
element.addEventListener("focusin", (event) => { held = nameOf(event.target); });
element.addEventListener("focusout", (event) => {
  // An element that is removed or hidden loses the focus without the user moving it.
  const left = event.target;
  setTimeout(() => {
    if (element.contains(document.activeElement)) return;
    const moved = document.activeElement && document.activeElement !== document.body;
    if (moved || (left.isConnected && left.checkVisibility())) held = null;
  });
});

// An update closes every <details>; reopen those that the reader had opened.
watch("value", () => {
  for (const fold of element.querySelectorAll("details[data-fold]")) {
    if (fold.open) open.add(fold.dataset.fold);
    fold.open = open.has(fold.dataset.fold);
  }
  for (const form of element.querySelectorAll("form[data-key]")) {
    for (const [name, value] of Object.entries(drafts.get(form.dataset.key) ?? {}))
      if (form.elements[name]) form.elements[name].value = value;
  }
  const panel = element.querySelector(".inspector");
  if (panel) panel.scrollTop = scrolled;
  if (held && (document.activeElement === document.body || !document.activeElement)) {
    const found = element.querySelector(held);
    const target = found && !found.disabled ? found : element.querySelector("h2");
    target?.focus({ preventScroll: true });
  }
  requestAnimationFrame(point); // the words have been drawn anew, too
});
