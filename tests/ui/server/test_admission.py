"""Admission: an honest visitor beside floods of requests."""

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from compeer_core.backends.scripted import ScriptedScoring
from tests.page_client import ELSEWHERE, HERE, Attack, Page, Post, seconds_of
from tests.pages import COMPLETE, REPLY, eventually, make_services
from ui_components.server import admission
from ui_components.server.app import build_server, serving
from ui_components.server.visitors import COOKIE, NEW_VISITORS
from ui_components.shared import jobs, session_store
from ui_components.shared.services import Services
from ui_components.shared.session_store import SessionKey

# Gradio uses deprecated pandas features.
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")

TURN_SECONDS = 0.8
SLOWED_DOWN = 3.0
TURNS: tuple[dict[str, Any], ...] = (
    {"when": "for ever", "text": COMPLETE, "delay_seconds": 0.05, "ending": "endless"},
    {"when": "quick", "text": COMPLETE, "chunk_characters": 1000},
    {"text": COMPLETE, "first_delay_seconds": TURN_SECONDS, "chunk_characters": 100},
)
JOIN, CHAT, SCORE = "/gradio_api/queue/join", "/gradio_api/call/chat", "/gradio_api/call/score"


@pytest.fixture
def services(tmp_path: Path) -> Services:
    # Its replies repeat: the gate would draw them again.
    return make_services(tmp_path, TURNS, gated=False)


@pytest.fixture
def address(services: Services) -> Iterator[str]:
    with serving(build_server(services)) as where:
        yield where


def asking(text: str = "hello") -> dict[str, Any]:
    """The body of a program's request to /chat."""
    return {"data": [text, [], None, "", None, -1]}


def key_of(services: Services, browser: Page, conversation: str = "") -> SessionKey:
    visitor = services.visitors.read({COOKIE: browser.cookie})
    return SessionKey(visitor, conversation or browser.conversation)


def turns(services: Services, status: str) -> float:
    """The counter of turns with that outcome."""
    label = f'compeer_turns_total{{model="scripted-policy",status="{status}"}} '
    lines = services.metrics.text().decode().splitlines()
    return sum(float(line.removeprefix(label)) for line in lines if line.startswith(label))


def is_busy(services: Services) -> bool:
    """Whether anybody is served by the model, or waits for it."""
    line = services.models.queue("scripted-policy")
    return bool(line._served or line._waiting)


# --- an honest visitor beside an attack ----------------------------------------------------------


def slowed_down(honest: Page, attack: Attack) -> float:
    """Return the factor by which an attack slows down a reply, at worst."""
    quiet = statistics.mean(seconds_of(honest.send) for _ in range(2))
    with attack:
        eventually(lambda: sum(attack.answers.values()) > 20)
        attacked = max(seconds_of(honest.send) for _ in range(2))
    return attacked / quiet


@pytest.mark.parametrize("local", [HERE, ELSEWHERE])
def test_300_chat_calls_do_not_delay_an_honest_visitor(address, local):
    honest = Page(address)
    attack = Attack(address, [Post(CHAT, asking())] * 300, local)

    assert slowed_down(honest, attack) < SLOWED_DOWN
    assert attack.answers[429] > 250


@pytest.mark.parametrize(
    ("count", "cookies", "local"),  # each pair of values
    [
        (36, "one cookie", HERE),
        (36, "a cookie each", ELSEWHERE),
        (36, "no cookie", HERE),
        (2300, "one cookie", ELSEWHERE),
        (2300, "a cookie each", HERE),
        (2300, "no cookie", ELSEWHERE),
    ],
)
def test_unheard_messages_do_not_delay_an_honest_visitor(services, address, local, cookies, count):
    honest, attacker = Page(address), Page(address, local=local)
    network = services.visitors.network(local)
    cookie_for = {
        "one cookie": lambda: attacker.cookie,
        "a cookie each": lambda: services.visitors.new_cookie(network),
        "no cookie": lambda: "",
    }[cookies]
    posts = [
        Post(
            JOIN,
            attacker.message("hello", f"conversation-{number:016}", f"session-{number}"),
            cookie_for(),
        )
        for number in range(count)
    ]
    attack = Attack(address, posts, local)

    assert slowed_down(honest, attack) < SLOWED_DOWN
    assert services.store.get(key_of(services, honest)).turns
    assert len(services.store) == 1  # unheard messages are not stored


def test_listening_programs_do_not_delay_an_honest_visitor(services, address):
    honest = Page(address)
    quiet = seconds_of(honest.send)
    line = services.models.queue("scripted-policy")
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=address, timeout=60) as program:
            while not is_over.is_set():
                event = program.post(CHAT, json=asking()).json()["event_id"]
                assert "event: complete" in program.get(f"{CHAT}/{event}").text

    with ThreadPoolExecutor(admission.PROGRAM.of_network) as pool:
        programs = [pool.submit(ask) for _ in range(admission.PROGRAM.of_network)]
        eventually(lambda: len(line) == admission.PROGRAM.of_network - 1)
        attacked = max(seconds_of(honest.send) for _ in range(2))
        is_over.set()

    assert attacked / quiet < SLOWED_DOWN
    for program in programs:
        program.result()


# --- rejections ----------------------------------------------------------------------------------


def test_requests_beyond_the_limit_are_rejected_for_that_visitor_only(address):
    anna, ben = Page(address), Page(address)
    chinese = Page(address, language="zh-CN")
    for browser in (anna, chinese):
        for number in range(admission.NEW.of_visitor):
            joined = browser.join("hello", f"conversation-{number:016}", f"session-{number}")
            assert joined.status_code == httpx.codes.OK
    refused = anna.join("hello")

    assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
    assert int(refused.headers["retry-after"]) > 0
    assert "too many requests running" in refused.json()["detail"]
    assert "connect-src 'self'" in refused.headers["content-security-policy"]
    assert "请稍等几秒再试" in chinese.join("hello").json()["detail"]
    assert REPLY[:20] in ben.send("quick")


def test_a_network_has_a_limit_that_does_not_hold_for_others(services, address):
    regular = Page(address)
    regular.send("quick")  # has a conversation, so newcomers do not keep it out
    network = services.visitors.network(HERE)
    body = regular.message("hello", session="nobody-listens")
    posts = [Post(JOIN, body, services.visitors.new_cookie(network)) for _ in range(100)]
    with Attack(address, posts, HERE) as attack:
        pass
    assert attack.answers == {200: admission.NEW.of_network, 429: 100 - admission.NEW.of_network}
    refused = Page(address).join("hello")

    assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
    assert "your network" in refused.json()["detail"]
    assert REPLY[:20] in regular.send("quick")
    assert REPLY[:20] in Page(address, local=ELSEWHERE).send("quick")


def test_all_programs_together_leave_the_page_alone(address):
    per_network = admission.PROGRAM.of_network
    networks = [f"127.0.1.{number}" for number in range(admission.PROGRAM.in_all // per_network)]
    for local in networks:
        with Attack(address, [Post(CHAT, asking())] * per_network, local) as attack:
            pass
        assert attack.answers == {200: per_network}
    transport = httpx.HTTPTransport(local_address="127.0.2.1")
    with httpx.Client(base_url=address, timeout=60, transport=transport) as one_more:
        refused = one_more.post(CHAT, json=asking())

    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert refused.headers["retry-after"]
    assert REPLY[:20] in Page(address).send("quick")


def test_nothing_bypasses_the_queue(address):
    """Gradio would answer a direct call in a server thread, without any queue."""
    with httpx.Client(base_url=address, timeout=60) as program:
        for name in ("chat", "score"):
            direct = program.post(f"/gradio_api/run/{name}", json={"data": asking()["data"]})
            assert direct.status_code == httpx.codes.NOT_FOUND


def test_rejected_requests_occupy_no_slot(address):
    browser = Page(address)
    for _ in range(2 * admission.NEW.of_visitor):
        assert browser.http.post(JOIN, json={"data": []}).status_code >= 400
        assert browser.http.post(JOIN, content=b"{").status_code >= 400
    assert REPLY[:20] in browser.send("quick")


def test_answered_requests_occupy_no_slot(address):
    browser = Page(address)
    for _ in range(2 * admission.NEW.of_visitor):
        assert REPLY[:20] in browser.send("quick")
        browser.act("message", "stop", browser.conversation)


# --- clients that leave or never listen ---------------------------------------------------------


def test_a_program_that_leaves_stops_its_turn(services, address):
    with httpx.Client(base_url=address, timeout=60) as program:
        event = program.post(CHAT, json=asking("for ever")).json()["event_id"]
        with program.stream("GET", f"{CHAT}/{event}"):
            eventually(lambda: is_busy(services))
        left = time.monotonic()
        eventually(lambda: not is_busy(services))
        stopped_after = time.monotonic() - left

    assert stopped_after < 2, f"{stopped_after:.2f} s"
    eventually(lambda: turns(services, "stopped") == 1)


def test_a_client_that_leaves_stops_its_turn_too(services, address):
    """As gradio_client does: on a session's stream."""
    with httpx.Client(base_url=address, timeout=60) as program:
        config = program.get("/config").json()["dependencies"]
        index = next(each["id"] for each in config if each["api_name"] == "chat")
        body = {**asking("for ever"), "fn_index": index, "session_hash": "mine"}
        program.post(JOIN, json=body).raise_for_status()
        with program.stream("GET", "/gradio_api/queue/data?session_hash=mine"):
            eventually(lambda: is_busy(services))
        left = time.monotonic()
        eventually(lambda: not is_busy(services))

    assert time.monotonic() - left < 2


def test_a_session_has_a_few_streams_at_once(services, address):
    with httpx.Client(base_url=address, timeout=60) as program, ExitStack() as streams:
        config = program.get("/config").json()["dependencies"]
        index = next(each["id"] for each in config if each["api_name"] == "chat")
        body = {**asking("for ever"), "fn_index": index, "session_hash": "crowded"}
        program.post(JOIN, json=body).raise_for_status()
        path = "/gradio_api/queue/data?session_hash=crowded"
        opened = [
            streams.enter_context(program.stream("GET", path)) for _ in range(admission.STREAMS + 1)
        ]

        assert [answer.status_code for answer in opened] == [200] * admission.STREAMS + [429]


def test_a_program_that_disconnects_leaves_the_queue(services, address):
    line = services.models.queue("scripted-policy")
    with (
        line.place(SessionKey("somebody", "").caller),
        httpx.Client(base_url=address, timeout=60) as program,
    ):
        event = program.post(CHAT, json=asking()).json()["event_id"]
        with program.stream("GET", f"{CHAT}/{event}"):
            eventually(lambda: len(line) == 1)
        left = time.monotonic()
        eventually(lambda: len(line) == 0)
        assert time.monotonic() - left < 2

    assert services.metrics.text().count(b"compeer_turns_total{") == 0


def test_score_stops_when_its_caller_disconnects(services, address, monkeypatch):
    asked = []

    def slowly(session: ScriptedScoring, text: str, labels: Any) -> tuple[float, ...]:
        asked.append(text)
        time.sleep(0.7)  # a slow judge
        return (1.0, 0.0)

    monkeypatch.setattr(ScriptedScoring, "ask", slowly)
    turn = {"data": [[{"role": "user", "content": "I lost my job."}], COMPLETE, None, ""]}
    with httpx.Client(base_url=address, timeout=60) as program:
        event = program.post(SCORE, json=turn).json()["event_id"]
        with program.stream("GET", f"{SCORE}/{event}"):
            eventually(lambda: asked)
        left = time.monotonic()
        eventually(lambda: not is_busy(services))

    assert time.monotonic() - left < 2
    assert len(asked) < 3


def test_an_unheard_call_never_starts(services, address, monkeypatch):
    monkeypatch.setattr(admission, "HEARD_WITHIN_SECONDS", 4.0)
    with httpx.Client(base_url=address, timeout=60) as program:
        calls = [program.post(CHAT, json=asking()) for _ in range(admission.PROGRAM.of_network)]
        assert program.post(CHAT, json=asking()).status_code == httpx.codes.TOO_MANY_REQUESTS
        eventually(lambda: program.post(CHAT, json=asking()).status_code == httpx.codes.OK, 8)
        late = program.get(f"{CHAT}/{calls[0].json()['event_id']}").text

    assert "nobody listened" in late
    assert services.metrics.text().count(b"compeer_turns_total{") == 0


def test_a_program_may_listen_a_little_later(address):
    with httpx.Client(base_url=address, timeout=60) as program:
        event = program.post(CHAT, json=asking("quick")).json()["event_id"]
        time.sleep(1.5)  # longer than the grace period
        answer = program.get(f"{CHAT}/{event}").text

    assert "event: complete" in answer
    assert REPLY[:20] in answer


def test_a_closed_page_leaves_the_queue(services, address):
    line = services.models.queue("scripted-policy")
    browser = Page(address)
    with line.place(SessionKey("somebody", "").caller):
        browser.join("hello").raise_for_status()
        with browser.listening() as events:
            assert any("number 1 in the queue" in event for event in events)
        left = time.monotonic()
        eventually(lambda: len(line) == 0)
        gone_after = time.monotonic() - left

    # The watcher notices with its next heartbeat, and a page that is reloaded has a moment to return.
    assert gone_after < services.grace_seconds + 2, f"{gone_after:.2f} s"
    (reply,) = services.store.get(key_of(services, browser)).turns[0].replies
    assert reply.outcome == "stopped"


def test_a_page_closed_before_its_first_update_leaves_the_queue(services, address, monkeypatch):
    monkeypatch.setattr(jobs.Job.stop_unless_watched, "__defaults__", (1.0,))
    line = services.models.queue("scripted-policy")
    browser = Page(address)
    with line.place(SessionKey("somebody", "").caller):
        browser.join("hello").raise_for_status()
        with browser.listening():
            eventually(lambda: len(line) == 1)
        eventually(lambda: len(line) == 0, 3)


def test_a_late_listener_is_answered(services, address):
    """A page opens its stream once its message is accepted, which can take a while."""
    browser = Page(address)
    browser.join("quick").raise_for_status()
    assert not services.store.get(key_of(services, browser)).turns
    with browser.listening() as events:
        assert any('"process_completed"' in line for line in events)

    assert services.store.get(key_of(services, browser)).turns[0].progress.outcome == "finished"


# --- storage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cookies", ["one cookie", "no cookie"])
def test_conversations_of_others_outlive_those_of_one_who_writes_many(services, address, cookies):
    services.store._of_crowd = replace(session_store.OF_CROWD, sessions=24)
    room = session_store.OF_VISITOR if cookies == "one cookie" else services.store._of_crowd
    honest, attacker = Page(address), Page(address)
    if cookies == "no cookie":
        attacker.http.cookies.clear()
        attacker.cookie = ""
    honest.send("quick")
    for number in range(room.sessions + 5):
        attacker.send("quick", f"conversation-{number:016}")

    own = [
        key for key in services.store._entries if key.visitor == key_of(services, attacker).visitor
    ]
    assert len(own) == room.sessions
    # With a cookie nothing of one's own is lost: a further conversation is refused.
    is_first_stored = f"conversation-{0:016}" in {key.conversation for key in own}
    assert is_first_stored == (cookies == "one cookie")
    assert services.store.get(key_of(services, honest)).turns


def test_the_page_marks_visitors_of_a_network_that_brings_too_many(services, address):
    with httpx.Client(base_url=address, timeout=60) as many:
        for number in range(NEW_VISITORS + 1):
            cookie = many.get("/").cookies[COOKIE]
            many.cookies.clear()
            caller = SessionKey(services.visitors.read({COOKIE: cookie}), "").caller
            assert caller.is_of_the_crowd == (number == NEW_VISITORS)
    elsewhere = Page(address, local=ELSEWHERE)

    assert not key_of(services, elsewhere).caller.is_of_the_crowd
