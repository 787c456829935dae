"""A full or read-only disk: one sentence, no false success, nothing lost.

A full disk is simulated with ``RLIMIT_FSIZE``, a read-only one with SQLite's ``query_only``; both
fail within SQLite, as a real disk does.
"""

import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event

from compeer_core.annotation.annotations import AnnotationItem
from compeer_core.annotation.desk import Desk
from compeer_core.cer import CaseUtterance
from compeer_core.dialogue import Speaker, Utterance
from compeer_core.votes.schema import BattleRow, SecretRow
from tests.comparisons import make
from tests.databases import rows
from tests.page_client import CONVERSATION, Page
from tests.pages import eventually
from ui_components.annotate.annotators import ANNOTATOR_COOKIE
from ui_components.compare.jobs import RoundRequest
from ui_components.server.app import build_server, serving
from ui_components.shared.services import Services
from ui_components.shared.session_store import SessionKey
from ui_components.shared.texts import load_texts

WORDS = "nobody may read this"
FORM = {"steps": [True, True, True], "preference": "first"}

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings(
    "ignore:'future.no_silent_downcasting' is deprecated", "ignore:The copy keyword is deprecated"
)

Disk = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, Services]]:
    services = make(folder, grace_seconds=20)
    said = CaseUtterance(speaker=Speaker.SEEKER, text="I failed.")
    items = (
        AnnotationItem(
            id=f"i{number}",
            language="en",
            history=(said,),
            steps=("a", "b", "c"),
            replies=("Oh no.", "Tell me."),
        )
        for number in range(20)
    )
    Desk(services.votes).add_items((item, None) for item in items)
    with serving(build_server(services)) as address:
        yield address, services
    services.votes.close()


@pytest.fixture(params=["full", "read-only"])
def broken(request: pytest.FixtureRequest, server, folder: Path) -> Disk:
    """Break the disk until the block ends."""
    _, services = server
    path = folder / "compeer.sqlite3"
    engine = services.votes.database._engine

    @contextmanager
    def full() -> Iterator[None]:
        services.votes.database.erased.result(30)
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")  # so that the log grows, and does not begin anew
            reader.execute("SELECT count(*) FROM battles").fetchone()
            log = path.with_name(f"{path.name}-wal")
            for letter in "abcdefgh":  # until it is larger than any other file that is written
                with services.votes.database.writing() as session:
                    session.merge(SecretRow(name="large", value=letter.encode() * 2**18))
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

    @contextmanager
    def read_only() -> Iterator[None]:
        def refuse(connection, _) -> None:
            connection.execute("PRAGMA query_only = ON").close()

        event.listen(engine, "connect", refuse)
        engine.dispose()
        try:
            yield
        finally:
            event.remove(engine, "connect", refuse)
            engine.dispose()

    return full if request.param == "full" else read_only


@pytest.fixture(params=["en", "zh"])
def page(request: pytest.FixtureRequest, server) -> Page:
    address, services = server
    made = Page(address, services, request.param)
    made.texts = load_texts(request.param)
    return made


def battle_of(services: Services, page: Page) -> str:
    """Finish a comparison, and return its battle."""
    key = SessionKey(page.visitor, CONVERSATION, services.deletions.generation(page.visitor))
    said = Utterance(Speaker.SEEKER, WORDS)
    wish = RoundRequest(("maple-1", "cedar-2"), keep_words=True)
    assert services.compare_jobs.begin(key, said, wish, None).over.wait(30)
    return services.compare_jobs.store.get(key).last.pairs[0].battle


def test_a_vote_is_refused_in_words_and_can_be_cast_later(server, page, broken):
    _, services = server
    battle = battle_of(services, page)
    with broken():
        assert page.texts("compare.refused.store") in page.vote(CONVERSATION, battle)
        assert services.votes.standing(battle, page.visitor) is None

    assert page.vote(CONVERSATION, battle) == ""
    assert services.votes.standing(battle, page.visitor).number == 1


def test_a_vote_that_stands_is_kept_when_it_cannot_be_taken_back(server, page, broken):
    _, services = server
    battle = battle_of(services, page)
    assert page.vote(CONVERSATION, battle, "second") == ""
    with broken():
        about = {"battle": battle, "revision": 1}
        said = page.act("compare-ballot", "undo", CONVERSATION, **about)[2]
        assert page.texts("compare.refused.store") in said

    assert services.votes.standing(battle, page.visitor).preference == "second"


def test_a_comparison_does_not_begin_and_says_so(server, page, broken):
    _, services = server
    with broken():
        told = page.outcome(page.compare(WORDS))
        assert page.texts("compare.refused.store") in told
        assert services.compare_jobs.count() == 0

    assert WORDS not in str(services.compare_jobs.store._entries)
    page.compare(WORDS)
    eventually(lambda: rows(services.votes, BattleRow) > 0)
    eventually(lambda: services.compare_jobs.count() == 0)


def test_a_comparison_that_cannot_be_stored_has_failed(server, page, broken):
    """Its battle was opened before; without results of both sides it accepts no vote."""
    _, services = server
    key = SessionKey(page.visitor, CONVERSATION)
    wish = RoundRequest(("maple-1", "cedar-2"), keep_words=True)
    match = services.compare_jobs.begin(key, Utterance(Speaker.SEEKER, "slowly"), wish, None)
    with broken():
        assert match.over.wait(30)
        last = services.compare_jobs.store.get(key).last
        assert all(side.has_failed for side in last.sides)

    assert page.vote(CONVERSATION, last.pairs[0].battle) != ""
    assert services.votes.standing(last.pairs[0].battle, page.visitor) is None


def test_a_deletion_says_what_is_gone_and_what_is_not(server, page, broken):
    _, services = server
    battle = battle_of(services, page)
    with broken():
        answer = page.http.post("/forget")
        assert answer.status_code == 503
        assert answer.json()["error"] == page.texts("page.forgotten_half")
        assert services.votes.battle(battle, page.visitor).id == battle

    assert page.http.post("/forget").json()["battles"] == 1


def test_the_desk_reports_the_error_and_keeps_saved_answers(server, page, broken):
    _, services = server
    desk = Desk(services.votes)
    name = f"ann-{page.visitor}"
    token = desk.add_annotator(name, may_adjudicate=True)
    ann = desk.log_in(token)

    def post(path, **body):
        return page.http.post(f"/desk/{path}", json={"tab": "one", **body})

    sentence = page.texts("annotate.error_store")
    with broken():
        refused = post("login", token=token)
        assert (refused.status_code, refused.json()["error"]) == (503, sentence)
        assert "set-cookie" not in refused.headers
    assert post("login", token=token).status_code == 200
    item = post("view").json()["html"].partition('data-item="')[2].partition('"')[0]
    assert post("draft", item=item, form=FORM | {"note": "kept"}).status_code == 200

    with broken():
        body = {"item": item, "form": FORM | {"note": WORDS}}
        for path in ("view", "draft", "hold", "answer", "leave"):
            refused = post(path, **body, token="t")
            assert (refused.status_code, refused.json()["error"]) == (503, sentence), path
        refused = post("logout")
        assert (refused.status_code, refused.json()["error"]) == (503, sentence)
        assert page.http.get("/desk/export/agreement.json").status_code == 200

    work = desk.open_item(ann, item, "one")
    assert work.draft["note"] == "kept"
    assert work.answered is None
    assert post("answer", **body, token="t").status_code == 200
    kept = page.http.cookies[ANNOTATOR_COOKIE]
    assert post("logout").status_code == 200
    assert desk.let_in(kept) is None


def test_read_only_routes_keep_working(server, page, broken):
    _, services = server
    with broken():
        for path in ("/", "/healthz", "/results/board.json", "/results/votes.jsonl"):
            assert page.http.get(path).status_code == 200, path
        page.outcome(page.say("hello"))
        key = SessionKey(page.visitor, CONVERSATION, services.deletions.generation(page.visitor))
        assert services.store.get(key).turns[0].progress.outcome == "finished"
