"""Empty databases of votes, migrated once: that takes longer than most tests which need one."""

import tempfile
from functools import cache
from pathlib import Path

from sqlalchemy import func, make_url, select

from compeer_core.votes.database import Database, default_url
from compeer_core.votes.schema import Base
from compeer_core.votes.store import VoteStore


def database_in(folder: Path) -> str:
    """Return the URL of the folder's database, which is empty if it is new."""
    url = default_url(folder)
    write_empty(_file(url))
    return url


def write_empty(file: Path) -> None:
    """Write an empty database unless there is a file."""
    if not file.exists():
        file.write_bytes(_empty())


def rows(store: VoteStore, table: type[Base]) -> int:
    """Return the number of rows of a table."""
    with store.database.reading() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


@cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        url = default_url(Path(folder))
        Database(url).close()
        return _file(url).read_bytes()


def _file(url: str) -> Path:
    return Path(str(make_url(url).database))
