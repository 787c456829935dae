"""Without room, or where nothing may be written: what was acknowledged is there, all else was refused."""

from contextlib import contextmanager

import pytest
from sqlalchemy import event

from compeer_core.errors import StoreError
from compeer_core.votes.schema import BattleRow
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import fought, plan
from tests.databases import rows


@contextmanager
def room_for(store, more):
    """Let the database grow by so many pages at most."""
    engine = store.database._engine
    with store.database.reading() as session:
        pages = session.connection().exec_driver_sql("PRAGMA page_count").scalar_one()

    def limit(connection, _):
        connection.execute(f"PRAGMA max_page_count = {pages + more}").close()

    event.listen(engine, "connect", limit)
    engine.dispose()
    try:
        yield
    finally:
        event.remove(engine, "connect", limit)
        engine.dispose()


def test_acknowledged_votes_are_stored_and_rejected_ones_can_be_cast_again(sqlite_url):
    note = "x" * 6000
    acknowledged, refused = [], []
    with VoteStore(sqlite_url) as store:
        battles = [fought(store, "ann") for _ in range(30)]
        with room_for(store, 12):
            for battle in battles:
                try:
                    store.cast(battle, "ann", "first", note=note, token="t")
                    acknowledged.append(battle)
                except StoreError as error:
                    assert "full" in str(error)
                    assert note not in str(error)
                    refused.append(battle)
            assert acknowledged
            assert refused
            assert {vote.battle_id for vote in store.votes()} == set(acknowledged)

        for battle in refused:
            assert store.cast(battle, "ann", "first", note=note, token="t").number == 1
        assert {vote.battle_id for vote in store.votes()} == set(battles)


def test_a_comparison_without_room_is_not_begun_by_half(sqlite_url):
    with VoteStore(sqlite_url) as store:
        with room_for(store, 2), pytest.raises(StoreError, match="full"):
            for _ in range(100):
                store.open_battle(plan("ann", topic="x" * 9000))
        whole = rows(store, BattleRow)
        for _ in range(3):
            store.open_battle(plan("ann", topic="x" * 9000))

        assert rows(store, BattleRow) == whole + 3


def test_a_deletion_needs_no_more_room(sqlite_url):
    with VoteStore(sqlite_url) as store:
        for _ in range(5):
            store.cast(fought(store, "ann"), "ann", "first", note="x" * 6000)
        with room_for(store, 0):
            assert store.delete_voter("ann").votes == 5


def test_a_secret_that_is_there_needs_no_room(sqlite_url):
    """Else no server could start again on a full disk."""
    with VoteStore(sqlite_url) as store:
        secret = store.secret("visitors")

        @event.listens_for(store.database._engine, "connect")
        def refuse(connection, _):
            connection.execute("PRAGMA query_only = ON").close()

        store.database._engine.dispose()
        assert store.secret("visitors") == secret
        with pytest.raises(StoreError, match="readonly"):
            store.secret("another")
