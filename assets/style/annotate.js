// Runs once for the annotation desk; gradio provides `element`. The server renders the HTML; this script fetches
// it, saves drafts, and reports whether they arrived.
const desk = element.querySelector("[data-desk]");
const chinese = document.documentElement.lang.startsWith("zh");
const words = desk.querySelector(`[data-opening][data-in=${chinese ? "zh" : "en"}]`).dataset;
const name = () => [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("");
const tab = name();
const DEBOUNCE = 500, BEAT = 8000, IDLE = 120000, LONGEST_WAIT = 30000;

let place = "work"; // what is open
let form = null; // of the item that is open
let changes = 0; // since the item was opened
let kept = 0; // of these, how many have arrived
let sending = null; // the draft that is on its way
let timer = null;
let wait = 0; // until the next try, in milliseconds
let pending = null; // an answer that has not arrived yet
let seconds = 0;
let lastTouch = 0;
const folds = new Map();
// A link to sign in carries the token behind "#", which no server sees; it leaves the address bar at once.
const invited = new URLSearchParams(location.hash.slice(1)).get("desk") || "";
if (invited) history.replaceState(history.state, "", location.pathname + location.search);

// Announce to screen readers.
const live = document.createElement("div");
live.className = "vh";
live.setAttribute("aria-live", "polite");
element.append(live);

class Offline extends Error {}
class Refused extends Error {
  constructor(status, told) { super(told.error || ""); Object.assign(this, { status, code: told.code, html: told.html }); }
}

async function post(path, body) {
  let answer;
  const sent = body instanceof FormData ? { body } : { headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  try {
    answer = await fetch(`desk/${path}`, { method: "POST", ...sent });
  } catch {
    throw new Offline();
  }
  let told;
  try { told = await answer.json(); } catch { throw new Offline(); } // a proxy speaks for the server
  if (answer.ok) return told;
  if (answer.status >= 500) throw new Offline(told.error);
  throw new Refused(answer.status, told);
}

const find = (selector) => desk.querySelector(selector);
const clock = (moment) => new Date(moment).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });

// --- rendering -------------------------------------------------------------------------------------

function draw(html, said = "", focus = true) {
  clearTimeout(timer);
  pending = null;
  desk.innerHTML = html; // drawn by the server, which escapes every word
  const inside = find("[data-place]");
  place = inside?.dataset.place || "work";
  form = find("form[data-form=answer]");
  changes = kept = wait = 0;
  sending = null;
  seconds = form ? Number(form.dataset.seconds) : 0;
  lastTouch = Date.now();
  for (const time of desk.querySelectorAll("time[datetime]")) time.textContent = clock(time.dateTime);
  for (const fold of desk.querySelectorAll("details[data-fold]")) fold.open = folds.get(fold.dataset.fold) ?? false;
  const keys = find("[data-keys]");
  if (keys) keys.checked = keysOn();
  if (form?.dataset.saved) status(words.saved.replace("%t", clock(form.dataset.saved)));
  live.textContent = said;
  const link = find("[data-link]");
  if (link) link.value = `${location.origin}${location.pathname}?screen=annotate#desk=${link.dataset.link}`;
  const door = document.getElementById("desk-token");
  if (door && invited) door.value = invited;
  const title = document.getElementById(inside?.dataset.place === "outside" ? "desk-outside" : "desk-item-title");
  if (focus && title) {
    title.focus({ preventScroll: true });
    if (title.getBoundingClientRect().top < 0) title.scrollIntoView({ block: "start" });
  }
}

function status(text) {
  const line = find("[data-status]");
  if (line && line.textContent !== text) line.textContent = text;
}

function tell(text, where = ".desk-said, [data-form-said]") {
  const lines = [...desk.querySelectorAll(where)];
  const line = lines.find((each) => each.matches("[data-form-said]")) || lines[0];
  for (const each of lines) each.hidden = each !== line || !text;
  if (line) line.textContent = text;
}

function failed(error) {
  // After a sign-out, unsaved input stays visible.
  if (error instanceof Refused && error.html && (!form || kept === changes)) { draw(error.html, error.message); return; }
  if (error instanceof Refused && error.code === "item_open_elsewhere") writes(false);
  tell(error.message || words.offline);
}

async function show(body, focus = true) {
  desk.setAttribute("aria-busy", "true");
  try {
    await flush();
    const told = await post("view", { tab, place, ...body });
    leave();
    draw(told.html, told.said, focus);
  } catch (error) {
    if (desk.querySelector("[data-opening]") && error instanceof Offline) {
      for (const each of desk.querySelectorAll("[data-opening] p")) each.textContent = words.offline;
      timer = setTimeout(() => show(body, focus), 5000);
    } else failed(error);
  } finally {
    desk.removeAttribute("aria-busy");
  }
}

// --- drafts ----------------------------------------------------------------------------------------

const chosen = (field) => form.querySelector(`input[name=${field}]:checked`)?.value ?? null;

function filledIn() {
  const steps = [1, 2, 3].map((number) => ({ right: true, wrong: false })[chosen(`step-${number}`)] ?? null);
  const confidence = chosen("confidence");
  return {
    steps,
    preference: chosen("preference"),
    confidence: confidence === null ? null : Number(confidence),
    note: form.querySelector("textarea").value,
    seconds: Math.round(seconds),
  };
}

const asked = () => ({ tab, place, item: form.dataset.item, form: filledIn() });
const mayWrite = () => form && form.dataset.writes === "yes";

function changed() {
  if (!mayWrite() || pending) return;
  changes += 1;
  tell("");
  status(words.saving);
  clearTimeout(timer);
  timer = setTimeout(keep, wait ? Math.min(wait, DEBOUNCE) : DEBOUNCE);
}

async function keep() {
  clearTimeout(timer);
  if (sending) await sending;
  if (!mayWrite() || pending || kept === changes) return;
  const of = form, now = changes;
  sending = post("draft", asked()).then(
    (told) => {
      if (of !== form) return;
      kept = Math.max(kept, now);
      if (!of.dataset.saved) { // the first draft of this item
        of.dataset.saved = told.saved;
        const count = find("[data-count=drafts]");
        if (count) count.textContent = Number(count.textContent) + 1;
      }
      wait = 0;
      again(false);
      if (kept === changes) status(words.saved.replace("%t", clock(told.saved)));
    },
    (error) => {
      if (of !== form) return;
      if (error instanceof Offline) later(keep, words.keptOffline);
      else { status(words.unsaved); failed(error); }
    },
  );
  await sending;
  sending = null;
}

// Without an answer from the server the draft stays in the page and is resent with growing delays.
function later(what, sentence) {
  wait = Math.min(wait ? wait * 2 : 2000, LONGEST_WAIT);
  status(sentence.replace("%s", Math.round(wait / 1000)));
  again(true);
  clearTimeout(timer);
  timer = setTimeout(what, wait);
}

function again(shown) {
  const button = find("[data-retry]");
  if (button) button.hidden = !shown;
}

async function flush() {
  if (form && mayWrite() && kept !== changes && !pending) await keep();
  if (form && mayWrite() && kept !== changes && !pending) throw new Offline();
}

function retry() {
  if (pending) send();
  else if (form && kept !== changes) keep();
}

// --- answers ---------------------------------------------------------------------------------------

function save() {
  if (!mayWrite() || pending) return;
  clearTimeout(timer);
  const groups = [...form.querySelectorAll("[role=radiogroup]")];
  const open = groups.find((group) => !group.querySelector("input:checked"));
  const body = { ...asked(), token: name() };
  const of = form;
  if (open) { // the server says which sentence belongs to it
    post("answer", body).catch((error) => {
      if (of !== form) return;
      failed(error);
      open.querySelector("input").focus();
    });
    return;
  }
  pending = body;
  send();
}

async function send() {
  clearTimeout(timer);
  const body = pending, of = form;
  if (!body) return;
  form.querySelector("fieldset.all").disabled = true;
  status(words.saving);
  if (sending) await sending;
  try {
    const told = await post("answer", body);
    if (of === form) draw(told.html, told.said);
  } catch (error) {
    if (of !== form) return;
    if (error instanceof Offline) { later(send, words.keptAnswer); return; }
    pending = null;
    form.querySelector("fieldset.all").disabled = !mayWrite();
    status(words.unsaved);
    failed(error);
    if (error.code === "reason_missing" || error.code === "note_too_long") form.querySelector("textarea").focus();
  }
}

async function undo() {
  if (pending) return;
  try {
    await flush();
    const told = await post("undo", { tab, place });
    leave();
    draw(told.html, told.said);
  } catch (error) {
    failed(error);
  }
}

// --- one tab edits, the others only read--------------------------------------------------------------

function writes(may) {
  form.dataset.writes = may ? "yes" : "no";
  form.querySelector("fieldset.all").disabled = !may;
  form.querySelector("button[type=submit]").disabled = !may;
  form.querySelector("[data-read-only]").hidden = may;
}

async function beat() {
  if (!form || pending || document.hidden) return;
  const of = form, item = form.dataset.item;
  try {
    const told = await post("hold", { tab, place, item });
    if (of !== form) return;
    if (told.may_write && !mayWrite()) show({ item }, false);
    else if (!told.may_write && mayWrite()) { clearTimeout(timer); writes(false); }
  } catch {
    // The next heartbeat or draft will show.
  }
}
setInterval(beat, BEAT);

function leave() {
  if (!form) return;
  const body = JSON.stringify({ tab, place, item: form.dataset.item });
  navigator.sendBeacon("desk/leave", new Blob([body], { type: "application/json" }));
}
addEventListener("pagehide", leave);
addEventListener("pageshow", (event) => { if (event.persisted && form) show({ item: form.dataset.item }, false); });
addEventListener("online", retry);
addEventListener("beforeunload", (event) => {
  if (form && (pending || kept !== changes)) event.preventDefault();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) beat(); });

// The answering time pauses while the page is hidden or idle.
setInterval(() => {
  if (form && !document.hidden && visible() && Date.now() - lastTouch < IDLE) seconds += 1;
}, 1000);
for (const kind of ["pointermove", "keydown", "scroll"])
  document.addEventListener(kind, () => { lastTouch = Date.now(); }, { passive: true, capture: true });

// --- events----------------------------------------------------------------------------------------

element.addEventListener("input", (event) => {
  if (event.target.matches("[data-keys]")) remember(event.target.checked);
  else if (form?.contains(event.target)) changed();
});

element.addEventListener("toggle", (event) => {
  if (event.target.dataset?.fold) folds.set(event.target.dataset.fold, event.target.open);
}, true);

element.addEventListener("submit", (event) => {
  const kind = event.target.dataset.form;
  if (!kind) return; // the dialog's own
  event.preventDefault();
  if (kind === "answer") save();
  else if (kind === "owner") manage(event.target);
  else logIn(event.target);
});

element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const data = button.dataset;
  if ("go" in data) { place = data.go; show({ place: data.go }); }
  else if ("open" in data) show({ item: data.open });
  else if ("again" in data) show({});
  else if ("undo" in data) undo();
  else if ("retry" in data) retry();
  else if ("help" in data) find("dialog").showModal();
  else if ("logout" in data) logOut();
  else if ("copy" in data) copyLink(button);
});

// The owner's forms. An error stays beside its form, which keeps what was entered.
async function manage(of) {
  if (of.dataset.confirm && !confirm(of.dataset.confirm)) return;
  const said = of.querySelector("[role=alert]"), button = of.querySelector("button:not([type=button])");
  if (said) said.hidden = true;
  button.disabled = true;
  desk.setAttribute("aria-busy", "true");
  try {
    const told = await post(`owner/${of.dataset.action}`, new FormData(of));
    draw(told.html, told.said);
  } catch (error) {
    if (!said || error.html) failed(error);
    else { said.hidden = false; said.textContent = error.message || words.offline; }
  } finally {
    button.disabled = false;
    desk.removeAttribute("aria-busy");
  }
}

async function copyLink(button) {
  const link = find("[data-link]");
  link.select();
  try { await navigator.clipboard.writeText(link.value); } catch { document.execCommand("copy"); }
  live.textContent = button.textContent = button.dataset.copied;
}

async function logIn(door) {
  const box = door.querySelector("input"), said = door.querySelector("[role=alert]"), button = door.querySelector("button");
  const token = box.value.trim();
  const wrong = (sentence) => { said.hidden = false; said.textContent = sentence; box.focus(); };
  if (!token) return wrong(words.loginEmpty);
  said.hidden = true;
  button.disabled = true;
  live.textContent = words.loggingIn;
  try {
    await post("login", { token });
    box.value = "";
    place = "work";
    await show({ place });
  } catch (error) {
    wrong(error.message || words.offline);
  } finally {
    button.disabled = false;
  }
}

async function logOut() {
  try {
    await flush();
    leave();
    const told = await post("logout", {});
    draw(told.html);
  } catch (error) {
    failed(error);
  }
}

// --- keys ------------------------------------------------------------------------------------------

function keysOn() {
  try { return localStorage.getItem("compeer-desk-keys") !== "off"; } catch { return find("[data-keys]")?.checked ?? true; }
}
function remember(on) {
  try { localStorage.setItem("compeer-desk-keys", on ? "on" : "off"); } catch { /* holds until the page is left */ }
}
const visible = () => element.offsetParent !== null && element.getClientRects().length > 0;
const typing = (target) => target.isContentEditable || target.matches("textarea, select, input:not([type=radio]):not([type=checkbox])");

// With another keyboard layout or an input method, use the position of the key.
function keyOf(event) {
  if (/^[a-zA-Z0-9?]$/.test(event.key) || event.key === "Enter") return event.key.toLowerCase();
  return event.code.replace(/^(Key|Digit|Numpad)/, "").toLowerCase();
}

function choose(field, value) {
  const input = form.querySelector(`input[name=${field}][value=${value}]`);
  if (!input || !mayWrite() || pending) return;
  input.checked = true;
  input.focus({ preventScroll: true });
  input.closest("fieldset").scrollIntoView({ block: "nearest" });
  changed();
}

document.addEventListener("keydown", (event) => {
  if (!visible() || !find(".inside:not(.owner)") || find("dialog")?.open || event.defaultPrevented) return;
  const target = event.target;
  if (target.id === "desk-note" && !event.isComposing) {
    if (event.key === "Escape") { document.getElementById("desk-item-title").focus(); return; }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); save(); return; }
  }
  if (typing(target) || event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat || !keysOn()) return;
  const key = keyOf(event);
  if (key === "?") find("dialog").showModal();
  else if (key === "z") undo();
  else if (key === "enter") {
    if (!form || target.closest("button, a, summary, [data-keys]")) return;
    save();
  } else if (form && "qwe".includes(key)) choose(`step-${"qwe".indexOf(key) + 1}`, event.shiftKey ? "wrong" : "right");
  else if (form && "1234".includes(key)) choose("preference", ["first", "second", "both", "neither"][Number(key) - 1]);
  else return;
  event.preventDefault();
});

show({}, false);
