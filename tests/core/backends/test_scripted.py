"""The scripted backend and scorer do what the script says, and nothing else."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.backends.protocol import Backend, LabelScorer, Message, Sampling
from compeer_core.backends.scripted import (
    ScriptedBackend,
    ScriptedCompletion,
    ScriptedScorer,
    ScriptedTurn,
)
from compeer_core.errors import BackendError, ConfigError

HELLO = (Message("user", ("Hello?",)),)


def opened(
    turn: ScriptedTurn | str, stop: threading.Event | None = None, budget: int = 512
) -> ScriptedCompletion:
    sampling = Sampling(max_new_tokens=budget)
    return ScriptedBackend([turn]).open(HELLO, sampling, stop or threading.Event())


def test_both_are_what_the_protocols_ask_for() -> None:
    backend: Backend = ScriptedBackend(["x"])
    scorer: LabelScorer = ScriptedScorer(["True"])

    assert backend.name == scorer.name == "scripted"


@settings(deadline=None)
@given(st.text("<a/>b", min_size=1, max_size=40), st.integers(1, 7), st.sampled_from(["</a>", "b"]))
def test_a_turn_is_played_whole_in_stretches(text: str, size: int, until: str) -> None:
    completion = opened(ScriptedTurn(text=text, chunk_characters=size))
    stretches = []
    while not completion.ended:
        stretches.append("".join(completion.generate(until)))

    *before, last = text.split(until)
    assert stretches == [*(part + until for part in before), last]


def test_a_chunk_counts_as_a_token() -> None:
    completion = opened(ScriptedTurn(text="abcdefghij", chunk_characters=4))

    assert list(completion.generate()) == ["abcd", "efgh", "ij"]
    assert completion.tokens == 3


def test_a_failing_turn_fails_after_its_text() -> None:
    chunks = opened(ScriptedTurn(text="half", ending="failed")).generate()

    assert next(chunks) == "half"
    with pytest.raises(BackendError):
        next(chunks)


def test_an_endless_turn_ends_with_the_budget() -> None:
    completion = opened(ScriptedTurn(text="ab", chunk_characters=1, ending="endless"), budget=5)

    assert "".join(completion.generate()) == "ababa"
    assert completion.ended


def test_a_stop_interrupts_the_wait_before_a_chunk() -> None:
    stop = threading.Event()
    completion = opened(ScriptedTurn(text="late", first_delay_seconds=30), stop)
    threading.Timer(0.05, stop.set).start()
    started = time.monotonic()

    assert list(completion.generate()) == []
    assert not completion.ended
    assert time.monotonic() - started < 20


def test_a_closed_turn_writes_nothing_more() -> None:
    completion = opened("text that goes on")
    chunks = completion.generate()
    next(chunks)
    completion.close()

    assert list(chunks) == []


def test_written_text_replaces_the_script_up_to_its_last_tag() -> None:
    completion = opened("<a>one</a><b>two</b><c>three</c>")
    assert "".join(completion.generate("</a>")) == "<a>one</a>"
    completion.write("<b>other</b>\n<c>")

    assert "".join(completion.generate()) == "three</c>"


def test_a_script_that_lets_nothing_be_written_says_so() -> None:
    backend = ScriptedBackend(["x"], can_write=False)

    with pytest.raises(BackendError):
        backend.open(HELLO, Sampling(), threading.Event()).write("y")


def test_the_turn_depends_on_the_conversation_alone() -> None:
    backend = ScriptedBackend(["one", ScriptedTurn(text="help", when="Exam"), "two"])

    def said(*messages: str) -> str:
        roles = ("user", "assistant")
        chat = [Message(roles[place % 2], (text,)) for place, text in enumerate(messages)]
        return "".join(backend.open(chat, Sampling(), threading.Event()).generate())

    assert said("hi") == said("hi") == "one"
    assert said("hi", "one", "and") == "two"
    assert said("hi", "one", "and", "two", "so") == "one"
    assert said("my EXAM is near") == "help"
    assert said("my exam", "help", "thanks") == "two"


def test_a_scorer_answers_by_list_for_each_session_anew() -> None:
    scorer = ScriptedScorer([{"True": 0.75, "False": 0.25}, {"First": 1.0}, "False"])
    words = ("True", "False")
    for _ in range(2):
        session = scorer.open(HELLO)
        assert session.ask("1", words) == (0.75, 0.25)
        assert session.ask("2", words) == pytest.approx((0.1, 0.9))
        assert session.ask("3", words) == (0.75, 0.25)
        assert session.ask("4", ("First", "Second")) == (1.0, 0.0)


def test_a_scorer_fails_where_it_is_told_to_and_where_it_has_no_answer() -> None:
    session = ScriptedScorer([BackendError("gone")]).open(HELLO)
    with pytest.raises(BackendError, match="gone"):
        session.ask("1", ("True", "False"))
    with pytest.raises(BackendError, match="no answer among First"):
        ScriptedScorer(["True"]).open(HELLO).ask("1", ("First",))


def test_scripts_are_read_from_toml_and_json(tmp_path: Path) -> None:
    toml = tmp_path / "policy.toml"
    toml.write_text(
        'name = "taped"\ncan_write = false\n[[turns]]\ntext = "hi"\nending = "failed"\n',
        encoding="utf-8",
    )
    judge = tmp_path / "judge.json"
    judge.write_text(json.dumps({"answers": ["True", {"First": 1.0}]}), encoding="utf-8")

    backend = ScriptedBackend.from_file(toml)
    scorer = ScriptedScorer.from_file(judge)

    assert (backend.name, backend.can_write) == ("taped", False)
    assert backend.turns == (ScriptedTurn(text="hi", ending="failed"),)
    assert scorer.answers == ("True", {"First": 1.0})


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.toml", "turns = []", "turns"),
        ("a.toml", '[[turns]]\ntext = "x"\ndealy_seconds = 1', "did you mean 'delay_seconds'"),
        ("a.json", '{"turns": [{"text": "x", "ending": "never"}]}', "turns.0.ending"),
        ("a.json", "{", "JSON"),
        ("a.toml", "turns = [", "TOML"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_a_wrong_script_is_named_with_what_is_wrong(
    tmp_path: Path, name: str, text: str | None, part: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        ScriptedBackend.from_file(path)
    assert part in str(caught.value)
    assert name in str(caught.value)
