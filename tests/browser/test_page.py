"""Chat in a real Chromium with scripted models."""

import json
import re
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser.axe import violations
from tests.browser.conftest import message, opened, send, settled
from tests.pages import REPLY, SECOND_REPLY, eventually
from ui_components.shared.services import Services

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

OWN_PARTS = [
    "#top-bar",
    "#help-strip",
    "#note",
    "#conversations",
    "#conversation",
    "#error",
    "#inspector",
    "#foot",
]
SECRET = "The words that nobody may find again"


def attach(page: Page, *paths: Path) -> None:
    """Add files to the message, as the file dialog would."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add photos").click()
    chooser.value.set_files(paths)


def photo(path: Path, size: tuple[int, int] = (80, 60)) -> Path:
    PIL.Image.new("RGB", size, "teal").save(path)
    return path


# --- a conversation ------------------------------------------------------------------------------


def test_a_person_types_and_sees_the_steps_light_up_the_reply_and_the_scores(page):
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => {
                for (const step of document.querySelectorAll("#conversation .steps li")) {
                    const now = step.dataset.step + " " + step.className.replace("is-", "");
                    if (!window.seen.includes(now)) window.seen.push(now);
                }
            }).observe(document.querySelector("#conversation"), {childList: true, subtree: true, attributes: true});
        }"""
    )
    send(page, "I lost my job. Slowly, please.")
    expect(page.locator("#inspector .card[data-part=history]")).to_have_attribute(
        "data-state", re.compile("writing|done")
    )
    expect(page.locator("#message .stop-button")).to_be_visible()
    expect(page.locator("#conversation .answer .words")).to_have_text(REPLY)
    settled(page)

    seen = page.evaluate("window.seen")
    begun = [step.split()[0] for step in seen if step.endswith("writing")]
    assert begun == ["history", "emotion", "strategy", "reply"]
    inspector = page.locator("#inspector")
    expect(inspector.locator(".verdict.is-right")).to_have_count(2)
    expect(inspector.locator(".verdict.is-wrong")).to_contain_text("66 % confident")
    expect(inspector.locator(".tally")).to_have_text(re.compile("2 of 3 steps judged correct$"))
    expect(inspector.locator(".total")).to_contain_text("+2 of 4")
    expect(inspector.locator(".earned")).to_contain_text("reply no baseline")
    expect(inspector.locator(".is-intensity")).to_contain_text("4 of 5")
    expect(page.locator("#message .submit-button")).to_be_visible()
    expect(message(page)).to_have_value("")


def test_turns_can_be_paged_through_and_folds_stay_open(page):
    send(page, "one")
    settled(page)
    raw = page.locator("#inspector details[data-fold=raw]")
    raw.locator("summary").click()
    expect(raw.locator("pre")).to_contain_text("<history>")
    send(page, "two, slowly again")
    expect(raw).to_have_attribute("open", "")
    settled(page)

    expect(raw.locator("pre")).to_be_visible()
    expect(page.locator("#inspector svg[role=img]")).to_be_visible()
    page.get_by_role("button", name="Previous turn").click()
    expect(page.locator("#inspector")).to_contain_text("Turn 1 of 2")
    page.locator("#conversation .turn").nth(1).locator(".chip").click()
    expect(page.locator("#inspector")).to_contain_text("Turn 2 of 2")


def test_a_reply_is_stopped_and_tried_again(page):
    send(page, "Write for ever")
    expect(page.locator("#inspector .card[data-state=done]").first).to_be_visible()
    page.locator("#message .stop-button").click()
    expect(page.locator("#conversation")).to_contain_text("You stopped this reply")
    expect(page.locator("#conversation .said")).to_contain_text("Write for ever")
    expect(page.locator("#message .submit-button")).to_be_visible()

    page.get_by_role("button", name="Edit message 1").click()
    editor = page.locator("#conversation .edit textarea")
    expect(editor).to_have_value("Write for ever")
    editor.fill("Fail")
    editor.press("Enter")
    expect(page.locator("#conversation")).to_contain_text("The reply could not be generated")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#conversation .turn")).to_have_attribute("data-outcome", "failed")


def test_a_starter_fills_the_box_and_the_box_has_the_focus(page):
    page.get_by_role("button", name="The night before an exam").click()

    expect(message(page)).to_have_value(re.compile("My last exam is tomorrow"))
    expect(message(page)).to_be_focused()


def test_who_judges_can_be_nobody_and_the_seed_can_be_chosen(page):
    page.locator("#judge input").click()
    page.get_by_role("option", name="None (no scores)").click()
    page.locator("#settings button").first.click()
    page.locator("#seed input, #seed textarea").fill("41")
    send(page, "hello")
    settled(page)

    expect(page.locator("#inspector")).to_contain_text("no total: no judge")
    page.locator("#inspector details[data-fold=facts] summary").click()
    expect(page.locator("#inspector .facts")).to_contain_text("41")


def test_a_quotation_highlights_its_words_and_words_nobody_said_are_named(page):
    send(page, "I lost my job.")
    settled(page)
    send(page, "😀 My boss shouted at me.")
    settled(page)
    highlighted = "[...CSS.highlights.get('quoted')].map(range => range.toString())"
    first, second = (page.locator("#inspector .quotation").nth(number) for number in (0, 1))

    second.hover()
    eventually(lambda: page.evaluate(highlighted) == ["My boss shouted"])
    page.locator("#inspector h2").hover()
    eventually(lambda: page.evaluate(highlighted) == [])
    first.focus()
    eventually(lambda: page.evaluate(highlighted) == ["lost my job"])
    page.keyboard.press("Enter")
    expect(first).to_be_focused()
    expect(page.locator("#said-0")).to_be_in_viewport()
    page.keyboard.press("Tab")
    eventually(lambda: page.evaluate(highlighted) == ["My boss shouted"])

    card = page.locator("#inspector .card[data-part=history]")
    expect(card.locator(".ground")).to_have_text("not said")
    expect(card.locator("mark")).to_have_text("I hate my job")
    expect(page.locator("#inspector .card[data-part=emotion] .ground")).to_have_text("no photo")
    expect(page.locator("#inspector .grounding")).to_contain_text(
        "Quotations: 2 found in the conversation, 1 not said."
    )
    assert violations(page, "#inspector", "#conversation") == []


# --- pictures ------------------------------------------------------------------------------------


def test_a_photo_goes_with_the_message_and_stands_beside_the_emotion(page, tmp_path):
    attach(page, photo(tmp_path / "one.png"), photo(tmp_path / "two.png", (50, 90)))
    expect(page.locator("#message .thumbnail-item")).to_have_count(2)
    page.locator("#alt input, #alt textarea").fill("Rain on a window")
    send(page, "This is my street.")
    settled(page)

    shown = page.locator("#conversation .said img")
    expect(shown).to_have_count(2)
    expect(shown.first).to_have_attribute("alt", "Rain on a window")
    eventually(lambda: shown.first.evaluate("image => image.naturalWidth") == 80)
    expect(page.locator("#inspector .thumb")).to_have_count(2)
    expect(page.locator("#message .thumbnail-item")).to_have_count(0)


def test_a_bad_upload_is_refused_at_the_field_and_the_words_are_kept(page, tmp_path):
    (tmp_path / "notes.png").write_text("no picture", encoding="utf-8")
    attach(page, tmp_path / "notes.png")
    expect(page.locator("#message .thumbnail-item")).to_have_count(1)
    message(page).fill("Look at this")
    message(page).press("Enter")

    expect(page.locator("#error [role=alert]")).to_contain_text("notes.png is not an image")
    expect(message(page)).to_have_value("Look at this")
    expect(page.locator("#conversation .turn")).to_have_count(0)


def test_an_upload_over_eight_megabytes_is_refused(page, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (1900, 1900, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(tmp_path / "huge.png", compress_level=0)
    attach(page, tmp_path / "huge.png")

    expect(page.locator(".toast-body")).to_contain_text(re.compile("size", re.IGNORECASE))


def test_a_paste_of_twenty_thousand_characters_is_refused_and_kept(page):
    message(page).evaluate(
        """(box) => {
            const data = new DataTransfer();
            data.setData("text/plain", "x".repeat(20000));
            box.focus();
            box.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
        }"""
    )
    expect(page.locator("#message .thumbnail-item")).to_have_count(0)  # it did not become a file
    message(page).fill("x" * 20_000)
    message(page).press("Enter")

    expect(page.locator("#error [role=alert]")).to_contain_text(
        "20000 characters; the limit is 4000"
    )
    expect(message(page)).to_have_value("x" * 20_000)


# --- reloads and privacy -------------------------------------------------------------------------


def test_a_reload_keeps_the_conversation_and_a_reply_goes_on(page):
    send(page, "one")
    settled(page)
    send(page, "slowly again")
    expect(page.locator("#conversation .steps")).to_be_visible()
    page.reload()

    expect(page.locator("#conversation .turn")).to_have_count(2)
    expect(page.locator("#conversation .answer .words").nth(1)).to_have_text(SECOND_REPLY)
    settled(page)
    expect(page.locator("#message .submit-button")).to_be_visible()


def test_closing_the_page_ends_the_reply(
    browser: Browser, address, services: Services, monkeypatch
):
    monkeypatch.setattr(services.chat_jobs, "_grace_seconds", 0.5)
    context = browser.new_context(locale="en-US")
    page = opened(context.new_page(), address)
    send(page, "Write for ever")
    expect(page.locator("#conversation .steps")).to_be_visible()
    assert services.chat_jobs.count() == 1
    context.close()

    eventually(lambda: services.chat_jobs.count() == 0, seconds=30)


def test_two_visitors_never_meet_and_wait_in_line(page, another, services: Services):
    send(page, "Write for ever, says Anna")
    expect(page.locator("#conversation .steps .is-done").first).to_be_visible()
    send(another, "Ben is here")
    expect(another.locator("#conversation .status")).to_contain_text(
        "You are number 1 in the queue"
    )
    page.locator("#message .stop-button").click()
    settled(another)

    expect(another.locator("#conversation .answer .words")).to_have_text(REPLY)
    assert "Anna" not in another.content()
    assert "Ben" not in page.content()


def test_nothing_that_was_typed_is_in_the_browsers_storage_and_nothing_leaves_the_machine(
    chromium, address
):
    requested: list[str] = []
    chromium.on("request", lambda request: requested.append(request.url))
    page = opened(chromium, address)
    send(page, SECRET)
    settled(page)
    stored = page.evaluate(
        "JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage), document.cookie])"
    )
    databases = page.evaluate("indexedDB.databases().then(all => all.map(one => one.name))")

    assert SECRET not in stored
    assert REPLY not in stored
    assert [entry[0] for entry in json.loads(stored)[0]] == ["compeer-conversation"]
    assert "compeer_visitor" not in stored  # no script can read the cookie
    assert databases == []
    foreign = [url for url in requested if not url.startswith((address, "data:", "blob:"))]
    assert foreign == []


def test_what_a_model_writes_is_text_and_loads_nothing(page, address):
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.evaluate("window.stolen = (number) => { window.stolenBy = number; }")
    send(page, "hostile ${window.stolen(7)} <img src=x onerror=stolen(8)>")
    settled(page)

    expect(page.locator("#conversation .answer .status")).to_contain_text("usable reply")
    page.locator("#inspector details[data-fold=draws] summary").click()
    expect(page.locator("#inspector details[data-fold=draws] pre").first).to_contain_text(
        "${window.stolen(6)}"
    )
    expect(page.locator("#inspector .free").first).to_contain_text("${window.stolen(1)} {{value}}")
    assert page.evaluate("window.stolenBy") is None
    assert page.locator("#conversation img, #inspector img").count() == 0
    assert [url for url in requested if not url.startswith(address)] == []


# --- languages, sizes, accessibility --------------------------------------------------------------------


def test_a_message_in_danger_shows_a_card_in_place_of_a_reply(page):
    send(page, "I want to kill myself")
    settled(page)
    card = page.locator("#conversation .turn .risk")

    expect(card).to_be_in_viewport()
    expect(card.get_by_role("link", name="988")).to_have_attribute("href", "tel:988")
    expect(card.get_by_role("link", name="911")).to_have_attribute("href", "tel:911")
    expect(page.locator("#conversation .said .words")).to_be_in_viewport()
    expect(page.locator("#conversation .answer")).to_have_count(0)
    expect(page.locator("#conversation [data-act=ask_again]")).to_have_count(0)
    expect(page.locator("#inspector")).to_contain_text("No model replies to this message")
    expect(page.locator("#help-strip")).to_contain_text("Not a therapist")
    live = page.locator("[aria-live=polite]", has_text="988, 988 Suicide & Crisis Lifeline")
    expect(live).to_have_count(1)
    assert Axe().run(page, context=".risk").response["violations"] == []
    send(page, "I called somebody")
    expect(card).to_have_count(2)
    expect(page.locator("#conversation .answer")).to_have_count(0)


def test_the_page_speaks_chinese_to_a_chinese_browser_and_can_be_switched(browser, address):
    context = browser.new_context(locale="zh-CN")
    context.set_default_timeout(30_000)
    page = opened(context.new_page(), address)
    expect(page.locator("#help-strip")).to_contain_text("12356")
    expect(page.get_by_role("heading", name="对话")).to_be_visible()
    expect(message(page)).to_have_attribute("placeholder", "想说些什么？")
    expect(page.locator("#policy")).to_contain_text("模型")
    send(page, "我失去了工作")
    settled(page)
    expect(page.locator("#inspector")).to_contain_text("焦虑")
    expect(page.locator("#conversation")).to_contain_text("是用英语训练的")
    message(page).fill("")
    message(page).press("Enter")
    expect(page.locator("#error")).to_contain_text("请写点什么")

    page.get_by_role("link", name="English").click()
    expect(page.get_by_role("heading", name="Conversation", exact=True)).to_be_visible()
    expect(page.locator("#policy")).to_contain_text("Model")
    expect(page.locator("#conversation")).to_contain_text("我失去了工作")  # and it is still there
    assert page.evaluate("document.documentElement.lang") == "en"
    context.close()


def test_a_phone_needs_no_sideways_scrolling_and_reaches_the_inspector(browser, address):
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True, locale="en-US"
    )
    context.set_default_timeout(30_000)
    page = opened(context.new_page(), address)
    send(page, "broken " + "x" * 300)
    settled(page)
    page.locator("#conversation .chip").tap()

    expect(page.locator("#inspector .problems")).to_be_in_viewport()
    expect(page.locator("#help-strip")).to_be_in_viewport()  # it never scrolls away
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    context.close()


def test_our_own_parts_have_no_accessibility_violations(browser, address):
    context = browser.new_context(locale="en-US", reduced_motion="reduce")
    context.set_default_timeout(30_000)
    page = opened(context.new_page(), address)
    assert violations(page, *OWN_PARTS) == []
    send(page, "broken, and I want to die")
    settled(page)
    send(page, "two")  # still gets no reply
    send(page, "three")
    settled(page)
    for fold in page.locator("#inspector details summary").all():
        fold.click()
    message(page).fill("")
    message(page).press("Enter")
    expect(page.locator("#error [role=alert]")).to_be_visible()

    assert violations(page, *OWN_PARTS) == []
    context.close()


def test_the_whole_page_has_no_serious_violation(page):
    send(page, "hello")
    settled(page)
    result = Axe().run(page)
    serious = [
        (found["id"], found["nodes"][0]["html"][:150])
        for found in result.response["violations"]
        if found["impact"] in {"serious", "critical"}
    ]

    assert serious == []


def test_everything_can_be_reached_by_keyboard(page):
    send(page, "hello")
    settled(page)
    page.evaluate("document.body.focus()")
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(document.activeElement.textContent || document.activeElement.getAttribute('aria-label') "
                "|| document.activeElement.id || document.activeElement.tagName).trim().slice(0, 40)"
            )
        )
    for name in (
        "Skip to the conversation",
        "New chat",
        "Delete",
        "Edit",
        "Regenerate",
        "Raw output",
    ):
        assert any(name in text for text in reached), (name, reached)


def test_a_screen_reader_hears_the_reply_once_when_it_is_whole(page):
    page.evaluate(
        """() => {
            const live = document.querySelector("main > .vh[aria-live=polite]");
            window.heard = [];
            new MutationObserver(() => window.heard.push(live.textContent)).observe(live, {childList: true, characterData: true, subtree: true});
        }"""
    )
    send(page, "hello, slowly")
    settled(page)
    eventually(lambda: page.evaluate("window.heard.length"))

    assert [text.strip() for text in page.evaluate("window.heard")] == [REPLY]


def test_a_person_has_everything_deleted_after_being_asked_once(page):
    send(page, "Words that are to be gone")
    settled(page)
    questions: list[str] = []

    def answer(dialog, yes: bool) -> None:
        questions.append(dialog.message)
        dialog.accept() if yes else dialog.dismiss()

    page.once("dialog", lambda dialog: answer(dialog, yes=False))
    page.get_by_role("button", name="Delete my data").click()
    expect(page.locator("#conversation .turn")).to_have_count(1)
    page.once("dialog", lambda dialog: answer(dialog, yes=True))
    page.get_by_role("button", name="Delete my data").click()

    expect(page.locator("#foot")).to_contain_text("Deleted: 0 comparisons, 0 votes")
    expect(page.locator("#conversation .turn")).to_have_count(0)
    assert len(questions) == 2
    assert "permanently deletes" in questions[0]


def test_the_theme_can_be_switched_and_is_remembered(page):
    page.get_by_role("button", name="Dark").click()
    expect(page.locator("body")).to_have_class(re.compile(r"\bdark\b"))
    page.reload()
    page.locator("#conversation .log").wait_for()

    expect(page.locator("body")).to_have_class(re.compile(r"\bdark\b"))
