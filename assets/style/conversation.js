// Runs once for the conversation; gradio provides `element`, `trigger` and `watch`.
const acts = ["ask_again", "edit_turn", "pick_turn", "use_starter", "clear_all", "undo_last", "stop_edit"];
const focusMessage = ["edit_turn", "use_starter", "stop_edit"];

// Announce a reply once, when it is complete, not letter by letter.
const live = document.createElement("div");
live.className = "vh";
live.setAttribute("aria-live", "polite");
(document.querySelector("main") || document.body).append(live);
let announced = null;
let pinned = true;
let turns = 0;

element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  if (!button || !acts.includes(button.dataset.act)) return;
  trigger(button.dataset.act, { turn: Number(button.dataset.turn ?? -1) });
  if (button.dataset.show) {
    const target = document.getElementById(button.dataset.show);
    const below = target && target.getBoundingClientRect().top > window.innerHeight * 0.6;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (below) target.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
  }
  if (focusMessage.includes(button.dataset.act)) window.compeerFocusMessage = true;
});

// Keep the newest text in view unless the reader has scrolled away.
element.addEventListener("scroll", (event) => {
  const log = event.target;
  if (log.classList.contains("log")) pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}, true);

function settle() {
  const log = element.querySelector(".log");
  if (!log) return;
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
