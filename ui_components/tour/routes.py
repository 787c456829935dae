"""Routes of the tour: the printable page, the count of votes, and the source files of its claims."""

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gradio as gr
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from markupsafe import Markup

from compeer_core.errors import CompeerError, ConfigError
from compeer_core.votes.leaderboard.board import Filters
from ui_components.results.view import sentence, titles
from ui_components.server.admission_queue import QueueFullError
from ui_components.shared.services import Services
from ui_components.shared.templating import render
from ui_components.shared.texts import ASSETS, LANGUAGES, Texts, load_texts
from ui_components.shared.theme import STYLE
from ui_components.tour.screen import steps_in, the_tour

SERVED = (
    "results/*.json",
    "checkpoints/*/README.md",
    "tour/*.json",
    "tour/*.toml",
    "help_lines.toml",
)
"""The files served below ``assets``: figures, cards, recordings. No weights."""

BOARD_SECONDS = 20.0
"""A board of very many votes takes seconds; after that it is cached."""

NO_BOARD = (CompeerError, QueueFullError, TimeoutError)


def add_routes(app: FastAPI, services: Services) -> None:
    """Add the routes to the application."""

    def texts_for(request: Request) -> Texts:
        language = request.query_params.get("lang")
        return (
            load_texts(language) if language in LANGUAGES else services.texts(gr.Request(request))
        )

    @app.get("/tour/print")
    def tour_print(request: Request) -> Response:
        """Serve the whole tour as one printable page."""
        texts = texts_for(request)
        try:
            live = _live(services, texts)
        except NO_BOARD:
            live = ""
        try:
            return HTMLResponse(print_html(texts, live))
        except ConfigError as error:
            return PlainTextResponse(texts("tour.damaged", reason=error), status_code=500)

    @app.get("/tour/votes")
    def tour_votes(request: Request) -> Response:
        """Return the count of votes."""
        texts = texts_for(request)
        try:
            return HTMLResponse(_live(services, texts), headers={"cache-control": "no-store"})
        except NO_BOARD:
            return PlainTextResponse(texts("tour.live_failed"), status_code=503)

    @app.get("/tour/files/{name:path}")
    def tour_file(name: str) -> Response:
        """Serve the source file of a claim."""
        served = {
            path.relative_to(ASSETS).as_posix(): path
            for pattern in SERVED
            for path in ASSETS.glob(pattern)
        }
        if name not in served:
            return PlainTextResponse("not found", status_code=404)
        kind = "application/json" if name.endswith(".json") else "text/plain; charset=utf-8"
        return Response(served[name].read_bytes(), media_type=kind)


def print_html(texts: Texts, live: str) -> str:
    """Return the whole tour as one printable page.

    Raises:
        ConfigError: The tour's files are damaged.
    """
    other = next(language for language in LANGUAGES if language != texts.language)
    return render(
        "tour_print.html",
        **steps_in(the_tour(), texts, files="files/", printed=True, live=live),
        style=Markup(_style()),
        other=other,
        today=datetime.now(UTC).date().isoformat(),
        version=_version(),
    )


def _live(services: Services, texts: Texts) -> str:
    board = services.boards.current(Filters()).result(BOARD_SECONDS).board
    return render(
        "tour_live.html",
        t=texts,
        votes=board.votes + sum(board.left_out.model_dump().values()),
        counted=board.votes,
        people=board.raters,
        told=sentence(board, texts, titles(services.models)),
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _style() -> str:
    """The light colours, the tour's style, and the print style."""
    sheets: list[Path] = [STYLE / "page.css", STYLE / "screen_tour.css", STYLE / "tour_print.css"]
    page, *others = (sheet.read_text(encoding="utf-8") for sheet in sheets)
    return "\n".join([page[: page.index("/* --- one language at a time --- */")], *others])


def _version() -> str:
    try:
        return version("compeer")
    except PackageNotFoundError:
        return "dev"
