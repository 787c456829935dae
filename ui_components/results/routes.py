"""The results as files: board (JSON), tables (CSV), plot (SVG) and votes (JSON Lines).

They are public. `compeer_core.votes.public` decides what a file of votes reveals about people.
``as_of`` names the moment, as the page's links do; without it a file is current.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from compeer_core.errors import InputError, StoreError
from compeer_core.votes.leaderboard.board import Board, Filters
from compeer_core.votes.leaderboard.plot import to_svg
from compeer_core.votes.leaderboard.text import TABLES, to_csv, to_json
from ui_components.results.filters import read_filters
from ui_components.server.admission_queue import QueueFullError
from ui_components.shared.services import Services

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


def add_routes(app: FastAPI, services: Services) -> None:
    """Add the downloads of the results."""
    boards = services.boards

    async def board_of(request: Request) -> Board:
        # Not from `request.url`, which an invalid Host header or byte makes unusable.
        filters = read_filters(request.scope["query_string"].decode("latin-1"))
        as_of = _moment(request)
        if as_of is None:
            return (await _made(boards.current(filters))).board
        return await _made(boards.at(filters, as_of))

    async def board_json(request: Request) -> Response:
        board = await board_of(request)
        return _file(to_json(board), "application/json", f"board-{board.vote_set[:8]}.json")

    async def board_svg(request: Request) -> Response:
        board = await board_of(request)
        return _file(to_svg(board), "image/svg+xml", f"board-{board.vote_set[:8]}.svg")

    async def table_csv(request: Request) -> Response:
        table = str(request.path_params["table"])
        if table not in TABLES:
            return PlainTextResponse(f"there are {', '.join(TABLES)}\n", status_code=404)
        board = await board_of(request)
        return _file(to_csv(board, table), "text/csv", f"{table}-{board.vote_set[:8]}.csv")

    async def votes_jsonl(request: Request) -> Response:
        as_of = _moment(request)
        if as_of is None:
            standing = await _made(boards.current(Filters()))
            assert standing.board.as_of is not None
            as_of = standing.board.as_of
        text = await _made(boards.public_votes(as_of))
        return _file(text, "application/jsonl", f"votes-{as_of:%Y%m%dT%H%M%SZ}.jsonl")

    for path, answer in {
        "/results/board.json": board_json,
        "/results/board.svg": board_svg,
        "/results/votes.jsonl": votes_jsonl,
        "/results/{table}.csv": table_csv,
    }.items():
        app.add_api_route(path, _told(answer), methods=["GET"], response_model=None)


def _told(
    answer: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Turn errors into one sentence."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except InputError as error:
            return PlainTextResponse(f"{error}\n", status_code=400)
        except QueueFullError:
            return PlainTextResponse("many boards are being made; try again\n", status_code=503)
        except StoreError as error:
            logger.warning("the votes cannot be read: %s", error)
            return PlainTextResponse("the votes cannot be read; try again\n", status_code=503)

    return answered


async def _made(future: "Future[Made]") -> Made:
    # A client that disconnects must not cancel the board for others who wait for it.
    return await asyncio.shield(asyncio.wrap_future(future))


def _moment(request: Request) -> datetime | None:
    text = request.query_params.get("as_of")
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the time zone may leave the calendar
        pass
    raise InputError("as_of must be a date with time and zone, such as 2026-11-21T12:00:00Z")


def _file(text: str, kind: str, name: str) -> Response:
    return Response(
        text.encode(),
        media_type=kind,
        headers={
            "content-disposition": f'attachment; filename="compeer-{name}"',
            "cache-control": "no-store",
        },
    )
