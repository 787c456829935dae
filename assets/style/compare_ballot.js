// Runs once for the ballot of a comparison; gradio provides `element`, `trigger` and `watch`.
const shared = (window.compeerCompare ??= { opened: new Set(), seen: new Map(), round: "" });
const phone = matchMedia("(max-width: 759px)");
const over = new Map(); // battle -> when both replies were there
const sent = new Set(); // what was sent and is not drawn yet
const drafts = new Map(); // battle -> reasons that are not saved
const undoing = new Map(); // battle -> until when the vote can be taken back

const open = () => element.querySelector('.ballot[data-state="open"]');
const battleOf = (node) => node.closest(".ballot").dataset;

// --- voting ---
element.addEventListener("click", (event) => {
  const choice = event.target.closest("[data-vote]");
  if (choice) return vote(choice);
  const mark = event.target.closest("[data-mark]");
  if (mark) return press(mark);
  const button = event.target.closest("[data-act]");
  if (!button) return;
  const { battle, revision } = battleOf(button);
  const act = button.dataset.act;
  if (act === "stop_all") return trigger("stop_all", {});
  if (act === "explain") return explain(battle);
  if (act === "reveal") return reveal(battle);
  trigger(act, { battle, revision: Number(revision) });
});
element.addEventListener("submit", (event) => event.preventDefault());

function vote(choice) {
  const ballot = battleOf(choice);
  const name = `${ballot.battle}-${ballot.revision}`;
  if (choice.disabled || sent.has(name)) return;
  sent.add(name);
  setTimeout(() => sent.delete(name), 3000);
  const seen = [ballot.first, ballot.second].map((side) => shared.seen.get(Number(side)));
  const since = over.get(ballot.battle);
  trigger("vote", {
    battle: ballot.battle,
    revision: Number(ballot.revision),
    preference: choice.dataset.vote,
    both_seen: seen.every((each) => each?.top && each?.end),
    ...(since === undefined ? {} : { dwell_ms: Math.round(performance.now() - since) }),
  });
}

// Single-key shortcuts can interfere with speech input, so they can be disabled.
const KEYS = "compeer-vote-keys";
let keys = true;
try {
  keys = localStorage.getItem(KEYS) !== "off";
} catch {
  // Without storage they are on.
}
element.addEventListener("change", (event) => {
  if (!event.target.matches("[data-keys]")) return;
  keys = event.target.checked;
  try {
    if (keys) localStorage.removeItem(KEYS);
    else localStorage.setItem(KEYS, "off");
  } catch {
    // The choice lasts until the page is closed.
  }
});
document.addEventListener("keydown", (event) => {
  const ballot = open();
  if (!ballot || !keys || !ballot.getClientRects().length || event.repeat || event.isComposing) return;
  if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  const at = event.target;
  if (at.isContentEditable || at.closest?.("input:not([type=radio], [type=checkbox]), textarea, select")) return;
  if (document.querySelector("dialog[open], [role=dialog], [role=alertdialog], [aria-modal=true]")) return;
  const choice = ["1", "2", "3", "4"].includes(event.key) && ballot.querySelectorAll("[data-vote]")[Number(event.key) - 1];
  if (!choice) return;
  event.preventDefault();
  if (choice.disabled) return blink(ballot.querySelector("[data-reason]"));
  vote(choice);
});

// A key that cannot be used yet explains why.
function blink(reason) {
  const said = reason.textContent;
  reason.textContent = "";
  requestAnimationFrame(() => (reason.textContent = said));
}

// --- reasons ---
const why = (battle) => element.querySelector(`.ballot[data-battle="${battle}"] [data-why]`);
function read(form) {
  return {
    tags: [...form.querySelectorAll("[name=tag]:checked")].map((tag) => tag.value),
    note: form.querySelector("[data-note]").value,
    steps: [0, 1].map((side) => [0, 1, 2].map((step) => {
      const mark = form.querySelector(`[data-step="${side}-${step}"][aria-pressed=true]`);
      return mark ? mark.dataset.mark === "right" : null;
    })),
  };
}
function remember(form) {
  const { battle, revision } = battleOf(form);
  drafts.set(battle, { revision, caret: form.querySelector("[data-note]").selectionEnd, ...read(form) });
  form.querySelector("[data-saved]")?.remove();
}
function press(mark) {
  const on = mark.getAttribute("aria-pressed") !== "true";
  for (const each of mark.parentElement.querySelectorAll("[data-mark]"))
    each.setAttribute("aria-pressed", String(on && each === mark));
  remember(mark.closest("[data-why]"));
}
const dirty = (battle) => drafts.has(battle);
const fresh = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`;
function explain(battle) {
  const form = why(battle);
  if (form) trigger("explain", { battle, token: fresh(), ...read(form) });
}
function reveal(battle) {
  // Send unsaved reasons along: they cannot be added after the names are shown.
  const form = dirty(battle) && why(battle);
  trigger("reveal", form ? { battle, token: fresh(), ...read(form) } : { battle });
}
element.addEventListener("input", (event) => {
  const form = event.target.closest("[data-why]");
  if (form) remember(form);
});
// A redraw folds the reasoning; the event of <details> does not bubble. A vote cast after reading it would be another
// vote, so whoever opens it can no longer undo the first.
const reading = new Set();
const final = new Set();
element.addEventListener("toggle", (event) => {
  if (!event.target.matches("[data-rate]")) return;
  const { battle } = battleOf(event.target);
  if (!event.target.open) return reading.delete(battle);
  reading.add(battle);
  final.add(battle);
  tick();
}, { capture: true });

// --- the countdown: ten seconds to undo the vote, then the names ---
function tick() {
  for (const ballot of element.querySelectorAll('.ballot:not([data-state="open"])')) {
    const time = undoing.get(ballot.dataset.battle);
    if (!time) continue;
    const battle = ballot.dataset.battle;
    const left = final.has(battle) ? 0 : Math.max(0, Math.ceil((time.until - performance.now()) / 1000));
    const count = ballot.querySelector("[data-countdown]");
    if (count) count.textContent = left ? `(${left})` : "";
    if (!left) ballot.querySelector("[data-undoing]")?.remove();
    const soon = ballot.querySelector("[data-soon]");
    if (!soon) continue;
    const at = document.activeElement;
    const busy = dirty(battle) || reading.has(battle) || (ballot.querySelector("[data-why]").contains(at) && at.dataset.keep !== "reveal");
    const said = busy ? soon.dataset.wait : soon.dataset.text.replace("%s", left);
    if (soon.textContent !== said) soon.textContent = said;
    if (left || busy || time.revealed || !ballot.getClientRects().length) continue;
    time.revealed = true;
    reveal(battle);
  }
}
setInterval(tick, 250);

// --- which replies were opened on this page ---
function allow() {
  const ballot = open();
  if (!ballot || ballot.dataset.over !== "yes") return;
  const unopened = [["first", "left"], ["second", "right"]].find(
    ([side]) => phone.matches && !shared.opened.has(Number(ballot.dataset[side])));
  for (const choice of ballot.querySelectorAll("[data-vote]")) choice.disabled = Boolean(unopened);
  const reason = ballot.querySelector("[data-reason]");
  const said = unopened ? ballot.dataset.openFirst.replace("%s", ballot.dataset[unopened[1]]) : reason.dataset.ready;
  if (reason.textContent !== said) reason.textContent = said;
}
addEventListener("compeer-compare", allow);

function settle() {
  for (const box of element.querySelectorAll("[data-keys]")) box.checked = keys;
  for (const ballot of element.querySelectorAll(".ballot")) {
    const { battle, revision, state, undoSeconds } = ballot.dataset;
    if (ballot.dataset.over === "yes" && !over.has(battle)) over.set(battle, performance.now());
    const name = `${battle}-${revision}`;
    if (state !== "open" && undoing.get(battle)?.name !== name)
      undoing.set(battle, { name, until: performance.now() + 1000 * Number(undoSeconds), revealed: false });
    if (drafts.has(battle) && drafts.get(battle).revision !== revision) drafts.delete(battle);
    const draft = drafts.get(battle);
    const form = ballot.querySelector("[data-why]");
    if (draft && form) {
      form.querySelector("[data-note]").value = draft.note;
      for (const tag of form.querySelectorAll("[name=tag]")) tag.checked = draft.tags.includes(tag.value);
      for (const mark of form.querySelectorAll("[data-mark]")) {
        const [side, step] = mark.dataset.step.split("-");
        mark.setAttribute("aria-pressed", String(draft.steps[side][step] === (mark.dataset.mark === "right")));
      }
    }
    const rate = ballot.querySelector("[data-rate]");
    if (rate && reading.has(battle)) rate.open = true;
  }
  allow();
  tick();
}

// When a new ballot appears, an empty message box hands the focus over, so that the keys vote.
let welcomed = "";
function welcome() {
  const ballot = open();
  if (!ballot || ballot.dataset.battle === welcomed || !navigator.userActivation?.hasBeenActive) return;
  if (!ballot.getClientRects().length) return;
  welcomed = ballot.dataset.battle;
  const at = document.activeElement;
  const isIdle = !at || at === document.body || at.matches("#compare-message *, #compare-talk *");
  if (isIdle && !at?.value) ballot.querySelector(".choices").focus({ preventScroll: true });
}

// A redraw drops the focus; restore it, or move it to what follows a vote.
let focused = null;
element.addEventListener("focusin", (event) => (focused = event.target.dataset?.keep ?? null));
element.addEventListener("focusout", (event) => {
  if (event.relatedTarget) focused = null;
});
watch("value", () => {
  settle();
  welcome();
  if (!focused || (document.activeElement && document.activeElement !== document.body)) return;
  const place = element.querySelector(`[data-keep="${focused}"]`)
    ?? element.querySelector('[data-keep="reveal"]') ?? open()?.querySelector(".choices")
    ?? [...element.querySelectorAll('[data-keep="revealed"]')].at(-1);
  place?.focus({ preventScroll: true });
  const caret = place?.matches?.("[data-note]") && drafts.get(battleOf(place).battle)?.caret;
  if (caret) place.setSelectionRange(caret, caret);
});
requestAnimationFrame(settle);
