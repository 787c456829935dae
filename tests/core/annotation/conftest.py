"""The databases of the tests of votes, which annotation shares."""

from tests.core.votes.conftest import (
    _emptied_url,
    _shared_database,
    clock,
    postgres,
    sqlite_url,
    store,
    url,
)

__all__ = ["_emptied_url", "_shared_database", "clock", "postgres", "sqlite_url", "store", "url"]
