"""The annotation desk in a real Chromium: keyboard, tabs, a lost server."""

import re

import PIL.Image
import pytest
from playwright.sync_api import Browser, Page, expect

from compeer_core.annotation.desk import Desk
from compeer_core.cer import Candidate, CerRecord
from compeer_core.row_files import write_rows
from compeer_core.votes.__main__ import main
from tests.browser.axe import violations
from tests.cases import case_of
from tests.pages import COMPLETE, eventually, make_services
from training.data.records import read_records
from training.reward_model.conversations import Kind, conversations
from ui_components.server.app import build_server, serving

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

HOSTILE = '<img src=x onerror="window.stolen=1"> ${window.stolen=2} \u202ecba\u202c a\u200bb'
GOOD, BAD = "That sounds exhausting. What would help today?", HOSTILE
DESK = "#annotate"


def record(number):
    case = case_of(
        f"d{number}",
        f"I failed exam {number}. {HOSTILE}",
        ("photo.png",) if number == 0 else (),
        original=BAD,
    )
    turn = f"{COMPLETE.partition('<reply>')[0]}<reply>{GOOD}</reply>"
    return CerRecord(
        id=f"d{number}#0",
        case=case,
        first=Candidate(author="corpus", reply=BAD),
        second=Candidate(author="policy", reply=GOOD, turn=turn),
    )


class World:
    """A server with a desk, and its annotators' tokens."""

    def __init__(self, folder, items=2):
        self.services = make_services(folder)
        self.desk = Desk(self.services.votes)
        PIL.Image.new("RGB", (60, 40), "teal").save(folder / "photo.png")
        write_rows(folder / "rows.jsonl", [record(number) for number in range(items)])
        url = f"sqlite:///{folder / 'compeer.sqlite3'}"
        assert main(["items", str(folder / "rows.jsonl"), "--database-url", url]) == 0
        names = {"ann": False, "bo": False, "cy": True}
        self.tokens = {n: self.desk.add_annotator(n, may_adjudicate=m) for n, m in names.items()}


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    with serving(build_server(made.services)) as address:
        made.address = f"{address}/?screen=annotate"
        yield made
    made.services.votes.close()


@pytest.fixture
def enter(browser: Browser, world):
    """Sign an annotator in, in a separate browser context."""
    contexts = []

    def entered(name, **options) -> Page:
        wanted = {
            "locale": "en-US",
            "timezone_id": "UTC",
            "viewport": {"width": 1280, "height": 860},
        }
        context = browser.new_context(**(wanted | options))
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.goto(world.address)
        page.locator("#desk-token").fill(world.tokens[name])
        page.locator("#desk-token").press("Enter")
        page.locator(f"{DESK} .inside").wait_for()
        return page

    yield entered
    for context in contexts:
        context.close()


def title(page):
    return page.locator("#desk-item-title")


def status(page):
    return page.locator(f"{DESK} [data-status]")


def prefer(page, reply):
    """Press the key of a reply, wherever it is shown."""
    texts = page.locator(f"{DESK} .pair .words").all_inner_texts()
    assert len(texts) == 2
    good = 0 if "exhausting" in texts[0] else 1
    page.keyboard.press(str((good if reply == "good" else 1 - good) + 1))


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# --- end to end ---------------------------------------------------------------------------------


def test_two_people_differ_a_third_decides_and_training_reads_the_file(world, enter, tmp_path):
    ann, bo = enter("ann"), enter("bo")
    expect(title(ann)).to_have_text("Item 1")
    photo = ann.locator(f"{DESK} .said-log img")
    expect(photo).to_be_visible()
    eventually(lambda: photo.evaluate("each => each.naturalWidth") == 60)
    for key in ("q", "w", "e"):
        ann.keyboard.press(key)
    prefer(ann, "good")
    ann.keyboard.press("Enter")
    expect(title(ann)).to_have_text("Item 2")
    expect(title(ann)).to_be_focused()

    expect(title(bo)).to_have_text("Item 1")
    for key in ("q", "Shift+W", "e"):
        bo.keyboard.press(key)
    prefer(bo, "bad")
    bo.locator("#desk-note").fill("Not fear. " + HOSTILE)
    bo.keyboard.press("Control+Enter")
    expect(title(bo)).to_have_text("Item 2")
    for page in (ann, bo):
        for key in ("q", "w", "Shift+E"):
            page.keyboard.press(key)
        prefer(page, "good")
        page.keyboard.press("Enter")
        expect(page.locator(f"{DESK} [data-nothing=waiting]")).to_be_visible()
    ann.locator("[data-go=agreement]").click()
    expect(title(ann)).to_have_text("Not available yet")

    cy = enter("cy")
    cy.locator("[data-go=conflicts]").click()
    expect(title(cy)).to_have_text("Item 1 · Conflicts")
    expect(cy.locator(f"{DESK} .mark")).to_have_text(["≠ differs", "≠ differs"])
    expect(cy.locator(f"{DESK} .note-said")).to_contain_text("Not fear. <img src=x")
    assert "ann" not in cy.locator(f"{DESK} .desk-form").inner_text().replace("cannot", "").replace(
        "annotators", ""
    )
    cy.keyboard.press("q")  # they agree on this one: nothing is asked
    cy.keyboard.press("w")
    prefer(cy, "good")
    cy.keyboard.press("Enter")
    expect(cy.locator("[data-form-said]")).to_have_text(
        re.compile("explain your decision in a few words")
    )
    expect(cy.locator("#desk-note")).to_be_focused()
    cy.keyboard.type("q 1 z ? fear is plain")
    cy.keyboard.press("Control+Enter")
    expect(
        cy.locator(f"{DESK} [data-nothing=over], {DESK} [data-nothing=no_conflicts]")
    ).to_be_visible()

    cy.locator(f"{DESK} .desk-places [data-go=agreement]").click()
    expect(cy.locator(f"{DESK} .measures").first).to_contain_text("50 %")
    assert violations(cy, DESK) == []
    with cy.expect_download() as download:
        cy.get_by_role("link", name="CER rows for training (JSONL)").click()
    download.value.save_as(tmp_path / "cer.jsonl")
    rows = list(read_records(tmp_path / "cer.jsonl", CerRecord))
    assert [row.second.steps for row in rows] == [(True, True, True), (True, True, False)]
    assert [row.preference for row in rows] == ["second", "second"]
    assert [row.preference_by.name for row in rows] == ["ann, cy", "ann, bo"]
    [asked] = conversations(rows[0], Kind.UNIFIED)
    said = [message.content[0] for message in asked if message.role == "assistant"]
    assert said == ["True", "True", "True", "Second"]
    reasons = [each.note for each in world.desk.annotations() if each.annotator == "cy"]
    assert reasons == ["q 1 z ? fear is plain"]
    for page in (ann, bo, cy):
        assert page.evaluate("window.stolen") is None


# --- keys ---------------------------------------------------------------------------------------


def test_every_key_does_what_the_help_says(enter):
    page = enter("ann")
    checked = lambda name: page.locator(f"input[name={name}]:checked").get_attribute("value")  # noqa: E731
    for key, step, value in (
        ("q", 1, "right"), ("w", 2, "right"), ("e", 3, "right"),
        ("Shift+Q", 1, "wrong"), ("Shift+W", 2, "wrong"), ("Shift+E", 3, "wrong"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert checked(f"step-{step}") == value
    for number, value in enumerate(("first", "second", "both", "neither"), start=1):
        page.keyboard.press(str(number))
        assert checked("preference") == value

    note = page.locator("#desk-note")
    note.focus()
    page.keyboard.type("q1z?")
    page.keyboard.press("Enter")
    assert note.input_value() == "q1z?\n"
    assert (checked("step-1"), checked("preference")) == ("wrong", "neither")
    page.keyboard.press("Escape")
    page.keyboard.press("q")
    assert checked("step-1") == "right"
    for chord in ("Control+1", "Alt+1"):
        page.keyboard.press(chord)
    assert checked("preference") == "neither"

    page.keyboard.press("?")
    dialog = page.locator(f"{DESK} dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("1")
    assert checked("preference") == "neither"
    assert violations(page, DESK) == []
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()

    page.keyboard.press("Enter")
    expect(title(page)).to_have_text("Item 2")
    page.keyboard.press("z")
    expect(title(page)).to_have_text("Item 1")
    assert (checked("step-1"), checked("preference")) == ("right", "neither")
    assert note.input_value() == "q1z?\n"

    page.locator("[data-keys]").uncheck()
    title(page).focus()
    page.keyboard.press("Shift+Q")
    assert checked("step-1") == "right"
    page.reload()
    expect(page.locator("[data-keys]")).not_to_be_checked()


def test_what_is_open_is_asked_for_and_the_first_of_it_is_focused(enter):
    page = enter("ann")
    page.keyboard.press("q")
    page.keyboard.press("Enter")

    expect(page.locator("[data-form-said]")).to_have_text(
        re.compile("3 questions are still unanswered")
    )
    expect(page.locator("input[name=step-2]").first).to_be_focused()
    page.keyboard.press("w")
    expect(page.locator("[data-form-said]")).to_be_hidden()


# --- drafts, tabs, a lost server ----------------------------------------------------------------


def test_a_draft_survives_a_reload_and_the_page_says_when_it_was_saved(enter):
    page = enter("ann")
    page.keyboard.press("Shift+W")
    page.locator("#desk-note").fill("half a tho")
    expect(status(page)).to_have_text(re.compile(r"^Saved \d\d:\d\d$"))
    expect(page.locator("[data-count=drafts]")).to_have_text("1")
    page.reload()

    expect(page.locator("#desk-note")).to_have_value("half a tho")
    expect(page.locator("input[name=step-2][value=wrong]")).to_be_checked()
    expect(page.locator("#desk-note")).to_be_enabled()  # the tab before it has let go
    expect(status(page)).to_have_text(re.compile(r"^Saved \d\d:\d\d$"))
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, location.href])")
    assert "half a tho" not in kept


def test_of_two_tabs_the_second_reads_until_the_first_is_closed(enter):
    first = enter("ann")
    second = first.context.new_page()
    second.goto(first.url)
    expect(second.locator("[data-read-only]")).to_contain_text("open in another tab")
    expect(second.locator("#desk-note")).to_be_disabled()
    second.keyboard.press("q")
    expect(second.locator("input[name=step-1]:checked")).to_have_count(0)
    first.keyboard.press("e")
    expect(status(first)).to_have_text(re.compile("^Saved"))

    first.close()
    expect(second.locator("#desk-note")).to_be_enabled()
    expect(second.locator("[data-read-only]")).to_be_hidden()
    expect(second.locator("input[name=step-3][value=right]")).to_be_checked()


def test_nothing_is_lost_while_the_server_does_not_answer(enter, world):
    page = enter("ann")
    page.context.set_offline(True)
    page.keyboard.press("q")
    expect(status(page)).to_have_text(
        re.compile("Your work is still on this page; retrying in 2 s")
    )
    expect(page.locator("[data-retry]")).to_be_visible()
    for key in ("w", "e", "3"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    expect(status(page)).to_have_text(re.compile("Your answer was not received"))
    expect(page.locator("#desk-note")).to_be_disabled()
    assert list(world.desk.annotations()) == []

    page.context.set_offline(False)
    expect(title(page)).to_have_text("Item 2")
    [said] = world.desk.annotations()
    assert (said.steps, said.preference) == ((True, True, True), "both")


def test_a_failing_database_is_told_and_the_draft_is_sent_again(enter):
    page = enter("ann")
    page.route("**/desk/draft", lambda route: route.fulfill(status=503, json={"error": "x"}))
    page.locator("#desk-note").fill("kept")
    expect(status(page)).to_have_text(re.compile("still on this page"))
    page.unroute("**/desk/draft")
    page.locator("[data-retry]").click()
    expect(status(page)).to_have_text(re.compile("^Saved"))
    expect(page.locator("[data-retry]")).to_be_hidden()


def test_who_is_logged_out_keeps_what_is_before_them(enter, world):
    page = enter("ann")
    world.desk.revoke("ann")
    page.locator("#desk-note").fill("not lost")

    expect(page.locator("[data-form-said]")).to_have_text(re.compile("You are signed out"))
    expect(page.locator("#desk-note")).to_have_value("not lost")


# --- sign-in ------------------------------------------------------------------------------------


def test_a_wrong_token_is_a_calm_sentence_and_the_right_one_is_nowhere_to_be_read(world, chromium):
    page = chromium
    page.goto(world.address)
    expect(page.locator(DESK)).to_contain_text("Annotate model output")
    assert violations(page, DESK) == []
    page.locator("#desk-token").fill("guess")
    page.locator("#desk-token").press("Enter")
    expect(page.locator("#desk-door-said")).to_have_text(re.compile("This token is not valid"))
    page.locator("#desk-token").fill(world.tokens["cy"])
    page.get_by_role("button", name="Sign in").click()
    expect(title(page)).to_have_text("Item 1")

    kept = page.evaluate("JSON.stringify([{...localStorage}, document.cookie, location.href])")
    assert world.tokens["cy"] not in kept
    assert "compeer_annotator" not in kept
    page.reload()
    expect(title(page)).to_have_text("Item 1")
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator(DESK)).to_contain_text("You are signed out")
    page.reload()
    expect(page.locator("#desk-token")).to_be_visible()


# --- accessibility ------------------------------------------------------------------------------


def test_axe_finds_nothing_and_a_phone_need_not_scroll_sideways(enter):
    ann, bo = enter("ann"), enter("bo")
    ann.locator(".guideline summary").click()
    assert violations(ann, DESK) == []
    for page, keys in ((ann, ("q", "w", "e", "1")), (bo, ("Shift+Q", "Shift+W", "Shift+E", "4"))):
        for key in keys:
            page.keyboard.press(key)
        assert violations(page, DESK) == []
        page.keyboard.press("Enter")
        expect(title(page)).to_have_text("Item 2")

    size = {"width": 390, "height": 844}
    cy = enter("cy", viewport=size)
    assert fits(cy)
    for place in ("conflicts", "agreement"):
        cy.locator(f".desk-places [data-go={place}]").click()
        expect(cy.locator(f"[data-place={place}]")).to_be_visible()
        assert violations(cy, DESK) == []
        assert fits(cy)


def test_the_desk_speaks_chinese(enter):
    page = enter("ann", locale="zh-CN")
    expect(title(page)).to_have_text("第 1 条")
    expect(page.locator(f"{DESK} .desk-form")).to_contain_text("回复 1 更好")
    words = (
        page.locator(f"{DESK} .desk-queue").inner_text() + page.locator(".desk-head").inner_text()
    )
    assert not re.search("[A-Za-z]{4,}", words)
    for key in ("q", "w", "e", "2", "Enter"):
        page.keyboard.press(key)
    expect(title(page)).to_have_text("第 2 条")
