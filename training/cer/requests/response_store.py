"""Responses on disk: a SQLite table that lets a killed run resume without repeating a request.

| column  | meaning                                                                         |
|---------|---------------------------------------------------------------------------------|
| request | hash of the question, its seed and all settings that the text depends on        |
| number  | 1 for the first text of that request, 2 for the next one, with another seed ... |
| key     | the question's key, for people who read the table                               |
| text    | the text; NULL if it was unusable, for such texts are not stored                |
| problem | why it was unusable                                                             |
| tokens  | length of the text, unusable or not                                             |

The file is in WAL mode with full synchronisation: what `add` returned from survives `kill -9` and a
power failure. Several threads and processes of one machine may share a file; put it on a local disk,
since WAL does not work over NFS.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from compeer_core.errors import ConfigError

FILE_NAME = "responses.sqlite"
BUSY_SECONDS = 60.0
"""How long to wait for another process that is writing."""

_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    request TEXT NOT NULL,
    number INTEGER NOT NULL,
    key TEXT NOT NULL,
    text TEXT,
    problem TEXT,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (request, number)
) WITHOUT ROWID
"""


@dataclass(frozen=True)
class Attempt:
    """One text that a model wrote for a question: a row of the table."""

    request: str
    number: int
    key: str
    text: str | None
    problem: str | None
    tokens: int


class ResponseStore:
    """The attempts of all requests whose responses are in one file. Thread-safe.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: Path) -> None:
        """Open or create a file, and its folder.

        Raises:
            ConfigError: The file exists and is no such database.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
        try:
            _enter_wal_mode(self._connection)
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(_TABLE)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise ConfigError(
                f"{path} cannot be used as a store of responses ({error}); move it away"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def attempts(self, request: str) -> tuple[Attempt, ...]:
        """Return the stored attempts of a request, by number."""
        query = "SELECT * FROM responses WHERE request = ? ORDER BY number"
        with self._lock, closing(self._connection.execute(query, (request,))) as rows:
            return tuple(Attempt(*row) for row in rows)

    def add(self, attempts: Iterable[Attempt]) -> None:
        """Store attempts, all or none; an attempt that is there already stays as it is."""
        statement = "INSERT OR IGNORE INTO responses VALUES (?, ?, ?, ?, ?, ?)"
        with self._lock, self._connection:
            self._connection.executemany(statement, map(astuple, attempts))

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            self._connection.close()


def _enter_wal_mode(connection: sqlite3.Connection) -> None:
    """Switch a database to WAL mode; SQLite itself does not wait for other processes that do so just now.

    Raises:
        sqlite3.DatabaseError: The file is no database, or stays locked for `BUSY_SECONDS`.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.02)
