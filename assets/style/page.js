() => {
  // The server replaces WORDS by the labels that gradio provides in English only.
  const words = WORDS[document.documentElement.lang.startsWith("zh") ? "zh" : "en"];
  const dark = () => document.body.classList.contains("dark");
  const set = (on) => document.body.classList.toggle("dark", on);
  try {
    const chosen = localStorage.getItem("compeer-theme");
    if (chosen) set(chosen === "dark");
  } catch {
    // Without storage, follow the system's setting.
  }
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme-switch")) return;
    set(!dark());
    try {
      localStorage.setItem("compeer-theme", dark() ? "dark" : "light");
    } catch {
      // The choice lasts until the page is closed.
    }
  });

  // The URL names the screen, so that a link or a reload returns to it.
  const tab = (name) => document.getElementById(`screen-${name}-button`);
  const asked = new URLSearchParams(location.search).get("screen");
  const open = () => {
    const button = tab(asked);
    if (button) button.click();
    return button;
  };
  if (asked && !open()) {
    const waiting = new MutationObserver(() => open() && waiting.disconnect());
    waiting.observe(document.body, { childList: true, subtree: true });
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-screen]");
    if (link) {
      event.preventDefault();
      tab(link.dataset.screen)?.click();
      window.scrollTo({ top: 0 });
      return;
    }
    const button = event.target.closest("#screens button[role=tab]");
    if (!button) return;
    const name = button.id.replace(/^screen-|-button$/g, "");
    const address = new URL(location.href);
    if (name === "chat") address.searchParams.delete("screen");
    else address.searchParams.set("screen", name);
    history.replaceState(history.state, "", address);
  });

  // SOS opens the help lines, those of the reader's country first. The browser moves the focus into the dialog
  // and back to the button, and closes it on Escape.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-sos]");
    if (!button) return;
    const dialog = document.getElementById(button.dataset.sos);
    const near = dialog.querySelector(".near");
    if (!near.children.length)
      for (const line of dialog.querySelectorAll("[data-regions]"))
        if (line.dataset.regions.split(" ").includes(document.documentElement.dataset.region)) near.append(line);
    dialog.showModal();
  });

  // A redraw replaces the help cards; fold them as the visitor left them.
  const isOpen = new Map();
  document.addEventListener("click", (event) => {
    const card = event.target.closest("[data-card] > summary")?.parentElement;
    if (card) isOpen.set(card.dataset.card, !card.open); // the click fires before <details> toggles
  });
  const fold = () => {
    for (const card of document.querySelectorAll("[data-card]")) card.open = isOpen.get(card.dataset.card) ?? card.open;
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-forget]");
    if (!button || !confirm(button.dataset.sure)) return;
    const said = button.parentElement.querySelector("[role=status]");
    try {
      const answer = await fetch("forget", { method: "POST" });
      const gone = await answer.json();
      if (gone.code === "store") {
        said.textContent = button.dataset.half;
        return;
      }
      if (!answer.ok) throw new Error(answer.status);
      try { localStorage.removeItem("compeer-models"); } catch { /* the browser stores nothing */ }
      const sentence = gone.erased ? button.dataset.done : button.dataset.traces;
      said.textContent = sentence.replace("%b", gone.battles).replace("%v", gone.votes);
      setTimeout(() => location.reload(), gone.erased ? 2500 : 10000);
    } catch {
      said.textContent = button.dataset.failed;
    }
  });

  const labels = {
    ".submit-button": words.send,
    ".stop-button": words.stop,
    "[data-testid=upload-button]": words.attach,
    ".delete-button": words.remove,
  };
  const label = () => {
    fold();
    for (const [selector, text] of Object.entries(labels))
      for (const button of document.querySelectorAll(`:is(#message, #compare-message) ${selector}`))
        if (button.getAttribute("aria-label") !== text) {
          button.setAttribute("aria-label", text);
          button.title = text;
        }
    if (window.compeerFocusMessage) {
      window.compeerFocusMessage = false;
      const box = document.querySelector("#message textarea");
      box?.focus();
      box?.setSelectionRange(box.value.length, box.value.length);
    }
  };
  label();
  new MutationObserver(label).observe(document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["aria-label"] });
}
