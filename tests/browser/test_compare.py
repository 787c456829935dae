"""Compare in a real Chromium with scripted models."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
from playwright.sync_api import Browser, Page, expect

import app
from compeer_core.registry import Registry
from compeer_core.votes.battles import Limits
from compeer_core.votes.database import default_url
from compeer_core.votes.store import VoteStore
from tests.browser.axe import violations
from tests.comparisons import LONG, MODELS, SECOND_LONG, make
from tests.pages import REPLY, SECOND_REPLY
from ui_components.server.app import build_server, serving
from ui_components.shared.models import Models
from ui_components.shared.services import Services

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings(
    "ignore:'future.no_silent_downcasting' is deprecated", "ignore:The copy keyword is deprecated"
)

OWN_PARTS = ["#compare-talk", "#compare-ballot", "#compare-error"]
CHECKPOINT = app.MODELS.parent / "checkpoints" / "compeer-small" / "adapter_config.json"
PHONE = {"width": 390, "height": 844}
UNDO_SECONDS = 5.0
"""Half the real limit, since tests wait for it."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    limits = Limits(undo_seconds=UNDO_SECONDS)
    return make(tmp_path_factory.mktemp("models"), grace_seconds=6.0, limits=limits)


@pytest.fixture(scope="module")
def address(services: Services) -> Iterator[str]:
    with serving(build_server(services)) as where:
        yield where


def opened(page: Page, address: str) -> Page:
    page.set_default_timeout(60_000)
    page.goto(f"{address}/?screen=compare")
    expect(page.locator("#compare-talk .talk")).to_be_visible()
    expect(page.locator("#compare-message textarea")).to_be_visible()
    return page


@pytest.fixture
def page(chromium: Page, address: str) -> Page:
    return opened(chromium, address)


@pytest.fixture
def phone(browser: Browser, address: str) -> Iterator[Page]:
    context = browser.new_context(
        locale="en-US", viewport=PHONE, has_touch=True, color_scheme="dark", reduced_motion="reduce"
    )
    yield opened(context.new_page(), address)
    context.close()


def send(page: Page, text: str) -> None:
    before = page.locator("#compare-talk .talk").get_attribute("data-round")
    box = page.locator("#compare-message textarea")
    box.fill(text)
    box.press("Enter")
    expect(page.locator("#compare-talk .talk")).not_to_have_attribute("data-round", before or "")


def settled(page: Page) -> None:
    """Wait until both sides have ended, and leave the message box."""
    expect(page.locator("#compare-ballot .ballot.is-open")).to_have_attribute("data-over", "yes")
    page.evaluate("document.activeElement.blur()")


def picture(page: Page, name: str, *, full_page: bool = False) -> None:
    """Take a screenshot, if the environment names a folder for them."""
    folder = os.environ.get("COMPEER_TEST_PICTURES")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=full_page)


def ballot(page: Page):
    return page.locator("#compare-ballot .ballot")


# --- from start to end ----------------------------------------------------------------------------


def test_a_person_compares_votes_and_sees_who_wrote_what(page):
    page.evaluate(
        """() => {
            window.both = 0;
            window.reasons = [];
            const watch = (id, look) => new MutationObserver(look)
                .observe(document.getElementById(id), {childList: true, subtree: true});
            watch("compare-talk", () => {
                const running = document.querySelectorAll('#compare-talk .side[data-state=running] [data-reply]');
                if (running.length === 2) window.both += 1;
            });
            watch("compare-ballot", () => {
                const reason = document.querySelector("#compare-ballot [data-reason]");
                if (reason && document.querySelectorAll("#compare-ballot [data-vote]:disabled").length === 4)
                    window.reasons.push(reason.textContent);
            });
        }"""
    )
    send(page, "Slowly, please.")
    settled(page)
    assert page.evaluate("window.both") > 0
    assert any("are still writing" in reason for reason in page.evaluate("window.reasons"))
    expect(page.locator("#compare-talk .side .words")).to_have_count(2)
    shown = set(page.locator("#compare-talk .side .words").all_inner_texts())
    assert shown == {LONG, SECOND_LONG}
    for name in (*MODELS, "Maple the First"):
        assert name not in page.locator("#compare-talk").inner_html()
    page.wait_for_timeout(1600)
    page.keyboard.press("3")

    expect(ballot(page)).to_contain_text(
        "Your vote: Both are good. Your vote is stored and counts."
    )
    expect(ballot(page).locator("[data-countdown]")).to_have_text(re.compile(r"\(\d\)"))
    ballot(page).get_by_label("understands the feeling").check()
    ballot(page).get_by_role("button", name="Reveal the models").click()
    expect(ballot(page).locator(".names")).to_contain_text("Maple the First")
    expect(ballot(page).locator(".names")).to_contain_text("Cedar the Second")
    expect(ballot(page)).to_contain_text("You and the judge agree.")
    expect(ballot(page)).to_contain_text("Your reasons: understands the feeling")
    expect(ballot(page).locator("tbody tr")).to_have_count(6)

    send(page, "And what now?")
    settled(page)
    expect(page.locator("#compare-talk .earlier li")).to_have_count(1)
    page.get_by_role("button", name="New comparison").click()
    expect(page.locator("#compare-talk .starters button")).to_have_count(3)
    expect(ballot(page)).to_have_count(0)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("1", "A is better."),
        ("2", "B is better."),
        ("3", "Both are good."),
        ("4", "Neither is acceptable."),
    ],
)
def test_the_keys_vote(page, services, key, said):
    send(page, "hello")
    settled(page)
    page.keyboard.press(f"Control+{key}")
    page.keyboard.press(f"Alt+{key}")
    page.keyboard.press("5")
    box = page.locator("#compare-message textarea")
    box.focus()
    page.keyboard.type(key)
    expect(box).to_have_value(key)
    expect(page.locator("#compare-ballot .ballot.is-open")).to_be_visible()
    page.evaluate(
        "() => { const one = document.createElement('dialog'); one.id = 'asks'; document.body.append(one); one.showModal(); }"
    )
    page.keyboard.press(key)
    page.evaluate("document.getElementById('asks').remove()")
    page.wait_for_timeout(600)
    expect(page.locator("#compare-ballot .ballot.is-open")).to_be_visible()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(key)
    page.keyboard.press(key)

    expect(ballot(page)).to_contain_text(f"Your vote: {said}")
    expect(page.locator("#compare-error")).not_to_contain_text("voted")


@pytest.mark.parametrize("size", [{"width": 1280, "height": 800}, PHONE], ids=["desk", "phone"])
def test_a_person_votes_by_keys_alone_and_reads_why(browser, address, services, size):
    context = browser.new_context(locale="en-US", viewport=size, reduced_motion="reduce")
    page = opened(context.new_page(), address)
    send(page, "hello")
    expect(page.locator("#compare-ballot .choices")).to_be_focused()
    expect(page.locator("#compare-ballot .ballot.is-open")).to_have_attribute("data-over", "yes")
    if size is PHONE:
        page.locator('#compare-talk .switch [data-side="1"]').click()
    page.wait_for_timeout(1600)
    page.keyboard.press("2")
    expect(ballot(page)).to_contain_text("Your vote: B is better.")
    ballot(page).locator("[data-rate] summary").focus()
    page.keyboard.press("Enter")
    expect(ballot(page).locator("[data-act=undo]")).to_have_count(0)
    if size is PHONE:
        expect(page.locator('#compare-talk .side[data-side="1"] .favourite')).to_be_visible()
    expect(page.locator('#compare-talk .side[data-side="1"]')).to_contain_text("your choice")
    expect(page.locator('#compare-talk .side[data-side="0"]')).not_to_contain_text("your choice")

    page.wait_for_timeout((UNDO_SECONDS + 1) * 1000)
    expect(ballot(page).locator(".names")).to_have_count(0)  # the names wait for a reader
    mark = ballot(page).locator("[data-step='0-1'][data-mark=wrong]")
    mark.focus()
    page.keyboard.press("Space")
    expect(mark).to_have_attribute("aria-pressed", "true")
    ballot(page).get_by_role("button", name="Save reasons").click()
    expect(ballot(page)).to_contain_text("Reasons saved.")
    expect(ballot(page).locator("[data-rate]")).to_have_attribute("open", "")
    expect(mark).to_have_attribute("aria-pressed", "true")
    picture(page, f"rated-{size['width']}")
    assert violations(page, *OWN_PARTS) == []

    reveal = ballot(page).get_by_role("button", name="Reveal the models")
    reveal.focus()
    page.keyboard.press("Enter")
    expect(ballot(page).locator(".reveal")).to_be_focused()
    expect(ballot(page).locator(".of-side")).to_have_count(6)
    expect(ballot(page)).to_contain_text("you: incorrect")
    expect(ballot(page)).to_contain_text("The judge's probabilities")
    expect(ballot(page).locator(".names .is-favourite")).to_contain_text("your choice")
    page.wait_for_timeout(500)
    picture(page, f"revealed-{size['width']}", full_page=True)
    assert violations(page, *OWN_PARTS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]

    key = page.locator("#compare-talk .talk").get_attribute("data-round")
    page.get_by_role("button", name="Same message, new pair").click()
    expect(page.locator("#compare-talk .talk")).not_to_have_attribute("data-round", key or "")
    expect(page.locator("#compare-talk .asked")).to_contain_text("hello")
    expect(page.locator("#compare-ballot .choices")).to_be_focused()
    context.close()


def test_a_draft_keeps_the_focus_when_a_ballot_appears(page):
    box = page.locator("#compare-message textarea")
    box.fill("Slowly, please.")
    box.press("Enter")
    expect(page.locator("#compare-ballot .choices")).to_be_focused()
    box.focus()
    page.keyboard.type("a draft")
    settled_without_leaving = page.locator("#compare-ballot .ballot.is-open")
    expect(settled_without_leaving).to_have_attribute("data-over", "yes")

    expect(box).to_be_focused()
    expect(box).to_have_value("a draft")


def test_the_keys_can_be_switched_off(page):
    send(page, "hello")
    settled(page)
    ballot(page).get_by_label("Vote with keys 1 to 4").uncheck()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("1")
    page.wait_for_timeout(600)
    expect(page.locator("#compare-ballot .ballot.is-open")).to_be_visible()
    ballot(page).get_by_text("A is better").click()
    expect(ballot(page)).to_contain_text("Your vote: A is better.")


def test_a_vote_is_taken_back_and_the_names_come_by_themselves(page):
    send(page, "hello")
    settled(page)
    page.keyboard.press("1")
    expect(ballot(page)).to_contain_text("Your vote:")
    ballot(page).get_by_role("button", name="Undo vote").click()
    expect(page.locator("#compare-ballot .ballot.is-open")).to_be_visible()
    page.keyboard.press("2")
    expect(ballot(page)).to_contain_text("Your vote: B is better.")
    expect(ballot(page).locator(".names")).to_contain_text("Maple the First")
    expect(ballot(page).locator("[data-act=undo]")).to_have_count(0)


def test_the_names_wait_for_a_note_that_is_being_written(page):
    send(page, "hello")
    settled(page)
    page.keyboard.press("1")
    note = ballot(page).locator("[data-note]")
    hostile = "<img src=x onerror='window.stolen=1'> ![x](https://example.com/x.png) \u202eabc 1234"
    note.fill(hostile)
    page.wait_for_timeout((UNDO_SECONDS + 1) * 1000)
    expect(note).to_have_value(hostile)
    expect(ballot(page).locator("[data-soon]")).to_contain_text("appear when you are done")
    expect(ballot(page).locator(".names")).to_have_count(0)
    ballot(page).get_by_role("button", name="Reveal the models").click()

    expect(ballot(page).locator(".kept-note")).to_have_text(hostile)
    assert page.evaluate("window.stolen") is None


def test_two_tabs_have_one_vote(page, address):
    send(page, "hello")
    settled(page)
    other = opened(page.context.new_page(), address)
    settled(other)
    page.keyboard.press("1")
    expect(ballot(page)).to_contain_text("Your vote: A is better.")
    other.keyboard.press("2")

    expect(other.locator("#compare-error")).to_contain_text("You have already voted on this")
    expect(ballot(other)).to_contain_text("Your vote: A is better.")


def test_a_picture_goes_to_both_sides_and_to_nobody_else(page, another_context, address, tmp_path):
    path = tmp_path / "photo.png"
    PIL.Image.new("RGB", (80, 60), "teal").save(path)
    with page.expect_file_chooser() as chooser:
        page.locator("#compare-message").get_by_role("button", name="Add photos").click()
    chooser.value.set_files(path)
    page.get_by_label("Describe the photo").fill("a teal wall")
    send(page, "look")
    picture = page.locator("#compare-talk .asked img")
    expect(picture).to_have_attribute("alt", "a teal wall")
    expect(page.locator("#compare-talk .asked")).to_contain_text(
        "Every model received the same message and images"
    )
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 80
    source = picture.get_attribute("src")

    assert another_context.request.get(f"{address}/{source}").status == 404


@pytest.fixture
def another_context(browser: Browser):
    context = browser.new_context(locale="en-US")
    yield context
    context.close()


def test_two_visitors_never_meet(page, another_context, address):
    send(page, "Anna was here")
    settled(page)
    ben = opened(another_context.new_page(), address)
    assert "Anna was here" not in ben.content()
    stored = page.evaluate("localStorage.getItem('compeer-comparison')")
    ben.evaluate("value => localStorage.setItem('compeer-comparison', value)", stored)
    opened(ben, address)

    assert "Anna was here" not in ben.content()
    assert REPLY not in ben.content()


# --- accessibility and devices --------------------------------------------------------------------


def test_each_reply_is_announced_once(page):
    page.evaluate(
        """() => {
            window.heard = [];
            for (const live of document.querySelectorAll("[aria-live=polite]"))
                new MutationObserver(() => window.heard.push(live.textContent))
                    .observe(live, {childList: true, characterData: true, subtree: true});
        }"""
    )
    send(page, "hello")
    settled(page)
    page.wait_for_timeout(500)
    heard = " ".join(page.evaluate("window.heard"))

    assert heard.count(REPLY) == 1
    assert heard.count(SECOND_REPLY) == 1


def test_the_focus_stays_when_the_ballot_is_drawn_anew(page):
    send(page, "hello")
    settled(page)
    first = ballot(page).locator("[data-vote]").first
    first.focus()
    page.keyboard.press("Enter")
    expect(ballot(page)).to_contain_text("Your vote:")
    page.wait_for_timeout(300)

    assert page.evaluate("document.activeElement.dataset.keep") == "reveal"
    page.keyboard.press("Enter")
    expect(ballot(page).locator(".names")).to_be_visible()


def test_on_a_phone_both_sides_are_opened_before_the_vote(phone):
    send(phone, "hello")
    settled(phone)
    expect(phone.locator('#compare-talk .side[data-side="0"]')).to_be_visible()
    expect(phone.locator('#compare-talk .side[data-side="1"]')).to_be_hidden()
    expect(ballot(phone).locator("[data-reason]")).to_have_text(
        "Open B first: please read both before you vote."
    )
    expect(ballot(phone).locator("[data-vote]").first).to_be_disabled()
    phone.keyboard.press("1")
    bar = ballot(phone).bounding_box()
    assert bar is not None
    assert bar["y"] + bar["height"] <= PHONE["height"] + 1
    phone.locator('#compare-talk .switch [data-side="1"]').click()
    expect(phone.locator('#compare-talk .side[data-side="1"]')).to_be_visible()
    expect(phone.locator('#compare-talk .side[data-side="0"]')).to_be_hidden()
    expect(ballot(phone).locator("[data-vote]").first).to_be_enabled()
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    phone.wait_for_timeout(1600)
    ballot(phone).get_by_text("B is better").click()
    expect(ballot(phone)).to_contain_text("Your vote is stored and counts.")
    phone.get_by_role("button", name="Reveal the models").click()
    expect(ballot(phone).locator(".names")).to_be_visible()
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_our_own_parts_have_no_accessibility_violations(browser, address):
    context = browser.new_context(locale="en-US", reduced_motion="reduce")
    page = opened(context.new_page(), address)
    assert violations(page, *OWN_PARTS) == []
    page.get_by_label("Show the reasoning before the vote").check()
    send(page, "for ever")
    expect(page.locator("#compare-talk [data-reply]")).to_have_count(2)
    ballot(page).get_by_role("button", name="Stop and vote").click()
    settled(page)
    assert violations(page, *OWN_PARTS) == []
    page.keyboard.press("2")
    expect(ballot(page)).to_contain_text("Your vote:")
    assert violations(page, *OWN_PARTS) == []
    ballot(page).get_by_role("button", name="Reveal the models").click()
    expect(ballot(page).locator(".names")).to_be_visible()
    assert violations(page, *OWN_PARTS) == []
    context.close()


def test_the_screen_speaks_chinese(browser, address):
    context = browser.new_context(locale="zh-CN")
    page = opened(context.new_page(), address)
    expect(page.locator("#compare-talk")).to_contain_text("哪条更有帮助")
    send(page, "hello")
    settled(page)
    expect(ballot(page).locator("[data-vote]").first).to_contain_text("A 更好")
    page.keyboard.press("3")
    expect(ballot(page)).to_contain_text("你的投票：两条都好。")
    page.get_by_role("button", name="公布模型名称").click()
    expect(ballot(page)).to_contain_text("你和评判模型意见一致。")
    context.close()


def test_a_list_with_one_model_says_what_is_missing(chromium: Page, tmp_path: Path):
    services = make(tmp_path, ("maple-1",))
    with serving(build_server(services)) as where:
        chromium.goto(f"{where}/?screen=compare")
        expect(chromium.locator("#compare-talk")).to_contain_text("Only one model is available")
        expect(chromium.locator("#compare-talk pre")).to_contain_text("[[models]]")
        expect(chromium.locator("#compare-message")).to_have_count(0)


@pytest.mark.timeout(600)  # two real models on whatever is left of the machine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(not CHECKPOINT.is_file(), reason="the shipped model is not there")
def test_the_models_of_the_shipped_list_are_compared_judged_and_counted(
    chromium: Page, tmp_path: Path
):
    services = Services(
        Models(Registry.from_toml(app.MODELS)), VoteStore(default_url(tmp_path)), grace_seconds=20
    )
    with serving(build_server(services)) as where:
        page = opened(chromium, where)
        send(page, "I lost my job and I am afraid to tell my family.")
        expect(page.locator("#compare-ballot .ballot.is-open")).to_have_attribute(
            "data-over", "yes", timeout=480_000
        )
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(1600)
        page.keyboard.press("2")
        expect(ballot(page)).to_contain_text("Your vote is stored and counts.")
        ballot(page).get_by_role("button", name="Reveal the models").click()
        expect(ballot(page).locator(".judge")).to_contain_text("You and the judge", timeout=120_000)
        expect(ballot(page).locator("tbody tr")).to_have_count(6)
        expect(ballot(page).locator(".names dd")).to_have_count(2)
        page.wait_for_timeout(3000)  # boards ignore votes younger than two seconds
        page.locator("#screen-results-button").click()
        expect(page.locator("#results-board")).to_contain_text(
            "Not enough votes to rank models: 1 of"
        )
    (vote,) = services.votes.votes()

    assert vote.blind
    assert vote.flags == ()
    assert vote.verdict is not None
    assert vote.rewards is not None
