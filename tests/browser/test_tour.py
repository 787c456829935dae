"""The tour in a real Chromium."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.axe import violations
from tests.pages import make_services
from ui_components.server.app import build_server, serving
from ui_components.shared.services import Services
from ui_components.shared.texts import load_texts

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

STEPS = range(1, 7)
EN = load_texts("en")


@pytest.fixture(autouse=True)
def _patient() -> None:
    expect.set_options(timeout=30_000)


def tour(page: Page, address: str, query: str = "") -> Page:
    """Open the tour and wait until it is ready."""
    page.goto(f"{address}/?screen=tour{query}")
    page.locator("#tour .t-slide:visible").wait_for()
    expect(page).to_have_url(re.compile(r"step=\d"))  # the script has run
    return page


def shows(page: Page, step: int) -> None:
    """Check that this step is shown, and no other."""
    expect(page.locator("#tour .t-slide:visible")).to_have_attribute("data-step", str(step))
    expect(page.locator("#tour [aria-current=step]")).to_have_attribute("data-go", str(step))
    expect(page).to_have_url(re.compile(rf"screen=tour&step={step}$"))


def test_a_presenter_walks_through_all_six_steps_by_keys(chromium, address):
    page = tour(chromium, address)
    shows(page, 1)
    said = page.locator("#tour [data-said]")
    for step in STEPS[1:]:
        page.keyboard.press("ArrowRight")
        shows(page, step)
        title = EN(f"tour.head_{step}")
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        expect(said).to_have_text(EN("tour.announce", number=step, count=6, title=title))
    page.keyboard.press("ArrowRight")
    shows(page, 6)
    page.keyboard.press("ArrowLeft")
    shows(page, 5)
    page.keyboard.press("Home")
    shows(page, 1)
    page.keyboard.press("ArrowLeft")
    shows(page, 1)
    page.keyboard.press("End")
    shows(page, 6)


def test_buttons_and_dots_lead_the_same_way(chromium, address):
    page = tour(chromium, address)
    back = page.get_by_role("button", name="Back")
    onward = page.get_by_role("button", name="Next")
    expect(back).to_have_attribute("aria-disabled", "true")
    onward.click()
    shows(page, 2)
    expect(back).to_have_attribute("aria-disabled", "false")
    back.click()
    shows(page, 1)
    page.get_by_role("button", name=EN("tour.name_6")).click()
    shows(page, 6)
    expect(onward).to_have_attribute("aria-disabled", "true")
    expect(page.locator("#tour .t-where")).to_have_text("Step 6 of 6")


def test_full_screen_print_and_the_list_of_keys(chromium, address):
    page = tour(chromium, address)
    full = "document.fullscreenElement?.id === 'tour'"
    page.keyboard.press("PageDown")
    shows(page, 1)  # a page that is no presentation scrolls
    page.keyboard.press("f")
    page.wait_for_function(full)
    expect(page.get_by_role("button", name="Leave full screen")).to_be_visible()
    page.keyboard.press("PageDown")
    shows(page, 2)
    page.keyboard.press("PageUp")
    shows(page, 1)
    page.keyboard.press("F")
    page.wait_for_function("!document.fullscreenElement")

    keys = page.get_by_role("dialog", name="Shortcuts for presenters")
    page.keyboard.press("?")
    expect(keys).to_be_visible()
    page.keyboard.press("ArrowRight")
    shows(page, 1)
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()

    with page.expect_popup() as opened:
        page.keyboard.press("p")
    printed = opened.value
    printed.wait_for_load_state()
    assert printed.url == f"{address}/tour/print?lang=en"
    assert printed.title() == "COMPEER: printable tour"


def test_keys_are_letters_where_somebody_types_and_nothing_on_other_screens(chromium, address):
    page = tour(chromium, address, "&step=2")
    shows(page, 2)
    page.locator("#screen-chat-button").click()
    box = page.locator("#message textarea")
    box.click()
    page.keyboard.type("fp?")
    page.keyboard.press("Home")
    expect(box).to_have_value("fp?")
    page.locator("#screen-tour-button").click()
    shows(page, 2)
    assert not page.evaluate("Boolean(document.fullscreenElement)")
    assert len(page.context.pages) == 1
    page.keyboard.press("Control+ArrowRight")
    shows(page, 2)


def test_the_address_names_the_step_and_a_reload_keeps_it(chromium, address):
    page = tour(chromium, address, "&step=4")
    shows(page, 4)
    page.keyboard.press("ArrowLeft")
    shows(page, 3)
    page.reload()
    shows(page, 3)
    page.locator("#screen-chat-button").click()
    expect(page).not_to_have_url(re.compile("step="))
    page.locator("#screen-tour-button").click()
    shows(page, 3)
    tour(page, address, "&step=99")
    shows(page, 6)
    tour(page, address, "&step=nonsense")
    shows(page, 1)


def test_a_situation_that_is_picked_is_the_same_before_and_after(chromium, address):
    page = tour(chromium, address, "&step=2")
    shows(page, 2)
    page.get_by_role("button", name="A friend who went quiet").click()
    expect(page.locator("#tour .t-slide:visible .t-case:visible")).to_have_attribute(
        "data-case", "friend"
    )
    raw = page.locator("#tour .t-slide:visible .t-case:visible .t-raw")
    raw.locator("summary").click()
    expect(raw.locator("pre")).to_contain_text("<history>The seeker is dealing with")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    shows(page, 4)
    expect(page.locator("#tour .t-slide:visible .t-case:visible")).to_have_attribute(
        "data-case", "friend"
    )
    expect(page.locator("#tour .t-slide:visible .t-stage:visible")).to_have_count(5)


@pytest.fixture
def fresh(tmp_path: Path) -> Services:
    return make_services(tmp_path)


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    yield context
    context.close()


def test_it_needs_no_model_and_once_open_no_network(context, fresh):
    with serving(build_server(fresh)) as address:
        elsewhere: list[str] = []

        def guard(route, request) -> None:
            if request.url.startswith((address, "data:", "blob:")):
                route.continue_()
            else:
                elsewhere.append(request.url)
                route.abort()

        context.route("**/*", guard)
        page = tour(context.new_page(), address)
        page.get_by_role("button", name=EN("tour.name_5")).click()
        expect(page.locator("#tour [data-live]")).to_contain_text("No votes yet")
        page.keyboard.press("Home")
        context.set_offline(True)
        for step in STEPS:
            shows(page, step)
            expect(page.locator("#tour .t-slide:visible h2")).to_have_text(EN(f"tour.head_{step}"))
            if step == 5:
                expect(page.locator("#tour [data-live]")).to_have_text(EN("tour.live_failed"))
            page.keyboard.press("ArrowRight")
        assert elsewhere == []
        assert not any(fresh.models.is_ready(one.name) for one in fresh.models.registry.entries)


def test_axe_finds_nothing_on_any_step(browser, address):
    context = browser.new_context(
        locale="en-US", viewport={"width": 1280, "height": 900}, reduced_motion="reduce"
    )
    context.set_default_timeout(30_000)
    page = tour(context.new_page(), address)
    for step in STEPS:
        shows(page, step)
        assert violations(page, "#tour") == [], step
        page.keyboard.press("ArrowRight")
    context.close()


def test_on_a_phone_in_chinese_nothing_overflows_or_moves(browser, address):
    context = browser.new_context(
        locale="zh-CN",
        viewport={"width": 390, "height": 844},
        color_scheme="dark",
        reduced_motion="reduce",
        has_touch=True,
    )
    context.set_default_timeout(30_000)
    page = tour(context.new_page(), address)
    expect(page.locator("body")).to_have_class(re.compile(r"\bdark\b"))  # as the system is set
    chinese = load_texts("zh")
    for step in STEPS:
        shows(page, step)
        slide = page.locator("#tour .t-slide:visible")
        expect(slide.locator("h2")).to_have_text(chinese(f"tour.head_{step}"))
        assert page.evaluate("document.documentElement.scrollWidth") == 390, step
        assert slide.evaluate("slide => getComputedStyle(slide).animationName") == "none"
        small = page.eval_on_selector_all(
            "#tour button:not(dialog *), #tour .t-button",
            "all => all.filter(one => one.offsetParent && one.offsetHeight < 40).map(one => one.textContent)",
        )
        assert small == []
        if step < STEPS[-1]:
            page.get_by_role("button", name="下一步").tap()
    assert page.locator("#tour blockquote").first.get_attribute("lang") == "en"
    context.close()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_printed_tour_is_a_few_sheets_of_a4(chromium, address, language):
    chromium.goto(f"{address}/tour/print?lang={language}")
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
    paper = chromium.pdf(prefer_css_page_size=True)
    sheets = len(re.findall(rb"/Type\s*/Page\b(?!s)", paper))
    boxes = set(re.findall(rb"/MediaBox\s*\[([^\]]*)\]", paper))

    assert 1 <= sheets <= 5  # five recorded stages of training
    for box in boxes:
        width, height = (float(number) for number in box.split()[2:])
        assert (round(width), round(height)) in {(595, 842), (596, 842), (595, 841), (594, 841)}


def test_it_leads_to_the_comparison(chromium, address):
    page = tour(chromium, address, "&step=5")
    shows(page, 5)
    page.get_by_role("link", name="Compare two replies").click()

    expect(page.locator("#screen-compare-button")).to_have_attribute("aria-selected", "true")
    expect(page).not_to_have_url(re.compile("step="))
