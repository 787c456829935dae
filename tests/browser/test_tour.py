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
    expect(page.locator("#tour .t-where")).to_have_text("Slide 6 of 6")


def test_full_screen_print_and_the_list_of_keys(chromium, address):
    page = tour(chromium, address)
    full = "document.fullscreenElement?.id === 'tour'"
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


def test_a_situation_that_is_picked_is_the_same_before_and_after_and_in_the_comparison(
    chromium, address
):
    page = tour(chromium, address, "&step=3")
    shows(page, 3)
    case = page.locator("#tour .t-slide:visible .t-case:visible")
    expect(case).to_have_attribute("data-case", "job")
    page.get_by_role("button", name="A friend who went quiet").click()
    expect(case).to_have_attribute("data-case", "friend")
    expect(case.locator(".t-stage")).to_have_count(2)
    page.keyboard.press("ArrowRight")
    shows(page, 4)
    expect(case).to_have_attribute("data-case", "friend")
    expect(case.locator(".t-answer")).to_have_count(2)
    expect(case.locator("details p")).to_be_hidden()
    case.locator("summary").click()
    expect(case.locator("details p")).to_be_visible()


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
@pytest.mark.parametrize("screen", [(1280, 720), (1920, 1080)], ids=["720p", "1080p"])
def test_every_step_fits_a_wide_screen_and_fills_it(browser, address, locale, screen):
    width, height = screen
    context = browser.new_context(locale=locale, viewport={"width": width, "height": height})
    context.set_default_timeout(30_000)
    page = tour(context.new_page(), address)
    page.keyboard.press("f")
    page.wait_for_function("document.fullscreenElement?.id === 'tour'")
    for step in STEPS:
        shows(page, step)
        room = page.locator("#tour").evaluate("one => [one.scrollHeight, one.scrollWidth]")
        head = page.locator("#tour .t-slide:visible h2").bounding_box()
        assert room == [height, width], step
        assert head is not None
        assert head["height"] == pytest.approx(
            0.045 * height, abs=2
        )  # one line, as large as the screen allows
        page.keyboard.press("PageDown")
    context.close()


def test_a_remote_shows_all_of_a_step_before_the_next(browser, address):
    context = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 720})
    context.set_default_timeout(30_000)
    page = tour(context.new_page(), address)
    live = page.locator("#tour .t-slide:visible .t-try")
    expect(live).not_to_be_in_viewport()
    page.keyboard.press("PageDown")
    expect(live).to_be_in_viewport()
    shows(page, 1)
    for _ in range(3):
        page.keyboard.press("PageDown")
        if page.locator("#tour [data-step='2']").is_visible():
            break
    shows(page, 2)
    page.keyboard.press("PageUp")
    page.keyboard.press("PageUp")
    shows(page, 1)
    context.close()


def test_speaker_notes_are_one_key_away_and_not_on_the_screen_by_themselves(chromium, address):
    page = tour(chromium, address)
    notes = page.locator("#tour .t-slide:visible .t-speaker")
    page.keyboard.press("f")
    expect(notes).to_be_hidden()
    page.keyboard.press("n")
    expect(notes.locator("p")).to_have_text(EN("tour.speaker_1"))
    page.keyboard.press("ArrowRight")
    expect(notes.locator("p")).to_have_text(EN("tour.speaker_2"))
    page.keyboard.press("n")
    expect(notes).to_be_hidden()


@pytest.mark.parametrize(
    ("step", "box", "talk"),
    [(1, "#message", "#conversation"), (4, "#compare-message", "#compare-talk")],
)
def test_the_live_trial_leaves_full_screen_with_the_message_in_the_box(
    chromium, address, step, box, talk
):
    page = tour(chromium, address, f"&step={step}")
    page.keyboard.press("f")
    page.wait_for_function("document.fullscreenElement?.id === 'tour'")
    if step == 4:
        page.get_by_role("button", name="A friend who went quiet").click()
    message = page.locator("#tour .t-said blockquote:visible").inner_text()
    page.locator("#tour .t-slide:visible .t-try a").click()

    expect(page.locator(f"{box} textarea")).to_have_value(message)
    page.wait_for_function("!document.fullscreenElement")
    expect(page).not_to_have_url(re.compile("step="))
    page.locator(f"{box} textarea").press("Enter")
    expect(page.locator(talk)).to_contain_text(message)


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
            page.get_by_role("button", name="下一页").tap()
    assert page.locator("#tour blockquote").first.get_attribute("lang") == "en"
    context.close()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_printed_tour_has_a_step_with_its_notes_on_each_sheet(chromium, address, language):
    chromium.goto(f"{address}/tour/print?lang={language}")
    chromium.set_viewport_size({"width": 1046, "height": 733})  # A4 less the margins, at 96 dpi
    chromium.emulate_media(media="print")
    paper = chromium.pdf(prefer_css_page_size=True)
    boxes = re.findall(rb"/MediaBox\s*\[([^\]]*)\]", paper)

    assert chromium.evaluate("document.documentElement.scrollWidth") == 1046
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", paper)) == len(STEPS)
    for box in boxes:
        width, height = (float(number) for number in box.split()[2:])
        assert (width, height) == (pytest.approx(842, abs=1), pytest.approx(595, abs=1))
    for step in STEPS:
        assert chromium.locator(f"[data-step='{step}'] p.t-speaker").is_visible()
