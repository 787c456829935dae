() => {
  // WORDS is put in by the server: the labels that gradio has in English only.
  const words = WORDS[document.documentElement.lang.startsWith("zh") ? "zh" : "en"];
  const dark = () => document.body.classList.contains("dark");
  const set = (on) => document.body.classList.toggle("dark", on);
  try {
    const chosen = localStorage.getItem("compeer-theme");
    if (chosen) set(chosen === "dark");
  } catch {
    // A browser that keeps nothing follows the system's setting.
  }
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme-switch")) return;
    set(!dark());
    try {
      localStorage.setItem("compeer-theme", dark() ? "dark" : "light");
    } catch {
      // The choice holds until the page is left.
    }
  });

  const labels = {
    ".submit-button": words.send,
    ".stop-button": words.stop,
    "[data-testid=upload-button]": words.attach,
    ".delete-button": words.remove,
  };
  const label = () => {
    for (const [selector, text] of Object.entries(labels))
      for (const button of document.querySelectorAll(`#message ${selector}`))
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
