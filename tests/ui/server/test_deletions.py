""" "Delete my data" over HTTP: all data is gone, from the files too, whatever was running."""

import asyncio
import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import event

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import InputError, VoteRefusedError
from compeer_core.votes.battles import BattlePlan, SidePlan
from compeer_core.votes.schema import BattleRow, VoterRow
from tests.comparisons import make
from tests.databases import rows
from tests.page_client import CONVERSATION, Page
from tests.pages import Visitor, eventually, make_services
from ui_components.chat.jobs import ReplyRequest
from ui_components.compare.jobs import RoundRequest
from ui_components.server.app import build_server, serving
from ui_components.server.deletions import Deletions
from ui_components.server.forget_routes import add_routes
from ui_components.server.visitors import COOKIE
from ui_components.shared.services import Services
from ui_components.shared.session import Session, Turn
from ui_components.shared.session_store import SessionKey

WORDS = "nobody may read this"

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings(
    "ignore:'future.no_silent_downcasting' is deprecated", "ignore:The copy keyword is deprecated"
)


def files_of(services: Services) -> bytes:
    """Return the contents of the database files."""
    path = Path(services.votes.database._eraser._path)
    files = (path, path.with_name(f"{path.name}-wal"))
    return b"".join(each.read_bytes() for each in files if each.exists())


def in_memory(services: Services) -> str:
    """Return all stored conversations and comparisons as text."""
    return " ".join(
        text
        for store in (services.store, services.compare_jobs.store)
        for key, kept in list(store._entries.items())
        for text in _texts((key.visitor, kept.value))
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(tuple(value.values()))
    elif isinstance(value, tuple | list | frozenset | set):
        for each in value:
            yield from _texts(each)
    elif is_dataclass(value):
        yield from _texts(tuple(getattr(value, each.name) for each in fields(value)))


def opened(services: Services, visitor: str, words: str = WORDS) -> str:
    """Open a battle with stored words."""
    plan = BattlePlan(
        voter=visitor,
        dialogue=Dialogue((Utterance(Speaker.SEEKER, words),)),
        sides=(SidePlan("a", 1), SidePlan("b", 2)),
        seed=0,
        keep_words=True,
    )
    return services.votes.open_battle(plan).id


# --- the route ----------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path):
    """The route alone, and a visitor with words in memory and database."""
    services = make_services(tmp_path)
    services.votes.database.erased.result(30)
    app = FastAPI()
    add_routes(app, services)
    client = TestClient(app)
    cookie = services.visitors.new_cookie()
    client.cookies.set(COOKIE, cookie)
    visitor = services.visitors.read({COOKIE: cookie})
    opened(services, visitor)
    services.store.update(SessionKey(visitor, CONVERSATION), lambda session: Session(draft=WORDS))
    yield SimpleNamespace(
        services=services, client=client, visitor=visitor, path=tmp_path / "compeer.sqlite3"
    )
    services.votes.close()


def test_deleted_words_are_in_no_database_file(world):
    assert WORDS.encode() in files_of(world.services)
    answer = world.client.post("/forget")

    assert answer.json() == {"battles": 1, "votes": 0, "erased": True}
    assert WORDS.encode() not in files_of(world.services)
    assert WORDS not in in_memory(world.services)


def test_beside_a_long_reader_the_page_says_that_traces_are_left_and_they_go_later(
    world, monkeypatch
):
    monkeypatch.setattr("ui_components.server.forget_routes.ERASED_SECONDS", 0.3)
    with closing(sqlite3.connect(world.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM battles").fetchone()
        answer = world.client.post("/forget")
        assert answer.json() == {"battles": 1, "votes": 0, "erased": False}
        assert WORDS.encode() in files_of(world.services)
        assert rows(world.services.votes, BattleRow) == 0
    world.services.votes.database.erased.result(30)

    assert WORDS.encode() not in files_of(world.services)


@pytest.mark.parametrize(
    ("language", "sentence"),
    [("en", "Your conversations are deleted. Your votes"), ("zh", "你的对话已删除，但你的投票")],
)
def test_if_the_database_fails_the_page_says_what_was_deleted(world, language, sentence):
    @event.listens_for(world.services.votes.database._engine, "connect")
    def only_read(connection, _):
        connection.execute("PRAGMA query_only = ON").close()

    world.services.votes.database._engine.dispose()
    answer = world.client.post("/forget", headers={"accept-language": language})

    assert answer.status_code == 503
    assert answer.json()["code"] == "store"
    assert sentence in answer.json()["error"]
    assert WORDS not in in_memory(world.services)
    assert rows(world.services.votes, BattleRow) == 1


# --- work that began before --------------------------------------------------------------------


def test_a_deletion_invalidates_only_earlier_work():
    deletions = Deletions()
    arrived = deletions.count
    before = SessionKey("ann", CONVERSATION, deletions.generation("ann", arrived))
    deletions.add("ann")
    after = SessionKey("ann", CONVERSATION, deletions.generation("ann", deletions.count))

    assert not deletions.is_current(before)
    assert deletions.is_current(after)
    assert not deletions.is_current(
        SessionKey("ann", CONVERSATION, deletions.generation("ann", arrived))
    )
    assert deletions.is_current(SessionKey("bo", CONVERSATION, deletions.generation("bo", arrived)))


def test_the_number_of_remembered_deletions_is_bounded(monkeypatch):
    monkeypatch.setattr("ui_components.server.deletions.MOST_VISITORS", 3)
    deletions = Deletions()
    for visitor in ("a", "b", "a", "c", "d"):
        deletions.add(visitor)

    assert [deletions.generation(visitor) for visitor in "abcd"] == [3, 0, 4, 5]


@pytest.fixture
def services(tmp_path) -> Iterator[Services]:
    made = make(tmp_path, grace_seconds=20)  # nobody watches the replies here
    yield made
    made.votes.close()


def test_a_message_sent_before_the_deletion_is_rejected_after_it(services):
    ann = Visitor(services)
    key = ann.key
    services.forget(key.visitor)

    order = ReplyRequest("maple-1")
    with pytest.raises(InputError) as caught:
        services.chat_jobs.begin(key, lambda _: Session(draft=WORDS), order)
    assert caught.value.code == "forgotten"
    services.store.update(key, lambda session: Session(draft=WORDS))
    assert WORDS not in in_memory(services)
    asyncio.run(ann.send("something new", model="maple-1", judge=""))
    assert "something new" in in_memory(services)


def test_a_deletion_ends_a_reply_and_leaves_nothing_of_it(services):
    ann = Visitor(services)
    key = ann.key
    said = Utterance(Speaker.SEEKER, f"for ever {WORDS}")
    job = services.chat_jobs.begin(key, lambda _: Session((Turn(said),)), ReplyRequest("maple-1"))
    eventually(lambda: services.store.get(key).turns[0].progress.has_words)
    services.forget(key.visitor)
    assert job.over.wait(10)

    assert in_memory(services) == ""
    assert ann.session == Session()


@pytest.mark.parametrize(
    ("deleted_first", "error"), [(True, VoteRefusedError), (False, InputError)]
)
def test_a_deletion_while_a_comparison_is_being_opened_prevents_it(services, deleted_first, error):
    """The deletion comes just before or just after the transaction that opens a battle."""
    ann = Visitor(services)
    key = ann.key
    request = RoundRequest(("maple-1", "cedar-2"), keep_words=True)
    open_battle = services.votes.open_battle

    def interrupted(*arguments):
        if deleted_first:
            services.forget(key.visitor)
            return open_battle(*arguments)
        battle = open_battle(*arguments)
        services.forget(key.visitor)
        return battle

    services.votes.open_battle = interrupted
    with pytest.raises(error) as caught:
        services.compare_jobs.begin(key, Utterance(Speaker.SEEKER, WORDS), request, None)

    assert caught.value.code == "forgotten"
    assert services.compare_jobs.count() == 0
    assert rows(services.votes, BattleRow) == rows(services.votes, VoterRow) == 0
    assert in_memory(services) == ""


def test_a_deletion_ends_a_comparison_and_leaves_nothing_of_it(services):
    ann = Visitor(services)
    key = ann.key
    wish = RoundRequest(("maple-1", "cedar-2"), keep_words=True, judge="oracle")
    said = Utterance(Speaker.SEEKER, f"for ever {WORDS}")
    match = services.compare_jobs.begin(key, said, wish, None)
    eventually(lambda: all(side.words for side in services.compare_jobs.store.get(key).last.sides))
    services.forget(key.visitor)
    again = services.compare_jobs.begin(ann.key, Utterance(Speaker.SEEKER, "hello"), wish, None)
    assert match.over.wait(20)
    assert again.over.wait(20)
    services.votes.database.erased.result(30)

    assert WORDS not in in_memory(services)
    assert WORDS.encode() not in files_of(services)
    assert rows(services.votes, BattleRow) == 1


# --- many at once -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Services]]:
    services = make(tmp_path_factory.mktemp("models"), grace_seconds=20)
    with serving(build_server(services)) as address:
        yield address, services
    services.votes.close()


@pytest.mark.parametrize("rounds", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_after_a_deletion_nothing_arrives_that_was_sent_before_it(server, rounds):
    address, services = server
    ann = Page(address, services, listens=True)
    drawn = random.Random(1)
    for number in range(rounds):
        marker = f"words-of-round-{number}"
        said = Utterance(Speaker.SEEKER, f"{marker} to vote on")
        key = SessionKey(
            ann.visitor, f"comparison-{number:020d}", services.deletions.generation(ann.visitor)
        )
        match = services.compare_jobs.begin(
            key, said, RoundRequest(("maple-1", "cedar-2"), keep_words=True), None
        )
        assert match.over.wait(30)
        battle = services.compare_jobs.store.get(key).last.pairs[0].battle
        asked = [
            threading.Thread(target=ann.say, args=(f"{marker} slowly",)),
            threading.Thread(target=ann.compare, args=(f"{marker} slowly",)),
        ]
        voting = threading.Thread(target=ann.vote, args=(key.conversation, battle))
        for each in (*asked, voting):
            each.start()
        for each in asked:
            each.join()  # they are in the queue
        threading.Event().wait(drawn.choice((0, 0, 0.005, 0.02, 0.05, 0.2)))
        answer = ann.http.post("/forget").json()

        assert answer["erased"], answer
        assert marker not in in_memory(services)
        assert marker.encode() not in files_of(services)
        voting.join()
        new = f"new after round {number}"
        ann.say(new)
        eventually(lambda new=new: new in in_memory(services))
        eventually(lambda: services.chat_jobs.count() + services.compare_jobs.count() == 0, 60)
        assert marker not in in_memory(services)
        assert marker.encode() not in files_of(services)
        assert ann.visitor.encode() not in files_of(services)
    assert "words-of-round" not in in_memory(services)
    assert b"words-of-round" not in files_of(services)
    assert list(services.votes.votes()) == []
