"""Steering in a real Chromium with scripted models."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.axe import violations
from tests.browser.conftest import opened, visit
from tests.pages import make_services, script
from ui_components.server.app import build_server, serving

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

STEPS = (
    "<history>The seeker lost a job.\nStage: Exploration</history>\n"
    "<emotion>Fear.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4</emotion>\n"
    "<strategy>Help on.\nStrategy: Providing Suggestions</strategy>\n"
)
ASKS = STEPS + "<reply>What makes it hardest for you?</reply>"
ADVICE = STEPS + "<reply>Maybe you could talk to a friend first.</reply>"
JUDGE = """answers = [
  "True", "True", "False", { First = 0.4, Second = 0.3, Both = 0.2, Neither = 0.1 }
]
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("steering")
    turns = (
        {"when": "asks", "text": ASKS},
        {"text": ADVICE, "delay_seconds": 0.02, "chunk_characters": 20},
    )
    services = make_services(folder, turns)
    (folder / "judge.toml").write_text(JUDGE, encoding="utf-8")
    (folder / "other.toml").write_text(script([{"text": ASKS}]), encoding="utf-8")
    with serving(build_server(services)) as where:
        yield where


@pytest.fixture
def page(chromium: Page, address: str) -> Page:
    chromium.set_default_timeout(60_000)
    return opened(chromium, address)


def send(page: Page, text: str) -> None:
    """Send a message and wait for its reply."""
    turns = page.locator("#conversation .turn")
    number = turns.count()
    box = page.locator("#message textarea")
    box.fill(text)
    box.press("Enter")
    expect(turns).to_have_count(number + 1)
    settled(page)


def settled(page: Page) -> None:
    expect(page.locator("#conversation .log")).to_have_attribute("data-running", "no")
    expect(page.locator("#inspector .steer").first).to_be_visible()


def choose_model(page: Page, name: str) -> None:
    page.locator("#policy input").click()
    page.get_by_role("option", name=name).click()


def fold(page: Page, name: str):
    return page.locator(f"#inspector details[data-fold={name}] > summary")


def replies(page: Page):
    return page.locator("#inspector .branch-list > li")


def test_another_strategy_changes_the_reply_and_the_words_that_differ_are_marked(page):
    send(page, "hello")
    choose_model(page, "other")
    fold(page, "strategy").click()
    expect(page.locator("#inspector .strategy-choice button")).to_have_count(8)
    page.locator("#inspector").get_by_role("button", name=re.compile("^Question")).click()
    expect(replies(page)).to_have_count(2)
    settled(page)

    expect(page.locator("#conversation .answer .words")).to_have_text(
        "What makes it hardest for you?"
    )
    expect(replies(page).nth(1)).to_contain_text("Reply 2: strategy Question")
    expect(replies(page).nth(1)).to_contain_text("current reply")
    expect(page.locator("#inspector .comparison del").first).to_contain_text("Maybe")
    expect(page.locator("#inspector .comparison ins").first).to_contain_text("What makes")
    line = page.locator("#inspector .diff del").first
    assert "line-through" in line.evaluate("one => getComputedStyle(one).textDecorationLine")
    expect(page.locator("#inspector .comparison table")).to_contain_text("judged incorrect")

    page.get_by_role("button", name="Make reply 1 current").click()
    expect(page.locator("#conversation .answer .words")).to_have_text(
        "Maybe you could talk to a friend first."
    )
    page.get_by_role("button", name="Next reply").click()
    expect(page.locator("#conversation .answer .words")).to_have_text(
        "What makes it hardest for you?"
    )


def test_an_emotion_is_edited_by_keyboard_alone(page):
    send(page, "hello")
    fold(page, "edit-emotion").focus()
    page.keyboard.press("Enter")
    words = page.locator("#inspector form[data-part=emotion] textarea")
    page.keyboard.press("Tab")
    expect(words).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("There is shame.")
    for label in ("Negative", "Shame", "5"):
        page.keyboard.press("Tab")
        page.keyboard.type(label)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(replies(page)).to_have_count(2)
    settled(page)

    card = page.locator("#inspector .card[data-part=emotion]")
    expect(card).to_contain_text("edited by you")
    expect(card).to_contain_text("There is shame.")
    expect(card).to_contain_text("Shame")
    expect(card).to_contain_text("5 of 5")
    expect(card).to_contain_text("judged correct")
    # The form went, and the focus is not lost with it.
    assert page.evaluate("document.querySelector('#inspector').contains(document.activeElement)")


def test_best_of_four_is_ranked_with_its_numbers_and_one_is_chosen(page):
    send(page, "hello")
    page.get_by_role("button", name="Generate and rank").click()
    expect(page.locator("#inspector .ranking > li")).to_have_count(4)
    settled(page)

    ranking = page.locator("#inspector .ranking")
    expect(ranking.locator("li").first).to_contain_text("Rank 1")
    expect(ranking.locator("li").first).to_contain_text("s_in (group)1.000")
    expect(ranking.locator("code").first).to_have_text(re.compile(r"^r' = [−0-9.]+ / \(\(1 \+ "))
    fold(page, "best-formula").click()
    expect(page.locator("#inspector .bestof details")).to_contain_text("Form “signed”")
    ranking.get_by_role("button", name="Use reply 3").click()
    expect(ranking.locator("li[data-reply='3']")).to_contain_text("current reply")
    expect(replies(page)).to_have_count(2)  # the one before, and the one that was chosen


def test_all_eight_strategies_are_side_by_side_and_one_is_used(
    browser: Browser, address: str, size: tuple[int, int]
):
    with visit(browser, address, size, locale="en-US", reduced_motion="reduce") as page:
        send(page, "hello")
        page.get_by_role("button", name="All eight strategies").focus()
        page.keyboard.press("Enter")
        cards = page.locator("#inspector .by-strategy > li")
        expect(cards).to_have_count(8)
        settled(page)

        suggestions = cards.filter(has=page.get_by_text("Providing Suggestions", exact=True))
        expect(suggestions).to_contain_text("shows the strategy")
        expect(suggestions).to_contain_text("judged incorrect")
        question = cards.filter(has=page.get_by_text("Question", exact=True))
        expect(question).to_contain_text("does not show the strategy")
        expect(question).to_contain_text(
            "Drawn 3 times; drawn again because: it did not show the strategy."
        )
        columns = {round(card.bounding_box()["x"]) for card in cards.all()}
        assert len(columns) == (1 if size[0] == 390 else 2)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert violations(page, "#inspector") == []

        page.get_by_role("button", name="Use reply 3").press("Enter")
        expect(cards.nth(1)).to_contain_text("current reply")
        expect(replies(page)).to_have_count(2)
        expect(replies(page).nth(1)).to_contain_text(
            "Reply 3: strategy Restatement or Paraphrasing"
        )


def test_the_controls_have_no_accessibility_violations(browser: Browser, address):
    context = browser.new_context(locale="en-US", reduced_motion="reduce")
    context.set_default_timeout(60_000)
    page = opened(context.new_page(), address)
    send(page, "one that asks")
    fold(page, "strategy").click()
    page.locator("#inspector [data-strategy=Information]").click()
    expect(replies(page)).to_have_count(2)
    settled(page)
    page.get_by_role("button", name="Generate and rank").click()
    expect(page.locator("#inspector .ranking > li")).to_have_count(4)
    settled(page)
    for summary in page.locator("#inspector details summary").all():
        if not summary.evaluate("one => one.parentElement.open"):
            summary.click()

    assert violations(page, "#inspector", "#conversation") == []
    context.close()


def test_on_a_phone_in_chinese_all_of_it_is_there_without_sideways_scrolling(
    browser: Browser, address
):
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True, locale="zh-CN"
    )
    context.set_default_timeout(60_000)
    page = opened(context.new_page(), address)
    send(page, "one that asks")
    expect(page.locator("#inspector .conflict")).to_contain_text("推理与回复相互矛盾。")
    fold(page, "strategy").tap()
    page.locator("#inspector [data-strategy=Information]").tap()
    expect(replies(page)).to_have_count(2)
    settled(page)
    expect(replies(page).nth(1)).to_contain_text("当前回复")
    page.get_by_role("button", name="生成并排序").tap()
    expect(page.locator("#inspector .ranking > li")).to_have_count(4)
    settled(page)
    fold(page, "edit-emotion").tap()

    assert page.evaluate("document.documentElement.scrollWidth") == 390
    context.close()
