"""The owner's path at the annotation desk in a real Chromium, from the first sign-in to the download."""

import json
import re

import pytest
from playwright.sync_api import Browser, Page, expect

from compeer_core.annotation.annotations import read_annotations
from compeer_core.annotation.owner import DeskOwner
from tests.browser.axe import violations
from tests.browser.conftest import visit
from tests.browser.test_annotate import DESK, HOSTILE, fits, record, title
from tests.pages import COMPLETE, make_services
from training.cer.steps.annotation import items
from ui_components.server.app import build_server, serving

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")


class World:
    """A server with an empty desk, and files to import."""

    def __init__(self, folder):
        self.services = make_services(folder)
        self.token = DeskOwner(self.services.votes).token()
        self.items, self.answers = folder / "items.jsonl", folder / "answers.jsonl"
        cases = [record(number).case for number in range(1, 9)]
        items([(each, "policy", COMPLETE) for each in cases], self.items, folder / "key", seed=1)
        self.ids = [json.loads(line)["id"] for line in self.items.read_text().splitlines()]

    def write_answers(self, **changes):
        """Write a reader's answers, the last of them changed."""
        answer = {
            "annotator": "reader-1",
            "steps": [True, False, True],
            "preference": "first",
            "date": "2026-11-24T12:00:00Z",
        }
        rows = [{"item_id": item, **answer} for item in self.ids]
        rows[-1] |= changes
        self.answers.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    with serving(build_server(made.services)) as address:
        made.address = f"{address}/?screen=annotate"
        yield made
    made.services.votes.close()


def go(page: Page, place):
    page.locator(f".desk-places [data-go={place}]").click()
    expect(page.locator(f"{DESK} .owner")).to_have_attribute("data-place", place)
    assert violations(page, DESK) == []
    assert fits(page)


def form(page: Page, action):
    return page.locator(f"form[data-action={action}]")


def submit(page: Page, action):
    form(page, action).get_by_role("button").last.click()


def invite(page: Page, name, *, decides=False):
    """Add an annotator and return the link that is shown."""
    form(page, "person").locator("[name=name]").fill(name)
    form(page, "person").locator("[name=may_adjudicate]").set_checked(decides)
    submit(page, "person")
    expect(page.locator(f"{DESK} .told").nth(1)).to_have_text(f"{name} was added.")
    return page.locator("[data-link]").input_value()


def test_the_owner_sets_up_a_desk_and_people_check_the_reader(world, browser: Browser, size):
    world.write_answers(steps=[True, None, True])
    with visited(browser, world.address, size) as owner:
        owner.locator("#desk-token").fill(world.token)
        owner.locator("#desk-token").press("Enter")
        expect(owner.locator(f"{DESK} .owner")).to_be_visible()
        expect(owner.locator(DESK)).to_contain_text("There are no annotators yet")
        form(owner, "person").locator("[name=name]").fill(" ")
        submit(owner, "person")
        expect(form(owner, "person").locator("[role=alert]")).to_have_text(
            "Please enter a pseudonym."
        )
        anns = invite(owner, "ann")
        assert violations(owner, DESK) == []
        assert fits(owner)
        invite(owner, HOSTILE[:20].replace("\u202e", ""))
        go(owner, "items")
        submit(owner, "samples")
        expect(owner.locator(".batch")).to_have_count(1)

        # An answer without a verdict: nothing is imported, the file names stay in the form.
        owner.locator("[data-fold=check] > summary").click()
        form(owner, "import").locator("[name=items]").set_input_files(world.items)
        form(owner, "import").locator("[name=answers]").set_input_files(world.answers)
        form(owner, "import").locator("[name=share]").fill("50")
        submit(owner, "import")
        expect(form(owner, "import").locator("[role=alert]")).to_have_text(
            re.compile(
                r"^Nothing was imported\. answers\.jsonl, line 8: item \w+: the emotion step has no"
            )
        )
        assert violations(owner, DESK) == []
        expect(owner.locator(".batch")).to_have_count(1)
        world.write_answers()
        form(owner, "import").locator("[name=answers]").set_input_files(world.answers)
        submit(owner, "import")
        expect(owner.locator(DESK)).to_contain_text(
            "4 items were imported. 4 are not in the random share."
        )
        batch = owner.locator(".batch", has_text="Check the reader")
        batch.locator("summary").click()
        batch.get_by_label("ann", exact=True).check()
        batch.locator("[name=overlap]").fill("50")
        batch.get_by_role("button", name="Save").click()
        expect(batch.locator("[role=alert]")).to_contain_text("One person cannot answer an item")
        batch.locator("[name=overlap]").fill("0")
        batch.get_by_role("button", name="Save").click()
        expect(batch).to_contain_text("Assigned to ann")
        owner.once("dialog", lambda dialog: dialog.accept())
        samples = owner.locator(".batch", has_text="Samples")
        samples.locator("summary").click()
        samples.get_by_role("button", name="Delete this batch").click()
        expect(owner.locator(".batch")).to_have_count(1)
        owner.keyboard.press("z")  # a key of the annotators

        with visited(browser, anns, size) as ann:
            assert "#" not in ann.url
            ann.get_by_role("button", name="Sign in").click()
            for _ in range(4):
                heading = title(ann).inner_text()
                assert "eader" not in ann.locator(DESK).inner_text()
                for choice in ("step-1", "step-2", "step-3"):
                    ann.locator(f"input[name={choice}][value=right]").check()
                ann.locator("input[name=preference][value=both]").check()
                ann.get_by_role("button", name="Save and next").click()
                expect(title(ann)).not_to_have_text(heading)
            expect(ann.locator("[data-nothing=over]")).to_be_visible()
            ann.goto(world.address)  # not as the owner
            expect(ann.locator(f"{DESK} .inside:not(.owner)")).to_be_visible()

        go(owner, "agreement")
        expect(owner.locator(DESK)).to_contain_text("4 of 4 items are done")
        expect(owner.locator(".measures tbody tr").nth(1)).to_contain_text("0 %")
        with owner.expect_download() as download:
            owner.get_by_role("link", name="Answers (JSONL)", exact=True).click()
        said = world.items.with_name("said.jsonl")
        download.value.save_as(said)
        assert [each.annotator for each in read_annotations(said)] == ["ann"] * 4
        go(owner, "people")
        owner.once("dialog", lambda dialog: dialog.accept())
        owner.get_by_role("button", name="Revoke the link of ann", exact=True).click()
        expect(owner.locator(DESK)).to_contain_text("The link of ann was revoked.")
        assert owner.evaluate("window.stolen") is None
        owner.reload()
        expect(owner.locator(f"{DESK} .owner")).to_be_visible()
        expect(owner.locator("[data-link]")).to_have_count(0)
        owner.get_by_role("button", name="Sign out").click()
        expect(owner.locator("#desk-token")).to_be_visible()


def visited(browser, address, size):
    """Open the desk as a new visitor."""
    return visit(browser, address, size, locale="en-US", ready="#annotate [data-place]")
