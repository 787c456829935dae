""" "Delete my data" in a real Chromium: the page reports what happened."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import StoreError
from compeer_core.votes.battles import BattlePlan, SidePlan
from ui_components.server.visitors import COOKIE
from ui_components.shared.services import Services

pytestmark = pytest.mark.browser


def press(page: Page) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete my data").click()


def opened(page: Page, services: Services) -> None:
    """Open a comparison of the page's visitor."""
    cookies = {each["name"]: each["value"] for each in page.context.cookies()}
    visitor = services.visitors.read({COOKIE: cookies[COOKIE]})
    services.votes.open_battle(
        BattlePlan(
            voter=visitor,
            dialogue=Dialogue((Utterance(Speaker.SEEKER, "hello"),)),
            sides=(SidePlan("a", 1), SidePlan("b", 2)),
            seed=0,
            keep_words=True,
        )
    )


def test_beside_another_program_that_reads_the_page_says_that_traces_are_left(
    page: Page, services: Services
) -> None:
    opened(page, services)
    services.votes.database.erased.result(30)
    path = Path(services.votes.database.name.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM battles").fetchone()
        press(page)
        told = page.get_by_text("Deleted: 1 comparisons, 0 votes")
        expect(told).to_contain_text("still holds traces")
    services.votes.database.erased.result(30)


def test_the_draft_and_the_remembered_models_are_deleted_too(page: Page) -> None:
    box = page.locator("#message textarea")
    page.locator("#policy input").click()
    page.get_by_role("option", name="other").click()
    with page.expect_response("**/run/predict"):
        box.fill("half a thought")
    page.wait_for_function("localStorage.getItem('compeer-models') !== null")
    page.wait_for_timeout(1000)  # the last event
    with page.expect_navigation():
        press(page)

    expect(page.locator("#conversation .empty")).to_be_visible()
    expect(page.locator("#policy input")).to_have_value("Scripted policy")
    expect(box).to_have_value("")


def test_where_the_database_fails_the_page_says_what_is_left(
    page: Page, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise StoreError("database or disk is full")

    monkeypatch.setattr(services.votes, "delete_voter", fail)
    press(page)

    expect(page.get_by_text("Your conversations are deleted. Your votes")).to_be_visible()


def test_where_nobody_answers_the_page_says_that_nothing_was_deleted(page: Page) -> None:
    page.route("**/forget", lambda route: route.fulfill(status=503, body="Service Unavailable"))
    press(page)

    expect(page.get_by_text("Nothing could be deleted")).to_be_visible()
