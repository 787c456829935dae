"""The results in a real Chromium: votes in a real store, filters by keyboard."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from compeer_core.registry import Registry
from compeer_core.votes.leaderboard.board import Filters
from compeer_core.votes.store import VoteStore
from tests.browser.axe import violations
from tests.databases import database_in
from tests.pages import write_models
from tests.voting import Clock, hold_votes, vote
from ui_components.server.app import build_server, serving
from ui_components.shared.models import Models
from ui_components.shared.services import Services

# Gradio uses deprecated pandas features.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]

OWN_PARTS = ["#results-form", "#results-board"]


def services_over(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Services:
    folder = tmp_path_factory.mktemp("votes")
    models = Models(Registry.from_toml(write_models(folder)))
    return Services(models, VoteStore(database_in(folder), clock=clock))


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def voted(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Services:
    """A server with 60 votes of eight people on three models."""
    services = services_over(tmp_path_factory, clock)
    hold_votes(services.votes, 60, models=("scripted-policy", "other", "a-model-of-an-earlier-day"))
    clock.forward(seconds=10)
    return services


@pytest.fixture(scope="module")
def where(voted: Services) -> Iterator[str]:
    with serving(build_server(voted)) as address:
        yield address


def results(page: Page, address: str, query: str = "screen=results") -> Page:
    page.set_default_timeout(90_000)
    page.goto(f"{address}/?{query}")
    page.locator("#results-board .board").wait_for()
    return page


@pytest.fixture
def page(chromium: Page, where: str) -> Page:
    return results(chromium, where)


def opened_in(browser: Browser, address: str, **options: object) -> Page:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    return results(context.new_page(), address)


def title(page: Page):
    return page.locator("#results-title")


def test_the_tab_counts_votes_and_shows_who_is_preferred(chromium, where, voted):
    chromium.goto(where)
    chromium.locator("#conversation .log").wait_for()
    chromium.locator("#screen-results-button").click()

    expect(chromium.locator("#results-board")).to_contain_text("Counting votes")
    expect(title(chromium)).to_contain_text("Scripted policy is preferred to")
    board = voted.boards.current(Filters()).result(60).board
    rows = chromium.locator("[data-table=models] tbody tr")
    expect(rows).to_have_count(3)
    for row, drawn in zip(board.models, rows.all(), strict=True):
        numbers = [cell.strip() for cell in drawn.locator("td").all_inner_texts()]
        assert numbers[0] == str(row.rank)
        assert numbers[2] == f"{row.score.value:.0f}"
        assert [int(number) for number in numbers[5:]] == [
            row.wins, row.losses, row.ties, row.neither, row.votes, row.raters,
        ]  # fmt: skip
    assert chromium.locator("[data-table=pairs] td").count() == 1 + 9


def test_a_vote_that_comes_meanwhile_is_there_when_one_comes_back(page, voted, clock):
    counted = page.locator("#results-board .head > .fine")
    before = int(counted.inner_text().split()[1])
    page.locator("#screen-chat-button").click()
    vote(voted.votes, "voter-1", "other", "scripted-policy")
    clock.forward(seconds=10)
    page.wait_for_timeout(1100)  # for so long the database is not asked again
    page.locator("#screen-results-button").click()

    expect(counted).to_contain_text(f"Counted: {before + 1} votes")


def test_filters_go_by_keyboard_and_stand_in_the_address(page, where):
    before = title(page).inner_text()
    page.locator("#results-form select[name=language]").focus()
    page.keyboard.press("c")  # Chinese
    expect(title(page)).not_to_have_text(before)
    expect(page.locator("#results-board .board")).to_have_attribute("data-query", "language=zh")
    expect(page.locator("#results-form select[name=language]")).to_be_focused()
    assert "filters=language%3Dzh" in page.url
    only_chinese = title(page).inner_text()

    page.reload()  # the address leads back to it
    expect(title(page)).to_have_text(only_chinese)
    expect(page.locator("#results-form select[name=language]")).to_have_value("zh")
    page.locator("#results-form [data-reset]").focus()
    page.keyboard.press("Enter")
    expect(title(page)).to_have_text(before)
    assert "filters" not in page.url


def test_doubtful_votes_are_counted_only_where_one_asks(page):
    left_out = page.locator("#results-board .left")
    expect(left_out).to_contain_text("too fast to have read both replies")
    page.locator("#results-form summary").focus()
    page.keyboard.press("Enter")
    page.locator("#results-form input[value=too_fast]").focus()
    page.keyboard.press("Space")

    expect(page.locator("#results-board .board")).to_have_attribute("data-query", "admit=too_fast")
    expect(left_out).to_have_count(0)
    expect(page.locator("#results-form details")).to_have_attribute("open", "")


def test_quick_changes_end_at_the_last_one(page):
    for name, value in (("language", "zh"), ("topic", "work"), ("language", "en"), ("topic", "")):
        page.locator(f"#results-form select[name={name}]").select_option(value)

    expect(page.locator("#results-board .board")).to_have_attribute("data-query", "language=en")


def test_the_command_can_be_copied(browser, where):
    page = opened_in(browser, where, permissions=["clipboard-read", "clipboard-write"])
    page.locator("#results-board [data-copy]").click()

    expect(page.locator("#results-board [data-copy]")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("python -m compeer_core.votes board --as-of 2026-11-21T12:3")
    page.context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_and_nothing_overflows(browser, where, width):
    page = opened_in(browser, where, viewport={"width": width, "height": 844})
    page.locator("#results-form summary").click()

    assert violations(page, *OWN_PARTS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 390:  # wide tables scroll inside themselves
        assert page.evaluate(
            "[...document.querySelectorAll('#results-board .wide')].some(e => e.scrollWidth > e.clientWidth)"
        )
    page.context.close()


def test_in_chinese_all_of_it_is_chinese(browser, where):
    page = opened_in(browser, where, locale="zh-CN")

    expect(title(page)).to_contain_text("更受欢迎")
    shown = page.locator("#results-board").inner_text()
    for word in ("两两比较", "两条回复都不行", "Cohen κ 系数", "未计入的投票", "随机种子"):
        assert word in shown
    for word in ("preferred", "votes", "Neither", "Score"):
        assert word not in shown.replace("compeer_core.votes", "").replace("--votes", "")
    page.context.close()


def test_on_paper_there_are_the_results_and_not_the_frame(page):
    page.emulate_media(media="print")

    expect(title(page)).to_be_visible()
    for part in ("#results-form", "#help-strip", "#foot", "#screen-chat-button"):
        expect(page.locator(part)).to_be_hidden()
    assert (
        page.evaluate("getComputedStyle(document.querySelector('#results-board .wide')).overflowX")
        == "visible"
    )


def test_without_votes_there_is_the_way_to_compare(chromium, tmp_path_factory):
    services = services_over(tmp_path_factory, Clock())
    with serving(build_server(services)) as address:
        page = results(chromium, address)

        expect(title(page)).to_have_text("Not enough votes to rank models: 0 of 20 needed.")
        assert page.locator("#results-board progress").get_attribute("value") == "0"
        expect(page.locator("#results-board .plot").first).to_contain_text("Scripted policy")
        assert violations(page, *OWN_PARTS) == []
        example = page.locator("#results-board .example")
        expect(example.locator("h2").first).to_contain_text("Example")
        expect(example).to_contain_text("These 120 votes are simulated")
        expect(example.locator("[data-table=models] tbody tr")).to_have_count(3)
        assert "Example model A" in example.locator(".sentence").inner_text()
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.get_by_role("link", name="Compare two models").click()
        expect(page.locator("#screen-compare-button")).to_have_attribute("aria-selected", "true")
        assert "screen=compare" in page.url
