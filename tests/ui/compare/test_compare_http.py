"""Votes over plain HTTP: the server alone decides what is accepted."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from compeer_core.dialogue import Speaker, Utterance
from compeer_core.taxonomy import Preference
from tests.comparisons import MODELS, make
from tests.pages import eventually
from ui_components.compare.jobs import RoundRequest
from ui_components.server.app import build_server, serving
from ui_components.shared.services import Services
from ui_components.shared.session_store import SessionKey

CONVERSATION = "comparison-" + "y" * 16
ACKNOWLEDGED_SECONDS = 0.05

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings(
    "ignore:'future.no_silent_downcasting' is deprecated", "ignore:The copy keyword is deprecated"
)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    return make(tmp_path_factory.mktemp("models"), grace_seconds=20)


@pytest.fixture(scope="module")
def address(services: Services) -> Iterator[str]:
    with serving(build_server(services)) as where:
        yield where


class Caller:
    """A program that uses gradio's own protocol."""

    def __init__(self, address: str, services: Services) -> None:
        self.services = services
        self.http = httpx.Client(base_url=address, timeout=60)
        self.page = self.http.get("/").text
        self.config = self.http.get("/config").json()
        self.visitor = services.visitors.read(dict(self.http.cookies))
        self.key = SessionKey(self.visitor, CONVERSATION)

    def index(self, element: str, event: str) -> int:
        """The index of an event's handler."""
        (component,) = [
            each["id"]
            for each in self.config["components"]
            if each["props"].get("elem_id") == element
        ]
        (found,) = [
            each["id"]
            for each in self.config["dependencies"]
            if [component, event] in [list(target) for target in each["targets"]]
        ]
        return int(found)

    def begin(self, text: str = "hello", *, wait: bool = True) -> str:
        """Start a round on the server, and return its battle."""
        comparing = self.services.compare_jobs
        comparing.store.update(self.key, lambda _: type(comparing.store.get(self.key))())
        wish = RoundRequest(("maple-1", "cedar-2"), judge="oracle")
        match = comparing.begin(self.key, Utterance(Speaker.SEEKER, text), wish, None)
        if wait:
            assert match.over.wait(30)
        last = comparing.store.get(self.key).last
        assert last is not None
        return last.pairs[0].battle

    def act(self, event: str, **data: Any) -> httpx.Response:
        """Post an event of the ballot."""
        body = {
            "data": [CONVERSATION],
            "fn_index": self.index("compare-ballot", event),
            "session_hash": "anything",
            "event_data": data,
        }
        return self.http.post("/gradio_api/run/predict", json=body)

    def said(self, event: str, **data: Any) -> str:
        """Post an event and return the error that the page shows."""
        answer = self.act(event, **data)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["data"][2])

    def vote(self, battle: str, preference: str = "first", revision: int = 0) -> str:
        return self.said("vote", battle=battle, preference=preference, revision=revision)


@pytest.fixture
def anna(address: str, services: Services) -> Caller:
    return Caller(address, services)


@pytest.fixture
def ben(address: str, services: Services) -> Caller:
    return Caller(address, services)


def votes_of(caller: Caller, battle: str) -> list[Preference]:
    return [row.preference for row in caller.services.votes.votes() if row.battle_id == battle]


def test_one_vote_stands_whatever_is_posted(anna, ben):
    battle = anna.begin()
    assert "You have no vote" in anna.said("reveal", battle=battle)
    assert "You have no vote" in anna.said("undo", battle=battle, revision=0)
    assert "not yours" in ben.vote(battle)
    assert "no longer exists" in anna.vote("b" + "f" * 32)
    assert "no longer exists" in anna.vote("\x00")
    assert "not one of the four" in anna.vote(battle, "best")
    assert anna.vote(battle, "second") == ""
    assert "already voted on this" in anna.vote(battle, "first")
    assert anna.vote(battle, "second") == ""  # the same request once more

    assert votes_of(anna, battle) == [Preference.SECOND]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"battle": None, "preference": "first"},
        {"battle": ["b"], "preference": {"a": 1}, "revision": "x"},
        {"battle": "b" * 100_000, "preference": "first"},
        {
            "battle": "'; drop table votes; --",
            "preference": "\ud800".encode("utf-8", "replace").decode(),
        },
    ],
)
def test_invalid_data_is_rejected_with_a_sentence(anna, data):
    assert "Nothing was recorded" in anna.said("vote", **data)


def test_hostile_notes_come_back_as_text(anna):
    battle = anna.begin()
    assert anna.vote(battle) == ""
    note = (
        "<img src=x onerror=alert(1)> ![a](https://example.com/a.png) \u202eabc\u200b ${1+1}" * 50
    )
    answer = anna.act("explain", battle=battle, tags=["empathy"], note=note, token="a").json()[
        "data"
    ]
    assert answer[2] == ""
    assert "<img src=x" not in answer[1]
    assert "&lt;img src=x" in answer[1]
    assert "the limit is 10000" in anna.said(
        "explain", battle=battle, tags=[], note="x" * 10_001, token="b"
    )
    assert "not one of the reasons" in anna.said(
        "explain", battle=battle, tags=["<b>"], note="", token="c"
    )


def test_no_payload_names_a_side_before_the_vote(anna):
    """Return everything sent to a page during a round."""
    body = {
        "data": [{"text": "slowly", "files": []}, "", "blind", [], False, False, CONVERSATION],
        "fn_index": anna.index("compare-message", "submit"),
        "session_hash": "stream",
    }
    joined = anna.http.post("/gradio_api/queue/join", json=body)
    assert joined.status_code == 200, joined.text
    streamed: list[str] = []
    with anna.http.stream("GET", "/gradio_api/queue/data?session_hash=stream") as events:
        for line in events.iter_lines():
            streamed.append(line)
            if '"process_completed"' in line:
                break
    text = "".join(streamed)
    metrics = anna.http.get("/metrics").text

    assert "hardest" in text
    assert "Your vote:" not in text
    known = [*MODELS, *filter(None, MODELS.values()), "tokens", "judge's verdict"]
    assert [name for name in known if name in text] == []
    assert 'status="finished"' in metrics
    battle = json.loads(
        json.dumps(anna.services.compare_jobs.store.get(anna.key).rounds[-1].pairs[0].battle)
    )
    shown = anna.act("vote", battle=battle, preference="both", revision=0).text
    assert [name for name in known if name in shown] == []
    assert "Maple the First" in anna.act("reveal", battle=battle).text


def test_turns_are_counted_when_both_sides_have_ended(anna, services):
    """Otherwise the public counters would tell the sides apart."""

    def counters() -> list[str]:
        lines = anna.http.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("compeer_t")]

    def over() -> int:
        return sum(
            side.is_over for side in services.compare_jobs.store.get(anna.key).rounds[-1].sides
        )

    before = counters()
    anna.begin("for ever", wait=False)
    services.compare_jobs.stop(anna.key, 0)
    eventually(lambda: over() == 1)
    assert counters() == before
    services.compare_jobs.stop(anna.key, 1)
    eventually(lambda: services.compare_jobs.job(anna.key) is None)

    assert counters() != before
