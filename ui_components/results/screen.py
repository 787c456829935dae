"""The results screen: which model is preferred, how certain that is, and from which votes.

The page shows the cached board at once, and the current one when it is ready. The visitor's filters
are in the form only; the server stores nothing about them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from compeer_core.errors import InputError, StoreError
from compeer_core.votes.leaderboard.board import Filters
from ui_components.results.boards import Standing
from ui_components.results.filters import read_filters
from ui_components.results.view import (
    counting_html,
    filters_html,
    form_key,
    results_html,
    trouble_html,
)
from ui_components.server.admission_queue import QueueFullError
from ui_components.shared.services import Services
from ui_components.shared.texts import ASSETS, Texts

logger = logging.getLogger(__name__)


def build_results(services: Services, i18n: gr.I18n) -> None:
    """Lay out the results and register their handlers."""
    del i18n  # gradio renders nothing here
    form = gr.HTML(
        elem_id="results-form",
        js_on_load=(ASSETS / "style" / "results.js").read_text(encoding="utf-8"),
        apply_default_css=False,
    )
    board = gr.HTML(
        counting_html(), elem_id="results-board", js_on_load=None, apply_default_css=False
    )
    results = Results(services, ResultsParts(form, board))
    form.look(
        results.look,
        [],
        [form, board],
        queue=True,
        show_progress="hidden",
        api_visibility="private",
        concurrency_limit=None,
        trigger_mode="multiple",  # otherwise requests during a computation are lost
    )


@dataclass(frozen=True)
class ResultsParts:
    """The components that the handlers change."""

    form: gr.HTML
    board: gr.HTML


class Results:
    """The handlers of the results."""

    def __init__(self, services: Services, parts: ResultsParts) -> None:
        self._services = services
        self._parts = parts

    async def look(self, request: gr.Request, event: gr.EventData) -> AsyncIterator[dict[Any, Any]]:
        """Show the cached board at once, then the current one.

        The event names the filters (``query``) and the form that the page shows (``form``).
        """
        texts = self._services.texts(request)
        drawn = str(getattr(event, "form", ""))
        try:
            filters = read_filters(str(getattr(event, "query", "")))
        except InputError:
            yield {self._parts.board: trouble_html(texts, texts("results.unusable"))}
            return
        boards = self._services.boards
        latest = boards.kept(filters)
        if latest is None:
            yield {self._parts.board: counting_html((texts.language,))}
        else:
            yield self._shown(latest, filters, texts, drawn)
            drawn = form_key(latest.choices, texts)
        try:
            # A client that disconnects must not cancel the board for others who wait for it.
            now = await asyncio.shield(asyncio.wrap_future(boards.current(filters)))
        except QueueFullError:
            sentence = texts("results.busy")
        except StoreError as error:
            logger.warning("the votes cannot be read: %s", error)
            sentence = texts("results.failed")
        else:
            if latest is None or now.board is not latest.board:
                yield self._shown(now, filters, texts, drawn)
            return
        yield {self._parts.board: trouble_html(texts, sentence)}

    def _shown(
        self, standing: Standing, filters: Filters, texts: Texts, drawn: str
    ) -> dict[Any, Any]:
        update: dict[Any, Any] = {
            self._parts.board: results_html(
                standing.board, texts, self._services.models, standing.example
            )
        }
        # Replacing the form loses the focus, so it is replaced only if its choices change.
        if drawn != form_key(standing.choices, texts):
            update[self._parts.form] = filters_html(standing.choices, filters, texts)
        return update
