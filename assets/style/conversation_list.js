// Runs once for the list of conversations; gradio provides `element`, `trigger` and `watch`.
const acts = ["open_conversation", "new_conversation", "delete_conversation"];
const wide = matchMedia("(min-width: 1180px)"); // as in screen_chat.css
let isOpen = wide.matches;
let query = "";
let focus = null; // what to focus after the next update
wide.addEventListener("change", () => { isOpen = wide.matches; settle(); });

element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  if (button && acts.includes(button.dataset.act)) {
    const { act, id } = button.dataset;
    if (act === "delete_conversation") focus = ".undo button, .new-chat";
    else {
      if (!wide.matches) isOpen = false;
      window.compeerFocusMessage = true;
    }
    trigger(act, { id });
    return;
  }
  const rename = event.target.closest("[data-rename]");
  if (rename) {
    const form = rename.parentElement.querySelector("form");
    form.hidden = !form.hidden;
    if (!form.hidden) form.elements.title.select();
    return;
  }
  const fold = event.target.closest("summary")?.parentElement;
  if (fold) isOpen = !fold.open; // the click fires before <details> toggles
});
element.addEventListener("submit", (event) => {
  event.preventDefault();
  const { id } = event.target.dataset;
  focus = `li[data-id="${CSS.escape(id)}"] [data-rename]`;
  trigger("rename_conversation", { id, title: event.target.elements.title.value });
});
element.addEventListener("keydown", (event) => {
  const form = event.key === "Escape" && event.target.closest("form");
  if (!form) return;
  form.hidden = true;
  form.parentElement.querySelector("[data-rename]").focus();
});
element.addEventListener("input", (event) => {
  if (event.target.type !== "search") return;
  query = event.target.value;
  trigger("search_conversations", { query });
});

// An update replaces the list; keep it open, its search, and the focus.
let held = false;
element.addEventListener("focusin", (event) => { held = event.target.type === "search"; });
element.addEventListener("focusout", (event) => { if (event.target.isConnected) held = false; });
function settle() {
  const fold = element.querySelector("details");
  if (!fold) return;
  fold.open = isOpen;
  const search = element.querySelector("[type=search]");
  if (search) {
    const drawn = search.defaultValue;
    search.value = query;
    if (held) search.focus();
    if (drawn !== query) trigger("search_conversations", { query });
  } else query = "";
  if (focus) element.querySelector(focus)?.focus();
  focus = null;
  window.compeerChanged?.();
}
watch("value", settle);
requestAnimationFrame(settle);
