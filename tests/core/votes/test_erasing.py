"""What was deleted is gone from SQLite's files: beside readers, after a crash, with a full disk."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import make_url

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.votes.erasing import Eraser
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import fought, plan, result

ROOT = Path(__file__).resolve().parents[3]
SECRET = "nobody-may-read-this"
ERASED_SECONDS = 30


def bytes_of(url):
    """Return all that lies in the files of a database."""
    path = Path(make_url(url).database)
    return b"".join(each.read_bytes() for each in path.parent.iterdir() if each.is_file())


def user_version(url):
    """Return how many deletions have yet to be overwritten."""
    with closing(sqlite3.connect(make_url(url).database)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def telling(words, voter="ann"):
    """Return the plan of a battle with a message."""
    return plan(voter, dialogue=Dialogue((Utterance(Speaker.SEEKER, words),), id=f"of-{voter}"))


def vote(store, voter="ann", words=SECRET):
    battle = store.open_battle(telling(words, voter)).id
    for side in (0, 1):
        store.finish_side(battle, side, result(words))
    store.cast(battle, voter, "first", note=words[:900])
    return battle


class Reader:
    """Another program that reads, and goes on reading."""

    def __init__(self, url):
        self._connection = sqlite3.connect(make_url(url).database, isolation_level=None)
        self._connection.execute("BEGIN")
        self._connection.execute("SELECT count(*) FROM battles").fetchone()

    def close(self):
        self._connection.close()


@pytest.fixture
def tries(monkeypatch):
    """How each try ended, in order; `tries.wait` waits for the next ones."""

    class Tries(list):
        changed = threading.Condition()

        def wait(self, count):
            with self.changed:
                assert self.changed.wait_for(lambda: len(self) >= count, ERASED_SECONDS)

    seen = Tries()
    original = Eraser._try

    def trying(eraser):
        is_done = original(eraser)
        with seen.changed:
            seen.append(is_done)
            seen.changed.notify_all()
        return is_done

    monkeypatch.setattr(Eraser, "_try", trying)
    return seen


def test_nothing_is_left_of_words_that_sqlite_moved_before_they_were_deleted(tmp_path):
    """When cells move to a neighbour, the page keeps copies that ``secure_delete`` does not reach."""
    path, drawn = tmp_path / "votes.sqlite3", random.Random(2)
    people = [f"person-{number:02d}-" for number in range(30)]
    left = []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("journal_mode=WAL", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("CREATE TABLE said (id INTEGER PRIMARY KEY, person TEXT, words TEXT)")
        connection.execute("BEGIN")
        for number in drawn.sample(range(3000), 300):
            person = drawn.choice(people)
            row = (number, person, person * drawn.choice((1, 5, 20, 60, 150)))
            connection.execute("INSERT INTO said VALUES (?, ?, ?)", row)
        connection.execute("COMMIT")
        for person in people:
            connection.execute("DELETE FROM said WHERE person = ?", (person,))
            connection.execute("PRAGMA user_version = 1")
            Eraser(path, threading.Lock()).ask().result(ERASED_SECONDS)
            left += [person] * (person.encode() in path.read_bytes())

    assert left == []


def test_data_is_reported_as_erased_only_after_the_last_reader_ends(sqlite_url, tries):
    with VoteStore(sqlite_url) as store:
        vote(store)
        store.database.erased.result(ERASED_SECONDS)
        before = len(tries)
        reader = Reader(sqlite_url)
        store.delete_voter("ann")
        tries.wait(before + 2)

        assert not store.database.erased.done()
        assert SECRET.encode() in bytes_of(sqlite_url)
        vote(store, "bo", "somebody else goes on")
        reader.close()
        store.database.erased.result(ERASED_SECONDS)

        assert SECRET.encode() not in bytes_of(sqlite_url)
        assert b"somebody else goes on" in bytes_of(sqlite_url)
        assert len(list(store.votes())) == 1


def test_beside_a_reader_the_log_does_not_grow_with_every_try(sqlite_url, tries):
    with VoteStore(sqlite_url) as store:
        store.database.erased.result(ERASED_SECONDS)
        before = len(tries)
        vote(store, words=SECRET * 10_000)
        reader = Reader(sqlite_url)
        store.delete_voter("ann")
        tries.wait(before + 1)
        log = Path(f"{make_url(sqlite_url).database}-wal")
        size = log.stat().st_size
        tries.wait(before + 4)

        assert not any(tries[before:])
        assert log.stat().st_size == size
        reader.close()


def test_a_new_request_ends_the_pause_before_the_next_attempt(sqlite_url, tries, monkeypatch):
    monkeypatch.setattr("compeer_core.votes.erasing._FIRST_PAUSE_SECONDS", 3600.0)
    with VoteStore(sqlite_url) as store:
        for voter in ("ann", "bo"):
            vote(store, voter)
        store.database.erased.result(ERASED_SECONDS)
        reader = Reader(sqlite_url)
        store.delete_voter("ann")
        first = store.database.erased
        tries.wait(len(tries) + 1)
        reader.close()
        store.delete_voter("bo")
        for each in (store.database.erased, first):
            each.result(ERASED_SECONDS)

        assert SECRET.encode() not in bytes_of(sqlite_url)


def test_closing_does_not_wait_and_the_next_start_goes_on(sqlite_url, tries):
    with VoteStore(sqlite_url) as store:
        vote(store)
        store.database.erased.result(ERASED_SECONDS)
        before = len(tries)
        reader = Reader(sqlite_url)
        store.delete_voter("ann")
        tries.wait(before + 1)
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    reader.close()

    with VoteStore(sqlite_url) as store:
        store.database.erased.result(ERASED_SECONDS)
        assert SECRET.encode() not in bytes_of(sqlite_url)


KILLED = f"""
import os, signal, sys
from compeer_core.votes.erasing import Eraser
from tests.core.votes.test_erasing import vote
from compeer_core.votes.store import VoteStore
Eraser._try = lambda _: False
store = VoteStore(sys.argv[1])
vote(store, words={SECRET!r})
store.delete_voter("ann")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_program_that_is_killed_before_goes_on_when_it_is_started_again(sqlite_url):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, sqlite_url], cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == -9
    assert SECRET.encode() in bytes_of(sqlite_url)

    with VoteStore(sqlite_url) as store:
        store.database.erased.result(ERASED_SECONDS)
        assert SECRET.encode() not in bytes_of(sqlite_url)
    assert user_version(sqlite_url) == 0


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_disk_without_room_for_the_copy_is_tried_again(
    sqlite_url, tries, monkeypatch, is_foreseen
):
    log = Path(f"{make_url(sqlite_url).database}-wal")
    original = Eraser._connected

    def connected(eraser):
        connection = original(eraser)
        connection.set_authorizer(_no_copies)
        return connection

    with VoteStore(sqlite_url) as store:
        store.database.erased.result(ERASED_SECONDS)
        vote(store)
        with monkeypatch.context() as full:
            if is_foreseen:
                full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
            else:
                full.setattr(Eraser, "_connected", connected)
            before = len(tries)
            store.delete_voter("ann")
            tries.wait(before + 2)
            assert not any(tries[before:])
            assert log.stat().st_size == 0
        store.database.erased.result(ERASED_SECONDS)

        assert SECRET.encode() not in bytes_of(sqlite_url)


def _no_copies(action, *_):
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_ATTACH else sqlite3.SQLITE_OK


def test_a_deletion_by_another_program_meanwhile_is_not_lost(sqlite_url, monkeypatch):
    """It is noted in the file while the first one is being overwritten."""
    import compeer_core.votes.erasing as erasing

    with VoteStore(sqlite_url) as store, VoteStore(sqlite_url) as other:
        for voter, words in (("ann", "words of ann"), ("bo", SECRET)):
            vote(store, voter, words)
        original = erasing._emptied_log
        calls = []

        def emptied_log(connection):
            is_done = original(connection)
            calls.append(is_done)
            if len(calls) == 2:  # the file is rewritten and the log is empty
                monkeypatch.setattr(Eraser, "ask", lambda _: None)
                other.delete_voter("bo")
                monkeypatch.undo()
            return is_done

        for each in (store, other):
            each.database.erased.result(ERASED_SECONDS)
        monkeypatch.setattr(erasing, "_emptied_log", emptied_log)
        store.delete_voter("ann")
        store.database.erased.result(ERASED_SECONDS)

        assert len(calls) == 2
        assert user_version(sqlite_url) == 2


def test_taking_back_a_battle_of_somebody_in_danger_leaves_no_words_either(sqlite_url):
    with VoteStore(sqlite_url) as store:
        battle = store.open_battle(telling(SECRET)).id
        assert store.close_battle(battle, "risk")
        store.database.erased.result(ERASED_SECONDS)

        assert SECRET.encode() not in bytes_of(sqlite_url)


def test_where_nothing_was_deleted_nothing_is_rewritten(sqlite_url, tries):
    with VoteStore(sqlite_url) as store:
        store.database.erased.result(ERASED_SECONDS)
        count = len(tries)
        store.delete_voter("nobody")
        fought(store)
        store.close_battle("none", "risk")

        assert store.database.erased.done()
        assert len(tries) == count
