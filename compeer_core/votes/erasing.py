"""Overwriting in SQLite's files what was deleted from its tables.

SQLite leaves deleted words behind in three places. ``secure_delete`` overwrites a cell where it stood,
but not the copies that stay in the unused part of a page when SQLite moves cells to its neighbours;
the log beside the file (``-wal``) holds older versions of pages; and a reader that goes on keeps the log
from being emptied. So the file is rewritten (``VACUUM``, about 4 ms for each MB) and the log is emptied
(``wal_checkpoint(TRUNCATE)``, whose answer says whether that worked).

That something has yet to be overwritten stands in the file itself, as SQLite's ``user_version``: the
transaction that deletes raises it, and it is 0 again when all is done. So a program that was killed
goes on when it is started again.
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
"""How long a try waits for readers; no other thread of this process can write meanwhile."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_PAUSE_PER_WORK = 9.0
"""After a try the database is left alone for so many times as long as the try took."""
_MOST_IN_MEMORY = 64 * 2**20
"""Bytes of a database that is copied in memory while it is rewritten; a larger one needs a file."""

logger = logging.getLogger(__name__)


class Eraser:
    """Overwrites what was deleted, in a thread that ends when nothing is left to do."""

    def __init__(self, path: Path, turn: threading.Lock) -> None:
        """Do nothing yet.

        Args:
            path: The database.
            turn: Held by whoever writes to it in this process.
        """
        self._path = path
        self._turn = turn
        self._asked: Future[None] = Future()
        self._asked.set_result(None)
        self._waiting: list[Future[None]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False

    @property
    def erased(self) -> "Future[None]":
        """Done when nothing is left of what was deleted before `ask` was called last."""
        with self._changed:
            return self._asked

    def ask(self) -> "Future[None]":
        """Overwrite what was deleted by now; the result is there when nothing is left of it."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        with self._changed:
            self._asked = done
            self._waiting.append(done)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="eraser", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return done

    def close(self) -> None:
        """End the thread. What is still to be overwritten is when the database is opened again."""
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
                asked = tuple(self._waiting)
            begun = time.monotonic()
            is_done = self._try()
            took = time.monotonic() - begun
            with self._changed:
                if is_done:
                    del self._waiting[: len(asked)]
            if is_done:
                for each in asked:
                    each.set_result(None)
                pause = _FIRST_PAUSE_SECONDS
            self._rest(took * _PAUSE_PER_WORK, 0.0 if is_done else pause, len(asked))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _rest(self, least: float, pause: float, asked: int) -> None:
        """Leave the database alone for `least` seconds, and then for `pause` unless somebody asks."""
        with self._changed:
            if self._waiting:
                self._changed.wait_for(lambda: self._is_closed, least)
                self._changed.wait_for(lambda: self._is_closed or len(self._waiting) > asked, pause)

    def _try(self) -> bool:
        """Return whether nothing is left of what was deleted before."""
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
            # A full disk, another program that writes: it is tried again.
            logger.info("deleted words are not overwritten yet: %s", type(error).__name__)
            return False

    def _overwrite(self, connection: sqlite3.Connection) -> bool:
        # The log first: beside a reader that goes on, each try would make it longer by the whole file.
        if not _emptied_log(connection):
            return False
        due = _due(connection)
        if not due:
            return True
        size = self._path.stat().st_size
        if shutil.disk_usage(self._path.parent).free < size:
            return False  # all of it passes through the log
        if size <= _MOST_IN_MEMORY:
            connection.execute("PRAGMA temp_store = MEMORY")
        try:
            connection.execute("VACUUM")
        except sqlite3.Error:
            _emptied_log(connection)  # give back what room it took
            raise
        if not _emptied_log(connection):
            return False
        connection.execute("BEGIN IMMEDIATE")
        if _due(connection) == due:  # else another program has deleted something meanwhile
            connection.execute("PRAGMA user_version = 0")
        connection.execute("COMMIT")
        return True

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )


def is_due(connection: Connection) -> bool:
    """Whether something was deleted and has not been overwritten yet, by whatever program."""
    return bool(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def mark_due(connection: Connection) -> None:
    """Put down, in the transaction that deletes, that the files are to be overwritten."""
    due = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    connection.exec_driver_sql(f"PRAGMA user_version = {int(due) + 1}")


def _due(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _emptied_log(connection: sqlite3.Connection) -> bool:
    is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy
