"""A cache of leaderboards, because computing one takes a second or two.

One thread reads votes and computes boards, so that it blocks neither the event loop nor replies,
and a hundred visitors who request the same board cause one computation.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TypeVar

from compeer_core.errors import InputError
from compeer_core.votes.leaderboard.board import (
    Board,
    Filters,
    Settings,
    Status,
    bradley_terry,
)
from compeer_core.votes.public import public_rows
from compeer_core.votes.rows import VoteRow
from compeer_core.votes.store import VoteStore
from ui_components.results.example import example_board
from ui_components.server.admission_queue import QueueFullError

SETTLED = timedelta(seconds=2)
"""A board ignores more recent votes: one that is being written already has its time, so a board
reproduced later would include it."""
LOOK_SECONDS = 1.0
"""How long the database is not asked whether votes have changed."""
KEEP_SECONDS = 120.0
"""How long votes are cached even if their stamp is unchanged (`VoteStore.stamp`)."""
KEPT = 32
MOST_WAITING = 16
DEMO = Settings(min_votes=1, min_raters=1)
"""Ranks from the first vote on, so that a presenter alone can show a board."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Choices:
    """The filter values that occur among the votes."""

    languages: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    flags: Mapping[str, int] | None = None
    """The number of votes with each flag."""


@dataclass(frozen=True)
class Standing:
    """A board and the available filter values."""

    board: Board
    choices: Choices
    example: Board | None = None
    """The example, if there are too few votes or raters to rank models."""


@dataclass(frozen=True)
class _Reading:
    votes: tuple[VoteRow, ...]
    as_of: datetime
    stamp: tuple[int, ...]
    choices: Choices
    read_at: float
    looked_at: float


class Boards:
    """The boards of one server."""

    def __init__(
        self,
        store: VoteStore,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to compute boards of a store's votes; nothing is read yet."""
        self._store = store
        self._settings = settings or Settings()
        self._clock = clock
        self._maker = ThreadPoolExecutor(1, "boards")
        self._lock = threading.Lock()
        self._waiting: dict[object, Future[object]] = {}
        self._latest: OrderedDict[Filters, Standing] = OrderedDict()
        self._made: OrderedDict[tuple[datetime, Filters], Board] = OrderedDict()
        self._reading: _Reading | None = None

    def kept(self, filters: Filters) -> Standing | None:
        """Return the latest cached board at once, possibly outdated. None before the first request."""
        with self._lock:
            return self._latest.get(filters)

    def current(self, filters: Filters) -> "Future[Standing]":
        """Return the current board as a future.

        The result raises `StoreError` if the database failed.

        Raises:
            QueueFullError: Too many different boards are requested.
        """
        return self._ask(("current", filters), lambda: self._current(filters))

    def at(self, filters: Filters, as_of: datetime) -> "Future[Board]":
        """Return the board at a past moment; see `current`.

        The result raises `InputError` if the moment is in the future.
        """
        return self._ask(("at", filters, as_of), lambda: self._at(filters, as_of))

    def public_votes(self, as_of: datetime) -> "Future[str]":
        """Return the public votes at a past moment as JSON Lines; see `at`."""
        return self._ask(("votes", as_of), lambda: self._public_votes(as_of))

    # --- in the thread that computes ------------------------------------------------------------

    def _ask(self, key: object, make: Callable[[], Made]) -> "Future[Made]":
        with self._lock:
            cached: Future[Made] | None = self._waiting.get(key)  # type: ignore[assignment]
            if cached is not None:
                return cached
            if len(self._waiting) >= MOST_WAITING:
                raise QueueFullError
            made = self._maker.submit(make)
            self._waiting[key] = made  # type: ignore[assignment]
        made.add_done_callback(lambda _: self._answered(key))
        return made

    def _answered(self, key: object) -> None:
        with self._lock:
            self._waiting.pop(key, None)

    def _current(self, filters: Filters) -> Standing:
        reading = self._read()
        board = self._board(reading, filters)
        too_few = board.status in {Status.NOT_ENOUGH_VOTES, Status.NOT_ENOUGH_RATERS}
        standing = Standing(board, reading.choices, example_board() if too_few else None)
        with self._lock:
            _keep(self._latest, filters, standing)
        return standing

    def _at(self, filters: Filters, as_of: datetime) -> Board:
        cached = self._made.get((as_of, filters))
        return cached or self._board(self._read_at(as_of), filters)

    def _public_votes(self, as_of: datetime) -> str:
        rows = public_rows(self._read_at(as_of).votes)
        return "".join(f"{row.model_dump_json()}\n" for row in rows)

    def _board(self, reading: _Reading, filters: Filters) -> Board:
        key = (reading.as_of, filters)
        board = self._made.get(key)
        if board is None:
            board = bradley_terry(
                reading.votes, filters=filters, settings=self._settings, as_of=reading.as_of
            )
            _keep(self._made, key, board)
        return board

    def _read(self) -> _Reading:
        now, last = self._clock(), self._reading
        if last is not None and now - last.looked_at < LOOK_SECONDS:
            return last
        as_of = self._last_moment()
        stamp = self._store.stamp(as_of)
        if last is not None and last.stamp == stamp and now - last.read_at < KEEP_SECONDS:
            self._reading = replace(last, looked_at=now)
        else:
            self._reading = self._fetch(as_of, stamp, now)
            self._made.clear()
            if last is not None and last.stamp[-1] != stamp[-1]:
                with self._lock:
                    self._latest.clear()
        return self._reading

    def _read_at(self, as_of: datetime) -> _Reading:
        if as_of > self._last_moment():
            raise InputError("as_of is in the future")
        if self._reading is not None and self._reading.as_of == as_of:
            return self._reading
        return self._fetch(as_of, (), self._clock())

    def _last_moment(self) -> datetime:
        return (self._store.now() - SETTLED).replace(microsecond=0)

    def _fetch(self, as_of: datetime, stamp: tuple[int, ...], now: float) -> _Reading:
        votes = tuple(self._store.votes(as_of))
        return _Reading(votes, as_of, stamp, _choices(votes), now, now)


def _choices(votes: tuple[VoteRow, ...]) -> Choices:
    flags: dict[str, int] = {}
    for vote in votes:
        for flag in vote.flags:
            flags[flag] = flags.get(flag, 0) + 1
    return Choices(
        languages=tuple(sorted({vote.language for vote in votes})),
        topics=tuple(sorted({vote.topic for vote in votes} - {""})),
        flags=dict(sorted(flags.items())),
    )


Key = TypeVar("Key")


def _keep(kept: OrderedDict[Key, Made], key: Key, made: Made) -> None:
    kept[key] = made
    kept.move_to_end(key)
    while len(kept) > KEPT:
        kept.popitem(last=False)
