"""The results: who is preferred, how sure that is, and what it was counted from.

The page shows at once what was made last, and the board of now when it is made. What a visitor chose
stands in the form alone, so that the server keeps nothing about it.
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
from ui_components.server.admission_queue import LineFullError
from ui_components.shared.services import Services
from ui_components.shared.texts import ASSETS, Texts

logger = logging.getLogger(__name__)


def build_results(services: Services, i18n: gr.I18n) -> None:
    """Lay out the results and wire them."""
    del i18n  # nothing here is drawn by gradio
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
        trigger_mode="multiple",  # otherwise what is asked while a board is on its way is lost
    )


@dataclass(frozen=True)
class ResultsParts:
    """What the handlers change."""

    form: gr.HTML
    board: gr.HTML


class Results:
    """The handlers of the results."""

    def __init__(self, services: Services, parts: ResultsParts) -> None:
        self._services = services
        self._parts = parts

    async def look(self, request: gr.Request, event: gr.EventData) -> AsyncIterator[dict[Any, Any]]:
        """Show a board: the one that is kept at once, then the one of now.

        The event names the filters (``query``) and the form that the page has drawn (``form``).
        """
        texts = self._services.texts(request)
        drawn = str(getattr(event, "form", ""))
        try:
            filters = read_filters(str(getattr(event, "query", "")))
        except InputError:
            yield {self._parts.board: trouble_html(texts, texts("results.unusable"))}
            return
        boards = self._services.boards
        kept = boards.kept(filters)
        if kept is None:
            yield {self._parts.board: counting_html((texts.language,))}
        else:
            yield self._shown(kept, filters, texts, drawn)
            drawn = form_key(kept.choices, texts)
        try:
            # Whoever leaves must not take the board away from others who wait for it.
            now = await asyncio.shield(asyncio.wrap_future(boards.current(filters)))
        except InputError:
            sentence = texts("results.unusable")
        except LineFullError:
            sentence = texts("results.busy")
        except StoreError as error:
            logger.warning("the votes cannot be read: %s", error)
            sentence = texts("results.failed")
        else:
            if kept is None or now.board is not kept.board:
                yield self._shown(now, filters, texts, drawn)
            return
        yield {self._parts.board: trouble_html(texts, sentence)}

    def _shown(
        self, standing: Standing, filters: Filters, texts: Texts, drawn: str
    ) -> dict[Any, Any]:
        update: dict[Any, Any] = {
            self._parts.board: results_html(standing.board, texts, self._services.models)
        }
        # A form that is drawn anew loses the focus, so it is only where it offers something else.
        if drawn != form_key(standing.choices, texts):
            update[self._parts.form] = filters_html(standing.choices, filters, texts)
        return update
