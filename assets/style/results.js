// Runs once for the form of the results; gradio provides `element`, `trigger` and `watch`.
// Requests the board when the tab is shown, when a filter changes, and on retry.
const board = () => document.querySelector("#results-board [data-state]");
const form = () => element.querySelector("form");

// Outside the HTML that is replaced, which would be announced twice or not at all.
const live = document.createElement("div");
live.className = "vh";
live.setAttribute("aria-live", "polite");
(document.querySelector("main") || document.body).append(live);

let shown = false;
let later = 0;
let announced = "";

function query() {
  const drawn = form();
  if (!drawn) return new URLSearchParams(location.search).get("filters") ?? "";
  const chosen = [...new FormData(drawn)].filter(([name, value]) => value && !(name === "kind" && value === "blind"));
  return new URLSearchParams(chosen).toString();
}

function ask() {
  trigger("look", { query: query(), form: form()?.dataset.key ?? "" });
}

function choose() {
  const address = new URL(location.href);
  if (query()) address.searchParams.set("filters", query());
  else address.searchParams.delete("filters");
  history.replaceState(history.state, "", address);
  ask();
}

element.addEventListener("change", choose);
element.addEventListener("submit", (event) => event.preventDefault());
element.addEventListener("click", (event) => {
  if (!event.target.closest("[data-reset]")) return;
  for (const select of element.querySelectorAll("select")) select.selectedIndex = 0;
  for (const box of element.querySelectorAll("input[type=checkbox]")) box.checked = false;
  choose();
});

document.addEventListener("click", async (event) => {
  if (event.target.closest("#results-board [data-again]")) ask();
  const copy = event.target.closest("#results-board [data-copy]");
  if (!copy) return;
  const text = copy.parentElement.querySelector("pre");
  try {
    await navigator.clipboard.writeText(text.textContent);
    copy.textContent = live.textContent = copy.dataset.done;
  } catch {
    getSelection().selectAllChildren(text); // then the keyboard copies it
  }
});

// A hidden tab has no size. Request again when it is shown, since others may have voted.
const panel = element.closest("[role=tabpanel]") ?? element;
new IntersectionObserver(([entry]) => {
  const now = entry.isIntersecting;
  if (now && !shown) ask();
  if (panel.offsetParent === null || now) shown = now;
}).observe(panel);

// Boards may arrive in another order than requested; if the last one is not the latest, request again.
const sorted = (text) => [...new URLSearchParams(text)].map(String).sort().join("&");
function insist(wait) {
  clearTimeout(later);
  const drawn = board()?.dataset.query;
  if (drawn === undefined || !form() || sorted(drawn) === sorted(query())) return;
  ask();
  later = setTimeout(() => insist(Math.min(2 * wait, 5000)), wait);
}

function settle() {
  const drawn = board();
  if (!drawn || drawn.dataset.query === undefined) return;
  clearTimeout(later);
  later = setTimeout(() => insist(500), 50);
  const said = drawn.querySelector("[data-announce]")?.textContent ?? "";
  if (announced && said !== announced) live.textContent = said;
  announced = said;
}
const drawing = document.getElementById("results-board");
if (drawing) new MutationObserver(settle).observe(drawing, { childList: true, subtree: true });
