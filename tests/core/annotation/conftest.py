"""The databases of the tests of votes, which annotation shares."""

from tests.core.votes.conftest import clock, postgres, postgres_url, sqlite_url, store, url

__all__ = ["clock", "postgres", "postgres_url", "sqlite_url", "store", "url"]
