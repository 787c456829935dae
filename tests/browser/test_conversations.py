"""Chat as people know it, at the size of a laptop and of a phone."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.axe import violations
from tests.browser.conftest import message, opened, send, settled, visit
from tests.pages import REPLY

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")


@pytest.fixture
def page(browser: Browser, address: str, size: tuple[int, int]) -> Iterator[Page]:
    clipboard = ["clipboard-read", "clipboard-write"]
    with visit(browser, address, size, locale="en-US", permissions=clipboard) as page:
        yield page


def exchange(page: Page, text: str) -> None:
    """Send a message and wait for the reply."""
    send(page, text)
    settled(page)


def unfold(page: Page) -> None:
    """Show the list of conversations, which a phone folds."""
    fold = page.locator("#conversations details")
    if fold.get_attribute("open") is None:
        fold.locator("summary").click()


def is_whole_in_view(page: Page, *parts: str) -> bool:
    return all(
        page.locator(part).first.evaluate(
            "part => { const { top, bottom } = part.getBoundingClientRect();"
            " return top >= 0 && bottom <= innerHeight; }"
        )
        for part in parts
    )


def test_the_first_view_shows_pickers_starters_and_the_message_box(page):
    assert is_whole_in_view(page, "#policy", "#judge", "#message", "#help-strip")
    starters = page.locator("#conversation .starters button")
    expect(starters).to_have_count(4)
    for starter in starters.all():
        expect(starter).to_be_in_viewport(ratio=1)
    strip = page.locator("#help-strip > div:visible").bounding_box()
    assert strip is not None
    assert strip["height"] < 48  # one line
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]

    starters.last.click()
    expect(page.locator("#message .thumbnail-item")).to_have_count(1)
    expect(message(page)).to_have_value("This is our kitchen table. Since my father died, his chair "
        "has stayed empty, and I cannot bring myself to sit there.")  # fmt: skip
    message(page).press("Enter")
    expect(page.locator("#conversation .said img")).to_have_attribute("alt", "A drawing of a table "
        "set for one, with an empty chair on the other side")  # fmt: skip
    expect(page.locator("#conversation .answer .words")).to_be_in_viewport()
    assert is_whole_in_view(page, "#message")


def test_conversations_are_opened_searched_renamed_deleted_and_restored(page):
    exchange(page, "I lost my job")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#conversation .turn")).to_have_count(0)
    exchange(page, "My exam is near")
    unfold(page)
    rows = page.locator("#conversations .thread")
    expect(rows).to_have_count(2)
    expect(rows.first).to_have_text("● My exam is near")
    assert violations(page, "#conversations", "#conversation") == []

    page.get_by_role("searchbox").fill("lost")
    expect(rows).to_have_text(["I lost my job"])
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.get_by_role("button", name="Rename “I lost my job”").click()
    page.get_by_label("Name of the conversation").first.fill("Work, lost")
    page.keyboard.press("Enter")
    expect(rows).to_have_text(["Work, lost"])
    page.get_by_role("searchbox").fill("")
    expect(rows).to_have_count(2)

    page.get_by_role("button", name="Delete “Work, lost”").click()
    expect(rows).to_have_count(1)
    page.locator("#conversations").get_by_role("button", name="Undo").click()
    expect(page.locator("#conversation .said .words")).to_have_text("I lost my job")
    expect(message(page)).to_be_focused()


def test_replies_are_paged_and_copied_and_a_message_is_edited_in_its_bubble(page):
    exchange(page, "one")
    page.get_by_role("button", name="Copy reply 1").click()
    expect(page.locator("main > .vh[aria-live=polite]")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == REPLY
    page.get_by_role("button", name="Regenerate the reply").click()
    pager = page.get_by_role("group", name="Replies to message 1")
    expect(pager).to_contain_text("2/2")
    pager.get_by_role("button", name="Previous reply").click()
    expect(pager).to_contain_text("1/2")
    expect(pager.get_by_role("button", name="Next reply")).to_be_focused()

    message(page).fill("half a thought")
    page.get_by_role("button", name="Edit message 1").click()
    editor = page.get_by_role("textbox", name="Edit message 1")
    expect(editor).to_be_focused()
    expect(editor).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit message 1")).to_be_focused()
    page.keyboard.press("Enter")
    editor.fill("one, changed")
    assert violations(page, "#conversation") == []
    editor.press("Enter")
    expect(page.locator("#conversation .said .words")).to_have_text("one, changed")
    expect(page.locator("#conversation .answer .words")).to_be_in_viewport()
    expect(message(page)).to_have_value("half a thought")
    assert is_whole_in_view(page, "#message")


def test_draft_and_model_survive_a_reload_and_a_second_tab_follows(page):
    page.locator("#policy input").click()
    page.get_by_role("option", name="other").click()
    message(page).press_sequentially("half a thought")
    page.wait_for_timeout(1500)
    page.reload()
    expect(message(page)).to_have_value("half a thought")
    expect(page.locator("#policy input")).to_have_value("other")

    tab = opened(page.context.new_page(), page.url)
    exchange(page, "From the first tab")
    tab.bring_to_front()
    expect(tab.locator("#conversation .said .words")).to_have_text("From the first tab")
    expect(tab.locator("#conversation .log")).to_have_attribute("data-running", "no")
    exchange(tab, "From the second tab")
    page.bring_to_front()
    expect(page.locator("#conversation .said .words")).to_have_count(2)


def test_two_tabs_that_search_do_not_refresh_each_other_without_end(page):
    exchange(page, "I lost my job")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#conversation .turn")).to_have_count(0)
    exchange(page, "My exam is near")
    tab = opened(page.context.new_page(), page.url)
    for each in (page, tab):
        unfold(each)
        each.get_by_role("searchbox").fill("exam")
        expect(each.locator("#conversations .thread")).to_have_count(1)
    exchange(page, "My exam is tomorrow")
    page.wait_for_timeout(3000)
    requests: list[str] = []
    for each in (page, tab):
        each.on("request", lambda request: requests.append(request.url))
    page.wait_for_timeout(3000)

    assert requests == []
