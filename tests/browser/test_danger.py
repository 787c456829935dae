"""Danger in a real Chromium: the card in place of replies, what stays of it, and the SOS button."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.axe import violations
from tests.browser.conftest import opened, visit
from tests.pages import REPLY

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

SCREENS = ["chat", "compare", "results", "annotate", "tour"]


@pytest.fixture
def page(browser: Browser, address: str, size: tuple[int, int]) -> Iterator[Page]:
    with visit(browser, address, size, locale="en-GB") as page:
        yield page


def send(page: Page, text: str, box: str = "#message") -> None:
    page.locator(f"{box} textarea").fill(text)
    page.locator(f"{box} textarea").press("Enter")


def overlap(one: Locator, other: Locator) -> bool:
    a, b = one.bounding_box(), other.bounding_box()
    assert a is not None
    assert b is not None
    beside = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
    apart = a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"]
    return not (beside or apart)


def test_the_card_stands_beside_the_message_covers_nothing_and_lasts(page):
    send(page, "I want to kill myself")
    turns = page.locator("#conversation .turn")
    card = turns.nth(0).locator(".risk")
    said = turns.nth(0).locator(".said .words")

    expect(card.get_by_role("link", name="116 123")).to_be_visible()
    expect(card.get_by_role("link", name="999")).to_have_attribute("href", "tel:999")
    expect(said).to_be_in_viewport()
    assert card.evaluate("card => getComputedStyle(card).position") == "static"
    assert not overlap(card, said)
    log = page.locator("#conversation .log")  # clips the card
    assert log.evaluate("log => getComputedStyle(log).overflowY") == "auto"
    assert not overlap(log, page.locator("#message"))
    expect(page.locator("#message textarea")).to_be_editable()

    # One denial does not end it; the visitor can fold the card, and it stays folded.
    card.locator("summary").click()
    send(page, "I was joking")
    expect(turns).to_have_count(2)
    expect(turns.nth(1).locator(".risk")).to_contain_text("your next message can get a reply")
    expect(card.get_by_role("link", name="116 123")).to_be_hidden()
    expect(page.locator("#conversation .answer")).to_have_count(0)
    assert violations(page, "#conversation") == []

    # It stays reachable when the conversation is cleared, and after a reload.
    page.locator("#conversation [data-act=clear_all]").click()
    expect(turns).to_have_count(0)
    standing = page.locator("#conversation [data-card=standing]")
    expect(standing).to_contain_text("Help is still here")
    page.reload()
    expect(standing).to_contain_text("Help is still here")
    standing.locator("summary").click()
    expect(standing.get_by_role("link", name="999")).to_be_visible()

    send(page, "I called somebody")
    expect(page.locator("#conversation .answer .words")).to_have_text(REPLY)
    expect(standing).to_have_count(1)


def test_compare_shows_the_message_and_the_same_card_in_place_of_replies(page):
    page.locator("#screen-compare-button").click()
    send(page, "My husband hits me", "#compare-message")
    card = page.locator("#compare-talk .risk")
    said = page.locator("#compare-talk .said .words")

    expect(card).to_contain_text("get to a safe place first")
    expect(said).to_have_text("My husband hits me")
    expect(page.locator("#compare-talk .side")).to_have_count(0)
    assert not overlap(card, said)
    assert not overlap(card, page.locator("#compare-message"))
    expect(page.locator("#compare-message textarea")).to_be_editable()


def test_sos_is_on_every_screen_and_opens_the_lines_of_the_region(page):
    sos = page.locator("[data-sos]:visible")
    for screen in SCREENS:
        page.locator(f"#screen-{screen}-button").click()
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(sos).to_be_in_viewport()
    expect(sos).to_have_accessible_name("SOS Help lines")

    page.evaluate("scrollTo(0, 0)")
    sos.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Help lines")
    near = dialog.get_by_role("list", name="Where you are").get_by_role("link")
    expect(near).to_have_text(["116 123", "999"])
    expect(dialog.get_by_role("list", name="Elsewhere").get_by_role("link")).not_to_have_count(0)
    expect(near.first).to_be_focused()
    assert page.evaluate("document.documentElement.scrollWidth") == page.viewport_size["width"]
    assert violations(page, ".helplines[open]") == []
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(sos).to_be_focused()

    sos.click()
    dialog.get_by_role("button", name="Close").click()
    expect(sos).to_be_focused()


def test_sos_speaks_chinese_and_knows_china(browser, address):
    context = browser.new_context(locale="zh-CN")
    context.set_default_timeout(30_000)
    page = opened(context.new_page(), address)
    page.locator("[data-sos]:visible").click()
    dialog = page.get_by_role("dialog", name="求助热线")

    expect(dialog.locator(".near a")).to_have_text(["12356", "120", "110"])
    context.close()
