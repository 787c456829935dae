"""The gate and the scores in a real Chromium, with scripted draws."""

import re

import pytest
from playwright.sync_api import Page, expect

from compeer_core.backends.scripted import ScriptedScorer, ScriptedTurn
from compeer_core.policy import Policy
from compeer_core.unifireward import Judge
from tests.browser.axe import violations
from tests.draws import Draws
from tests.pages import COMPLETE, LOOP, REPLY
from ui_components.shared.services import Services

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

LOOPED = "I am here for you, always."


def play(monkeypatch: pytest.MonkeyPatch, services: Services, *turns: ScriptedTurn | str) -> None:
    """Let every model play these draws, one after the other."""
    backend = Draws(*turns)
    monkeypatch.setattr(services.models, "policy", lambda name: Policy(name, backend))


def send(page: Page, text: str) -> None:
    """Send a message and wait until its reply has ended."""
    page.locator("#message textarea").fill(text)
    page.locator("#message textarea").press("Enter")
    expect(page.locator("#conversation .turn")).to_have_count(1)
    expect(page.locator("#conversation .log")).to_have_attribute("data-running", "no")
    expect(page.locator("#inspector .score")).to_be_visible()


def test_a_rejected_reply_disappears_and_its_draw_is_shown_on_demand(page, services, monkeypatch):
    slow = ScriptedTurn(text=LOOP, delay_seconds=0.02, chunk_characters=16)
    play(monkeypatch, services, slow, COMPLETE)
    send(page, "I lost my job.")

    expect(page.locator("#conversation .answer .words")).to_have_text(REPLY)
    expect(page.locator("#conversation")).not_to_contain_text(LOOPED)
    expect(page.locator("#inspector .gate")).to_have_text(
        re.compile("Regenerated: it repeated itself.$")
    )
    rejected = page.locator("#inspector details[data-fold=draws]")
    expect(rejected.locator("pre")).to_be_hidden()
    rejected.locator("summary").press("Enter")
    expect(rejected.locator("pre")).to_be_visible()
    expect(rejected.locator("pre")).to_contain_text(LOOPED)

    play(monkeypatch, services, LOOP)
    page.get_by_role("button", name="Regenerate the reply to message 1").click()
    line = page.locator("#conversation .answer .status")
    expect(line).to_contain_text("The model did not produce a usable reply. You can try again.")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.locator("#conversation")).not_to_contain_text(LOOPED)
    assert violations(page, "#inspector", "#conversation") == []


def test_the_inspector_begins_with_the_count_and_unsure_has_a_word_and_a_mark(
    page, services, monkeypatch
):
    answers = [{"True": p, "False": 1 - p} for p in (0.9, 0.5, 0.1)]
    judge = Judge("judge", ScriptedScorer(answers))
    monkeypatch.setattr(services.models, "judge", lambda name: judge)
    play(monkeypatch, services, COMPLETE)
    send(page, "I lost my job.")

    tally = page.locator("#inspector .tally b")
    expect(tally).to_have_text("steps judged: 1 correct, 1 unsure, 1 incorrect")
    first_card = page.locator("#inspector .card").first
    assert tally.bounding_box()["y"] < first_card.bounding_box()["y"]
    unsure = page.locator("#inspector .card[data-part=emotion] .verdict")
    expect(unsure).to_have_class(re.compile("is-unsure"))
    expect(unsure).to_have_text(re.compile(r"\?\s+unsure\s+50 % likely correct"))
    expect(page.locator("#inspector .reply-verdict")).to_contain_text("no baseline")
    expect(page.locator("#inspector .total")).to_be_hidden()
    chip = page.locator("#conversation .chip")
    expect(chip).to_contain_text("Reasoning: Exploration")
    expect(chip).to_have_accessible_name(re.compile("1 correct, 1 unsure, 1 incorrect$"))
    assert violations(page, "#inspector", "#conversation", "#note") == []
    page.set_viewport_size({"width": 390, "height": 844})
    box = chip.bounding_box()  # the longest count must not widen the page
    assert box["x"] + box["width"] <= 390
