// Runs once for the conversation; gradio provides `element`, `trigger` and `watch`.
const acts = ["ask_again", "edit_turn", "pick_turn", "use_starter", "clear_all", "undo_last", "stop_edit", "switch_reply"];
const edits = new Map(); // what was typed into a message, by the turn's key
let focus = []; // what to focus after the next update: the first that is there

// Announce a reply once, when it is complete, not letter by letter.
const live = document.createElement("div");
live.className = "vh";
live.setAttribute("aria-live", "polite");
(document.querySelector("main") || document.body).append(live);
let announced = null;
let pinned = true;
let turns = 0;

element.addEventListener("click", (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) copyWords(copy);
  const button = event.target.closest("[data-act]");
  if (!button || button.disabled || !acts.includes(button.dataset.act)) return;
  const { act, turn } = button.dataset;
  trigger(act, { turn: Number(turn ?? -1), reply: Number(button.dataset.reply ?? 0) });
  if (act === "switch_reply") focus = [`[data-turn="${turn}"][data-way=${button.dataset.way}]:enabled`, `[data-turn="${turn}"][data-way]:enabled`];
  if (act === "edit_turn") {
    focus = [".edit textarea"];
    pinned = false;
  }
  if (act === "stop_edit") {
    edits.clear();
    focus = [`[data-act=edit_turn][data-turn="${turn}"]`];
  }
  if (button.dataset.show) {
    const target = document.getElementById(button.dataset.show);
    const below = target && target.getBoundingClientRect().top > window.innerHeight * 0.6;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (below) target.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
  }
  if (act === "use_starter") window.compeerFocusMessage = true;
});

async function copyWords(button) {
  const words = document.getElementById(button.dataset.copy)?.textContent ?? "";
  try {
    await navigator.clipboard.writeText(words);
  } catch { // without https or permission
    const box = document.body.appendChild(document.createElement("textarea"));
    box.value = words;
    box.select();
    document.execCommand("copy");
    box.remove();
    button.focus();
  }
  const label = button.textContent;
  button.textContent = live.textContent = button.dataset.done;
  setTimeout(() => { button.textContent = label; }, 1500);
}

// Editing a message in its bubble: Enter sends, as in the message box; Escape cancels.
element.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  trigger("save_edit", { turn: Number(form.dataset.turn), text: form.elements.text.value });
  pinned = true;
});
element.addEventListener("input", (event) => {
  const form = event.target.form;
  if (form) edits.set(form.dataset.key, event.target.value);
});
element.addEventListener("keydown", (event) => {
  const form = event.target.form;
  if (!form || event.target.name !== "text" || event.isComposing) return;
  if (event.key === "Escape") form.querySelector("[data-act=stop_edit]").click();
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    form.requestSubmit();
  }
});

// Two tabs of one browser: each tells the others when a person changed something.
const tabs = new BroadcastChannel("compeer-chat");
let state = null;
let isStale = false;
const refresh = () => {
  if (!isStale || document.hidden) return;
  isStale = false;
  trigger("refresh");
};
// The list's state ignores its search: two tabs that search would refresh each other without end.
const stateNow = () => [...document.querySelectorAll(":is(#conversation, #conversations) [data-state]")].map((part) => part.dataset.state).join(" ");
window.compeerChanged = () => {
  const now = stateNow();
  if (state !== null && state !== now) tabs.postMessage(now);
  state = now;
};
tabs.addEventListener("message", (event) => {
  isStale = event.data !== state;
  refresh();
});
document.addEventListener("visibilitychange", refresh);

// Keep the newest text in view unless the reader has scrolled away.
element.addEventListener("scroll", (event) => {
  const log = event.target;
  if (log.classList.contains("log")) pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}, true);

function settle() {
  const log = element.querySelector(".log");
  if (!log) return;
  for (const form of element.querySelectorAll(".edit")) {
    const typed = edits.get(form.dataset.key);
    if (typed !== undefined) form.elements.text.value = typed;
  }
  const focused = focus.map((each) => element.querySelector(each)).find(Boolean);
  focused?.focus({ preventScroll: true });
  focused?.closest(".edit")?.scrollIntoView({ block: "nearest" });
  focus = [];
  window.compeerChanged();
  const now = Number(log.dataset.turns);
  const isNew = now > turns;
  if (isNew) pinned = true;
  turns = now;
  if (pinned && now) log.scrollTop = log.scrollHeight;
  // A help card must not push the message out of view; beside a long message its beginning is in view.
  const card = pinned && log.querySelector(".turn:last-child > .risk");
  if (card) {
    const below = (part) => part.getBoundingClientRect().top - log.getBoundingClientRect().top;
    log.scrollTop += Math.max(below(card.parentElement) - 8, below(card) + 200 - log.clientHeight);
    // Nor may the help strip cover the message, if the page has moved down to the message box.
    const strip = document.getElementById("help-strip")?.getBoundingClientRect().bottom ?? 0;
    const top = Math.max(card.parentElement.getBoundingClientRect().top, log.getBoundingClientRect().top);
    if (isNew && top < strip) window.scrollBy(0, top - strip - 8);
  }
  const said = element.querySelector("[data-announce]");
  if (!said) return;
  const key = said.dataset.announce;
  if (announced !== null && key && key !== announced) live.textContent = said.textContent;
  announced = key;
}
watch("value", settle);
requestAnimationFrame(settle);
