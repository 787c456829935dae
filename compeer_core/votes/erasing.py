"""Overwriting data in SQLite's files after it was deleted from the tables.

SQLite leaves deleted text behind in three places. ``secure_delete`` overwrites a deleted cell, but not copies in
the unused part of a page, left when SQLite moves cells between pages; the log beside the file (``-wal``) has older
versions of pages; and a long reader prevents the log from being emptied. So the file is rewritten (``VACUUM``,
about 4 ms per MB) and the log emptied (``wal_checkpoint(TRUNCATE)``, whose result says whether it worked).

Pending work is recorded in the file itself, as SQLite's ``user_version``: the deleting transaction increments
it, and it is 0 again when all is overwritten. So a program that was killed resumes at the next start.
"""

import logging
import shutil
import sqlite3
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection

_BUSY_SECONDS = 0.05
"""How long an attempt waits for readers; no other thread of this process can write meanwhile."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_PAUSE_PER_WORK = 9.0
"""Pause after an attempt, as a multiple of its duration."""
_MOST_IN_MEMORY = 64 * 2**20
"""Largest database in bytes that is rewritten in memory; a larger one needs a temporary file."""

logger = logging.getLogger(__name__)


class Eraser:
    """Overwrites deleted data, in a thread that ends when nothing is left to do."""

    def __init__(self, path: Path, turn: threading.Lock) -> None:
        """Create an idle eraser.

        `turn` is the lock of the writers of this process.
        """
        self._path = path
        self._turn = turn
        self._latest: Future[None] = Future()
        self._latest.set_result(None)
        self._waiting: list[Future[None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False

    @property
    def erased(self) -> "Future[None]":
        """Done when everything deleted before the last call of `ask` is overwritten."""
        with self._changed:
            return self._latest

    def ask(self) -> "Future[None]":
        """Overwrite everything deleted so far; the future is done when that is finished."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        with self._changed:
            self._latest = done
            self._waiting.append(done)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="eraser", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return done

    def close(self) -> None:
        """Stop the thread. Pending work resumes when the database is opened again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
            if self._connection is not None:
                self._connection.interrupt()
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            with self._changed:
                if self._is_closed or not self._waiting:
                    self._thread = None
                    return
                requests = tuple(self._waiting)
            begun = time.monotonic()
            is_done = self._try()
            took = time.monotonic() - begun
            with self._changed:
                if is_done:
                    del self._waiting[: len(requests)]
            if is_done:
                for each in requests:
                    each.set_result(None)
                pause = _FIRST_PAUSE_SECONDS
            self._rest(took * _PAUSE_PER_WORK, 0.0 if is_done else pause, len(requests))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _rest(self, least: float, pause: float, known: int) -> None:
        """Pause for `least` seconds, then for up to `pause` more until the next request."""
        with self._changed:
            if self._waiting:
                self._changed.wait_for(lambda: self._is_closed, least)
                self._changed.wait_for(lambda: self._is_closed or len(self._waiting) > known, pause)

    def _try(self) -> bool:
        """Make one attempt; return whether all deleted data is overwritten."""
        try:
            with self._turn, closing(self._connected()) as connection:
                with self._changed:
                    if self._is_closed:
                        return False
                    self._connection = connection
                try:
                    return self._overwrite(connection)
                finally:
                    with self._changed:
                        self._connection = None
        except (sqlite3.Error, OSError) as error:
            # A full disk, or another program that writes: retry.
            logger.info("deleted data is not overwritten yet: %s", type(error).__name__)
            return False

    def _overwrite(self, connection: sqlite3.Connection) -> bool:
        # The log first: beside a long reader, each attempt would grow it by the size of the file.
        if not _emptied_log(connection):
            return False
        due = _due(connection)
        if not due:
            return True
        size = self._path.stat().st_size
        if shutil.disk_usage(self._path.parent).free < size:
            return False  # VACUUM writes the whole file to the log
        if size <= _MOST_IN_MEMORY:
            connection.execute("PRAGMA temp_store = MEMORY")
        try:
            connection.execute("VACUUM")
        except sqlite3.Error:
            _emptied_log(connection)  # free its space
            raise
        if not _emptied_log(connection):
            return False
        connection.execute("BEGIN IMMEDIATE")
        if _due(connection) == due:  # otherwise another program has deleted something
            connection.execute("PRAGMA user_version = 0")
        connection.execute("COMMIT")
        return True

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )


def is_due(connection: Connection) -> bool:
    """Whether any program has deleted data that is not overwritten yet."""
    return bool(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def mark_due(connection: Connection) -> None:
    """Record in the deleting transaction that the files must be overwritten."""
    due = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    connection.exec_driver_sql(f"PRAGMA user_version = {int(due) + 1}")


def _due(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _emptied_log(connection: sqlite3.Connection) -> bool:
    is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy
