// Runs once for the inspector: `element`, `trigger` and `watch` come from gradio.
const acts = ["pick_turn"];
const open = new Set();

element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  if (button && !button.disabled && acts.includes(button.dataset.act)) {
    trigger(button.dataset.act, { turn: Number(button.dataset.turn) });
    return;
  }
  const summary = event.target.closest("summary");
  if (!summary) return;
  const fold = summary.parentElement;
  // The click comes before the fold moves; a key press on a summary arrives as a click too.
  if (fold.open) open.delete(fold.dataset.fold);
  else open.add(fold.dataset.fold);
});

// An update draws every fold closed; those that the reader opened are opened again.
watch("value", () => {
  for (const fold of element.querySelectorAll("details[data-fold]")) fold.open = open.has(fold.dataset.fold);
});
