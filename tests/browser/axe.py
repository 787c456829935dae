"""What axe says against parts of a page that are ours, in light and in dark colours."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

DARKEN = "dark => document.body.classList.toggle('dark', dark)"


def violations(page: Page, *parts: str) -> list[str]:
    """Return what axe finds; gradio's own parts are not ours to change.

    Args:
        page: Is left as it was.
        parts: Selectors; those that the page does not have are passed over, but not all of them.
    """
    shown = [[part] for part in parts if page.locator(part).count()]
    assert shown, f"the page has none of {', '.join(parts)}"
    page.emulate_media(reduced_motion="reduce")  # no colour is on its way to another
    is_dark = page.evaluate("document.body.classList.contains('dark')")
    found = []
    for dark in (not is_dark, is_dark):
        page.evaluate(DARKEN, dark)
        result = Axe().run(page, context={"include": shown})
        found += [
            f"{'dark' if dark else 'light'}: {each['id']}: {node['html'][:120]} "
            f"({node['failureSummary'][:200]})"
            for each in result.response["violations"]
            for node in each["nodes"]
        ]
    return found
