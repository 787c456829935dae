"""The page with the shipped models: real weights, real scores."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import app
from compeer_core.registry import Registry
from compeer_core.votes.database import default_url
from compeer_core.votes.store import VoteStore
from tests.browser.conftest import opened
from ui_components.server.app import build_server, serving
from ui_components.shared.models import Models
from ui_components.shared.services import Services

CHECKPOINTS = (
    app.MODELS.parent / "checkpoints" / "compeer-small" / "adapter_config.json",
    app.MODELS.parent / "checkpoints" / "unifireward-small" / "adapter_config.json",
)

if all(map(Path.is_file, CHECKPOINTS)):
    # Gradio uses deprecated pandas features.
    pytestmark = pytest.mark.filterwarnings(
        "ignore:'future.no_silent_downcasting' is deprecated", "ignore::DeprecationWarning"
    )

    def test_a_person_gets_a_reply_three_steps_and_scores_from_the_shipped_models(
        chromium: Page, tmp_path: Path
    ):
        models = Models(Registry.from_toml(app.MODELS))
        services = Services(models, VoteStore(default_url(tmp_path)))
        with serving(build_server(services)) as address:
            failures: list[Exception] = []
            services.models.warm_up(failures.append).join(120)
            assert failures == []
            page = opened(chromium, address)
            page.locator("#message textarea").fill(
                "I lost my job and I am afraid to tell my family."
            )
            page.locator("#message textarea").press("Enter")
            turn = page.locator("#conversation .turn")
            expect(turn).to_have_attribute("data-outcome", "finished", timeout=60_000)

            expect(turn.locator(".answer .words")).not_to_be_empty()
            expect(page.locator("#inspector .card[data-state=done]")).to_have_count(3)
            expect(page.locator("#inspector .card .verdict")).to_have_count(3)
            expect(page.locator("#inspector .total")).to_contain_text("of 4")
