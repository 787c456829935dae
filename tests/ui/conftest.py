"""Handlers that show an end as soon as it is there, and pages that are built once each."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio.blocks
import pytest
from gradio.routes import App

from ui_components.shared import jobs


@pytest.fixture(autouse=True)
def _quick_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at jobs more often than a page needs: most tests wait for little else."""
    monkeypatch.setattr(jobs, "UPDATES_PER_SECOND", 100)


@pytest.fixture(scope="session", autouse=True)
def _one_inner_application() -> Iterator[None]:
    """Let blocks keep the application of their queue.

    Gradio makes it three times as blocks are built, each time the same and for 0.2 s, and then the
    one that is served.
    """

    def kept(blocks: gradio.blocks.Blocks, **options: Any) -> App:
        return getattr(blocks, "app", None) or App.create_app(blocks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradio.blocks, "App", SimpleNamespace(create_app=kept))
        yield
