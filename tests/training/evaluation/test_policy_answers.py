"""Policies that answer: what is kept on disk is not written again, and nothing else is taken for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from compeer_core.backends.protocol import Sampling
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from tests.checkpoints import build_adapter, build_qwen
from training.evaluation.policy_answers import Answerer, Asked, PolicySource, answering

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLING = Sampling(temperature=0.7, max_new_tokens=6)


@pytest.fixture
def policy(tmp_path: Path) -> PolicySource:
    return PolicySource(name="policy", source=str(build_qwen(tmp_path / "policy")))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompts of each call that writes."""
    calls: list[int] = []
    write = Answerer._write

    def counted(self: Answerer, prompts: Any, sampling: Sampling) -> Any:
        calls.append(len(prompts))
        return write(self, prompts, sampling)

    monkeypatch.setattr(Answerer, "_write", counted)
    return calls


def asked(count: int, last: str = "Hello") -> list[Asked]:
    dialogues = [
        Dialogue((Utterance(Speaker.SEEKER, f"{last} {number}"),)) for number in range(count)
    ]
    return [Asked(dialogue, (2 * n, 2 * n + 1)) for n, dialogue in enumerate(dialogues)]


def answers(policy: PolicySource, questions: list[Asked], kept: Path | None, **changes: Any) -> Any:
    sampling = Sampling(**{"temperature": 0.7, "max_new_tokens": 6} | changes)
    with answering(policy, at_once=4, device="cpu") as answerer:
        return list(answerer.answers(questions, sampling, kept=kept))


def test_what_was_written_before_a_kill_is_read_again(policy, written, tmp_path):
    kept = tmp_path / "answers" / "policy.jsonl"
    without = answers(policy, asked(5), None)
    assert written == [2, 2, 1]
    with answering(policy, at_once=4, device="cpu") as answerer:
        begun = answerer.answers(asked(5), SAMPLING, kept=kept)
        first = [next(begun) for _ in range(3)]  # two parts are written
        begun.close()
    with kept.open("a", encoding="utf-8") as file:
        file.write('{"place": 2, "dig')  # cut short by the kill
    written.clear()

    assert answers(policy, asked(5), kept) == without

    assert first == without[:3]
    assert written == [1]
    assert [json.loads(line)["place"] for line in kept.read_text().splitlines()] == [0, 1, 2]
    written.clear()
    assert answers(policy, asked(5), kept) == without
    assert written == []


@pytest.mark.parametrize("change", ["question", "seed", "sampling", "weights", "adapter", "order"])
def test_what_depends_on_something_else_is_written_anew(policy, written, tmp_path, change):
    kept, questions, sampling = tmp_path / "kept.jsonl", asked(4), {}
    answers(policy, questions, kept)
    match change:
        case "question":
            questions[3] = asked(4, "Goodbye")[3]
        case "seed":
            questions[3] = Asked(questions[3].dialogue, (6, 8))
        case "sampling":
            sampling = {"temperature": 0.6}
        case "weights":
            build_qwen(Path(policy.source), seed=1)
        case "adapter":
            build_adapter(Path(policy.source), tmp_path / "adapter")
            policy = policy.model_copy(update={"adapter": tmp_path / "adapter"})
        case "order":
            questions.reverse()
    written.clear()

    again = answers(policy, questions, kept, **sampling)

    assert written == ([2] if change in {"question", "seed"} else [2, 2])
    assert again == answers(policy, questions, None, **sampling)
    assert len(kept.read_text().splitlines()) == 2


def test_a_shorter_list_of_questions_leaves_the_file(policy, written, tmp_path):
    kept = tmp_path / "kept.jsonl"
    whole = answers(policy, asked(4), kept)
    written.clear()

    assert answers(policy, asked(2), kept) == whole[:2]
    assert answers(policy, asked(4), kept) == whole
    assert written == []
