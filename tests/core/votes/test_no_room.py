"""Without room, or where nothing may be written: what was acknowledged is there, all else was refused."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event

from compeer_core.annotation.desk import Desk
from compeer_core.errors import StoreError
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import fought, plan

NOBODY = 65534


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
        whole = store.counts().battles
        for _ in range(3):
            store.open_battle(plan("ann", topic="x" * 9000))

        assert store.counts().battles == whole + 3


def test_a_deletion_needs_no_more_room(sqlite_url):
    with VoteStore(sqlite_url) as store:
        for _ in range(5):
            store.cast(fought(store, "ann"), "ann", "first", note="x" * 6000)
        with room_for(store, 0):
            assert store.delete_voter("ann").votes == 5


@pytest.fixture
def shut():
    """A folder that nobody may write to, not even root, while `shut` is called; and what is in it."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "votes.sqlite3"
    is_root = os.geteuid() == 0

    @contextmanager
    def shutting(store):
        store.database.erased.result(30)
        store.database._engine.dispose()
        path.chmod(0o444)
        folder.chmod(0o555)
        if is_root:  # whom no permission stops
            os.seteuid(NOBODY)
        try:
            yield
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o755)
            path.chmod(0o600)
            store.database._engine.dispose()

    shutting.url = f"sqlite:///{path}"
    yield shutting
    shutil.rmtree(folder)


def test_a_folder_that_becomes_read_only_is_reported_and_loses_nothing(shut):
    with VoteStore(shut.url) as store:
        desk = Desk(store)
        token = desk.add_annotator("ann")
        ann = desk.log_in(token)
        voted, waiting = fought(store, "ann"), fought(store, "ann")
        store.cast(voted, "ann", "first")
        secret = store.secret("visitors")
        with shut(store):
            for change in (
                lambda: store.cast(waiting, "ann", "first"),
                lambda: store.undo(voted, "ann"),
                lambda: store.open_battle(plan("bo")),
                lambda: store.delete_voter("ann"),
                lambda: store.close_battle(voted, "risk"),
                lambda: desk.new_pass(ann),
                lambda: desk.save_draft(ann, "i0", "one", {}),
                lambda: desk.next_item(ann, "one"),
                lambda: desk.delete_annotator("ann"),
            ):
                with pytest.raises(StoreError, match="the database of votes failed"):
                    change()

        assert store.secret("visitors") == secret
        assert [vote.battle_id for vote in store.votes()] == [voted]
        assert store.cast(waiting, "ann", "first").number == 1
        assert desk.log_in(token) == ann


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
