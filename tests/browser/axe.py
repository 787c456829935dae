"""Runs axe on our own parts of a page, in light and in dark colours."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

DARKEN = "dark => document.body.classList.toggle('dark', dark)"
RUN = """parts => axe.run({include: parts}, {resultTypes: ["violations"]})
    .then(result => result.violations)"""
"""Unlike `Axe().run`, it does not load the script again or return what has no fault: a third faster."""


def violations(page: Page, *parts: str) -> list[str]:
    """Return axe's violations; gradio's own parts are excluded.

    Args:
        page: Restored afterwards.
        parts: Selectors; missing ones are skipped, but not all of them may be missing.
    """
    shown = [[part] for part in parts if page.locator(part).count()]
    assert shown, f"the page has none of {', '.join(parts)}"
    page.emulate_media(reduced_motion="reduce")  # no colour is on its way to another
    is_dark = page.evaluate("document.body.classList.contains('dark')")
    page.evaluate(Axe().axe_script)
    found = []
    for dark in (not is_dark, is_dark):
        page.evaluate(DARKEN, dark)
        found += [
            f"{'dark' if dark else 'light'}: {each['id']}: {node['html'][:120]} "
            f"({node['failureSummary'][:200]})"
            for each in page.evaluate(RUN, shown)
            for node in each["nodes"]
        ]
    return found
