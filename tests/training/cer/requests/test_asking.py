"""Every question is answered once, whatever the endpoint does and whenever the run is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compeer_core.backends.protocol import Message
from compeer_core.errors import BackendError, ConfigError
from compeer_core.images import Image
from tests.training.cer.endpoint import (
    HALF_BODY,
    RESET,
    Body,
    Endpoint,
    Fault,
    always,
    asked,
    at,
    echo,
    refused,
    silent,
)
from training.cer.requests import request_dispatch as flight
from training.cer.requests.asking import (
    Answer,
    Asker,
    Budget,
    BudgetSpentError,
    Question,
    estimate,
)
from training.cer.requests.generators import GeneratorSettings
from training.common.interrupts import StopRequest
from training.stages import StoppedEarly

KEY = "sk-this-must-not-be-written"


def usable(key: str, text: str) -> str | None:
    return "wrong language" if "bad" in text else None


def question(number: int, text: str = "") -> Question:
    return Question(f"q{number}", (Message("user", (text or f"q{number}",)),), seed=number)


def questions(count: int) -> Iterator[Question]:
    return (question(number) for number in range(count))


def settings(endpoint: Endpoint, **changes: Any) -> GeneratorSettings:
    return GeneratorSettings.model_validate(
        {"source": endpoint.source, "backoff_seconds": 0.01, "in_flight": 4} | changes
    )


def asked_of(asker: Asker, count: int) -> list[Answer]:
    try:
        return list(asker.ask(questions(count), usable, label="test", total=count))
    finally:
        asker.close()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPEER_API_KEY", KEY)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as running:
        yield running


# --- what goes right -----------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_questions(endpoint: Endpoint, tmp_path: Path) -> None:
    def slow_first(body: Body) -> str:
        if asked(body) == "q0":
            time.sleep(0.2)
        return echo(body)

    endpoint.answer = slow_first
    answers = asked_of(Asker(settings(endpoint), tmp_path), 40)

    assert [answer.text for answer in answers] == [f"q{n} / {n}" for n in range(40)]
    assert {(answer.problem, answer.tries) for answer in answers} == {(None, 1)}


def test_requests_in_flight_are_as_many_as_allowed_all_the_time(tmp_path: Path) -> None:
    # What is asked for: at least 0.9 N / latency. What else this machine does counts against it,
    # so the best of a few measurements is taken.
    n, latency, count = 16, 0.5, 160
    shares = []
    for attempt in range(4):
        with Endpoint(latency=latency) as endpoint:
            asker = Asker(settings(endpoint, in_flight=n), tmp_path / str(attempt))
            asked_of(asker, count)
            rate = count / endpoint.seconds()
            assert endpoint.most_in_flight == n
            shares.append((endpoint.mean_in_flight() / n, rate * latency / n))
        if min(shares[-1]) >= 0.9:
            break

    assert max(map(min, shares)) >= 0.9, shares


def test_connections_are_used_again(endpoint: Endpoint, tmp_path: Path) -> None:
    asked_of(Asker(settings(endpoint), tmp_path), 40)

    assert endpoint.connections <= 4


def test_64_requests_run_at_a_time(tmp_path: Path) -> None:
    with Endpoint(latency=0.3) as endpoint:
        asked_of(Asker(settings(endpoint, in_flight=64), tmp_path), 192)

        assert endpoint.most_in_flight == 64


def test_questions_are_not_read_far_ahead(endpoint: Endpoint, tmp_path: Path) -> None:
    read = 0

    def counted() -> Iterator[Question]:
        nonlocal read
        for one in questions(10_000):
            read += 1
            yield one

    asker = Asker(settings(endpoint, in_flight=2), tmp_path)
    answers = asker.ask(counted(), usable, label="test")
    next(answers)
    time.sleep(0.3)
    answers.close()  # type: ignore[attr-defined]
    asker.close()

    assert read <= 2 * flight.AHEAD + 2 * flight.WINDOW


def test_a_slow_answer_holds_up_at_most_a_window_of_others(tmp_path: Path) -> None:
    with Endpoint(fault=lambda number, body: silent(1.5) if asked(body) == "q0" else None) as slow:
        asker = Asker(settings(slow, in_flight=2), tmp_path)
        answers = asked_of(asker, 60)
        begun = [asked(body) for body in slow.bodies]

    assert [answer.key for answer in answers] == [f"q{n}" for n in range(60)]
    assert begun.index("q59") < 60  # all others were asked while the first one was waited for


def test_pictures_go_only_to_a_model_that_sees(endpoint: Endpoint, tmp_path: Path) -> None:
    picture = Image(b"\x89PNG", 28, 28)
    shown = Question("a", (Message("user", (picture, "what is this?")),), 0)
    for sees in (False, True):
        asker = Asker(settings(endpoint, sees_images=sees), tmp_path / str(sees))
        list(asker.ask([shown], usable, label="test"))
        asker.close()

    blind, seeing = [body["messages"][0]["content"] for body in endpoint.bodies]
    assert blind == "what is this?"
    assert [part["type"] for part in seeing] == ["image_url", "text"]


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.fault = at({2: refused(500, KEY)})
    asker = Asker(settings(endpoint), tmp_path)
    asked_of(asker, 10)

    assert {headers["authorization"] for headers in endpoint.headers} == {f"Bearer {KEY}"}
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert written
    assert not [file for file in written if KEY.encode() in file.read_bytes()]
    assert KEY not in asker.settings.model_dump_json() + str(asker.counts)


# --- texts of no use -----------------------------------------------------------------------------


def test_an_unusable_text_is_asked_for_again_with_another_seed(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    def third_time(body: Body) -> str:
        return "good" if endpoint.keys.count(asked(body)) == 3 else "bad"

    endpoint.answer = third_time
    asker = Asker(settings(endpoint), tmp_path)
    answers = asked_of(asker, 2)

    assert [(answer.text, answer.tries) for answer in answers] == [("good", 3)] * 2
    seeds = [body["seed"] for body in endpoint.bodies if asked(body) == "q1"]
    assert seeds[0] == 1
    assert len(set(seeds)) == 3
    assert asker.counts.retried == {"wrong language": 4}
    assert asker.counts.answered == 2


def test_a_question_without_a_usable_text_is_counted_and_not_asked_again(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.answer = lambda body: "bad" if asked(body) == "q1" else "good"
    first = Asker(settings(endpoint, tries=3), tmp_path)
    answers = asked_of(first, 3)
    sent = endpoint.requests
    second = Asker(settings(endpoint, tries=3), tmp_path)

    assert [answer.problem for answer in answers] == [None, "wrong language", None]
    assert answers[1].tries == 3
    assert asked_of(second, 3) == answers
    assert endpoint.requests == sent == 5
    assert second.counts == first.counts.model_copy(update={"requests": 0})
    assert second.counts.failed == {"wrong language": 1}


def test_more_tries_are_a_matter_of_the_next_start(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.answer = lambda body: "good" if endpoint.requests == 3 else "bad"
    asked_of(Asker(settings(endpoint, tries=2), tmp_path), 1)
    (answer,) = asked_of(Asker(settings(endpoint, tries=4), tmp_path), 1)

    assert (answer.text, answer.tries, endpoint.requests) == ("good", 3, 3)


# --- faults of the endpoint ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (refused(429), "has too much to do (429)"),
        (refused(408), "has a fault (408)"),
        (refused(500), "has a fault (500)"),
        (refused(503, Retry_After="0.1"), "has a fault (503)"),
        (HALF_BODY, "sent something that is not JSON"),
        (RESET, "lost the connection in mid-reply"),
        (silent(), "took too long"),
    ],
    ids=["429", "408", "500", "503", "half-json", "reset", "time-out"],
)
def test_a_passing_fault_is_outlasted_with_the_same_request(
    endpoint: Endpoint, tmp_path: Path, fault: Fault, reason: str
) -> None:
    endpoint.fault = at({2: fault, 4: fault})
    asker = Asker(settings(endpoint, in_flight=1, timeout_seconds=2), tmp_path)
    answers = asked_of(asker, 5)

    assert [answer.text for answer in answers] == [f"q{n} / {n}" for n in range(5)]
    assert asker.counts.faults == {reason: 2}
    assert asker.counts.retried == {}
    assert endpoint.requests == asker.counts.requests == 7


def test_retry_after_holds_all_requests_back(endpoint: Endpoint, tmp_path: Path) -> None:
    times: list[float] = []

    def noted(number: int, body: Body) -> Fault | None:
        times.append(time.monotonic())
        return refused(429, Retry_After="1") if number == 1 else None

    endpoint.fault = noted
    endpoint.latency = 0.05
    answers = asked_of(Asker(settings(endpoint, in_flight=2), tmp_path), 12)

    assert all(answer.text for answer in answers)
    waited = [later - times[0] for later in times]
    assert not [moment for moment in waited if 0.3 < moment < 0.9]


def test_a_question_that_gets_no_answer_is_asked_by_the_next_start(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.fault = lambda number, body: refused(500) if asked(body) == "q1" else None
    first = Asker(settings(endpoint, retries=2), tmp_path)
    answers = asked_of(first, 3)

    assert [answer.text is None for answer in answers] == [False, True, False]
    assert answers[1] == Answer(key="q1", text=None, problem="has a fault (500)", tries=0)
    assert first.counts.unanswered == {"has a fault (500)": 1}
    assert endpoint.requests == 2 + 3

    endpoint.fault = at({})
    again = asked_of(Asker(settings(endpoint), tmp_path), 3)
    assert again[1].text == "q1 / 1"
    assert endpoint.requests == 6


def test_a_request_that_is_rejected_is_passed_over_at_once(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    too_long = refused(400, "maximum context length is 4096 tokens")
    endpoint.fault = lambda number, body: too_long if asked(body) == "q1" else None
    answers = asked_of(Asker(settings(endpoint), tmp_path), 3)

    assert answers[1].problem == "cannot take a conversation of this length (400)"
    assert endpoint.requests == 3


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (refused(401), "does not accept the key"),
        (refused(403), "does not accept the key"),
        (refused(404), "is not known at this address"),
        (refused(400, "model_not_found"), "is not known at this address"),
        (refused(429, "insufficient_quota"), "nothing is left to pay with"),
    ],
    ids=["401", "403", "404", "no-model", "no-money"],
)
def test_a_wrong_setting_ends_the_run_at_once(
    endpoint: Endpoint, tmp_path: Path, fault: Fault, part: str
) -> None:
    endpoint.fault = always(fault)

    with pytest.raises(BackendError, match=part) as caught:
        asked_of(Asker(settings(endpoint), tmp_path), 1000)
    assert "\n" not in str(caught.value)
    assert endpoint.requests <= 8


def test_an_endpoint_that_is_down_ends_the_run(tmp_path: Path) -> None:
    with Endpoint() as endpoint:
        gone = settings(endpoint, retries=1)

    with pytest.raises(BackendError, match="20 questions in a row got no answer, the last because"):
        asked_of(Asker(gone, tmp_path), 10_000)


def test_a_few_failures_among_many_do_not_end_the_run(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.fault = lambda number, body: refused(500) if asked(body)[-1] in "1357" else None
    answers = asked_of(Asker(settings(endpoint, retries=0), tmp_path), 100)

    assert sum(answer.text is None for answer in answers) == 40


def test_an_endpoint_that_asks_for_hours_ends_the_run(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.fault = always(refused(429, Retry_After="7200"))

    with pytest.raises(BackendError, match="asks to be left alone for 7200 s"):
        asked_of(Asker(settings(endpoint), tmp_path), 10)


def test_a_bug_in_a_check_is_not_taken_for_an_answer(endpoint: Endpoint, tmp_path: Path) -> None:
    def broken(key: str, text: str) -> str | None:
        raise ZeroDivisionError

    asker = Asker(settings(endpoint), tmp_path)
    with pytest.raises(ZeroDivisionError):
        list(asker.ask(questions(10), broken, label="test"))
    asker.close()


# --- budget, rate, stopping ----------------------------------------------------------------------


def test_the_budget_is_shared_and_never_passed(endpoint: Endpoint, tmp_path: Path) -> None:
    budget = Budget(15)
    first = Asker(settings(endpoint), tmp_path / "a", budget)
    second = Asker(settings(endpoint), tmp_path / "b", budget)
    asked_of(first, 10)

    with pytest.raises(BudgetSpentError, match="budget of 15 requests is spent"):
        asked_of(second, 10)
    assert endpoint.requests == 15

    answers = asked_of(Asker(settings(endpoint), tmp_path / "b", Budget(5)), 10)
    assert [answer.text for answer in answers] == [f"q{n} / {n}" for n in range(10)]
    assert endpoint.requests == 20


def test_requests_are_not_sent_more_often_than_allowed(endpoint: Endpoint, tmp_path: Path) -> None:
    begun = time.monotonic()
    asked_of(Asker(settings(endpoint, requests_per_minute=600), tmp_path), 20)

    # 19 gaps of 60 s / 600; from before the first is sent, as it may arrive late on a busy machine
    assert time.monotonic() - begun >= 1.9


def test_a_wish_to_stop_waits_for_what_was_sent(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.latency = 0.3
    with StopRequest() as stopping:
        asker = Asker(settings(endpoint, in_flight=2), tmp_path, stopping=stopping)
        answers = asker.ask(questions(50), usable, label="test")
        next(answers)
        stopping.requested = True
        with pytest.raises(StoppedEarly, match="what was answered is kept"):
            list(answers)
        asker.close()
    sent = endpoint.requests
    assert sent < 10
    asked_of(Asker(settings(endpoint, in_flight=50), tmp_path), 50)

    assert endpoint.requests == 50


def test_who_stops_listening_leaves_no_request_behind(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.fault = lambda number, body: None if number == 1 else silent()
    asker = Asker(settings(endpoint), tmp_path)
    answers = asker.ask(questions(50), usable, label="test")
    assert next(answers).text == "q0 / 0"
    begun = time.monotonic()
    answers.close()  # type: ignore[attr-defined]
    asker.close()

    assert time.monotonic() - begun < 10
    assert threading.active_count() < 20


# --- journals ------------------------------------------------------------------------------------


def test_a_changed_question_is_asked_anew_and_the_others_are_not(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    asked_of(Asker(settings(endpoint), tmp_path), 3)
    asker = Asker(settings(endpoint), tmp_path)

    asked = [question(0), question(1, "other words"), question(2)]
    answers = list(asker.ask(asked, usable, label="test"))
    asker.close()

    assert [answer.text for answer in answers] == ["q0 / 0", "other words / 1", "q2 / 2"]
    assert endpoint.requests == 4


def test_changed_settings_are_refused_but_not_how_fast_one_asks(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    asked_of(Asker(settings(endpoint), tmp_path), 3)
    asked_of(Asker(settings(endpoint, in_flight=1, retries=1, timeout_seconds=9), tmp_path), 3)

    with pytest.raises(ConfigError, match="temperature"):
        asked_of(Asker(settings(endpoint, temperature=0.1), tmp_path), 3)
    assert endpoint.requests == 3


def test_half_a_surrogate_pair_can_be_kept(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.answer = lambda body: "sad \ud83d"
    (answer,) = asked_of(Asker(settings(endpoint), tmp_path), 1)

    assert answer.text == "sad ?"


CHILD = """
import sys
from pathlib import Path
from tests.training.cer.requests.test_asking import questions, usable
from training.cer.requests.asking import Asker
from training.cer.requests.generators import GeneratorSettings

source, folder = sys.argv[1:]
asker = Asker(GeneratorSettings(source=source, in_flight=4, tries=3), Path(folder))
with open(Path(folder) / "answers", "w") as file:
    for answer in asker.ask(questions(60), usable, label="test"):
        file.write(answer.model_dump_json() + "\\n")
    file.write(str(asker.counts.model_copy(update={"requests": 0})))
asker.close()
"""


def flaky(body: Body) -> str:
    """Every third question needs another seed, every tenth gets nothing usable."""
    number = int(asked(body)[1:])
    poor = number % 10 == 0 or (number % 3 == 0 and body["seed"] == number)
    return f"bad {number}" if poor else echo(body)


def test_a_run_killed_at_several_points_asks_nothing_twice_and_ends_the_same(
    tmp_path: Path, repository: Path
) -> None:
    def start(endpoint: Endpoint, folder: Path) -> "subprocess.Popen[bytes]":
        folder.mkdir(exist_ok=True)
        arguments = [sys.executable, "-c", CHILD, endpoint.source, str(folder)]
        return subprocess.Popen(arguments, cwd=repository, env=os.environ | {"PYTHONPATH": "."})

    with Endpoint(flaky, latency=0.01) as endpoint:
        assert start(endpoint, tmp_path / "whole").wait(120) == 0
        needed = endpoint.requests

    killed = tmp_path / "killed"
    with Endpoint(flaky, latency=0.02) as endpoint:
        cut_off = 0
        for target in (7, 31, 64):
            child = start(endpoint, killed)
            deadline = time.monotonic() + 60
            while endpoint.requests < target and time.monotonic() < deadline:
                time.sleep(0.002)
            child.send_signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            journal = (killed / "test.tiny.jsonl").read_bytes()
            cut_off = endpoint.requests - journal.count(b'"number"')
            with (killed / "test.tiny.jsonl").open("ab") as file:
                file.write(b'{"tries": [{"key": "q5')  # as if it were killed in mid-line
        assert start(endpoint, killed).wait(120) == 0

        # Only what was on its way when it was killed was asked again: at most 4 each time.
        assert endpoint.requests - needed == cut_off <= 12
    assert (killed / "answers").read_bytes() == (tmp_path / "whole" / "answers").read_bytes()


# --- the estimate --------------------------------------------------------------------------------


def test_the_estimate_counts_characters_pixels_and_the_longest_answer() -> None:
    # Latin: 40 characters / 4 = 10; Chinese: 30 / 1.5 = 20; a picture of 56 x 56: 4 patches of
    # 28 x 28; 2 messages: 10. Together 44 tokens a question.
    picture = Image(b"", 56, 56)
    messages = (Message("system", ("x" * 40,)), Message("user", ("难" * 30, picture)))
    prices = {"price_per_million_input": 1000.0, "price_per_million_output": 2000.0}
    generator = GeneratorSettings.model_validate(
        {"source": "openai:http://localhost/v1#m", "sees_images": True, "max_new_tokens": 100}
        | prices
    )
    found = estimate((Question(str(n), messages, n) for n in range(5)), generator)

    assert (found.requests, found.input_tokens, found.output_tokens) == (5, 220, 500)
    assert found.price == pytest.approx(0.22 + 1.0)
    assert "at most 1.22" in str(found)


def test_without_prices_the_estimate_names_none() -> None:
    found = estimate([question(1)], GeneratorSettings(source="some/folder"))

    assert found.price is None
