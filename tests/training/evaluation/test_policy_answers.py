"""Answers of policies: stored answers are reused if, and only if, nothing they depend on changed; strategies are forced
as on the page.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.scripted import ScriptedBackend
from compeer_core.backends.transformers_.batch_generation import Turn
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.model_pool import load_transformers
from compeer_core.policy import Controls, Policy, TurnStream
from compeer_core.turn import draw_seed
from tests.checkpoints import build_adapter, build_qwen
from tests.core.example import TEXT
from training.evaluation.policy_answers import (
    Answerer,
    AnswerRequest,
    PolicySource,
    loaded_policy,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLING = Sampling(temperature=0.7, max_new_tokens=6)


@pytest.fixture
def policy(tmp_path: Path) -> PolicySource:
    return PolicySource(name="policy", source=str(build_qwen(tmp_path / "policy")))


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompts of each generated batch."""
    calls: list[int] = []
    generate = Answerer._generate_batch

    def counted(self: Answerer, prompts: Any, sampling: Sampling) -> Any:
        calls.append(len(prompts))
        return generate(self, prompts, sampling)

    monkeypatch.setattr(Answerer, "_generate_batch", counted)
    return calls


def requests(count: int, last: str = "Hello") -> list[AnswerRequest]:
    dialogues = [
        Dialogue((Utterance(Speaker.SEEKER, f"{last} {number}"),)) for number in range(count)
    ]
    return [AnswerRequest(dialogue, (2 * n, 2 * n + 1)) for n, dialogue in enumerate(dialogues)]


def answers(
    policy: PolicySource, to_answer: list[AnswerRequest], stored: Path | None, **changes: Any
) -> Any:
    sampling = Sampling(**{"temperature": 0.7, "max_new_tokens": 6} | changes)
    with loaded_policy(policy, at_once=4, device="cpu") as answerer:
        return list(answerer.answers(to_answer, sampling, stored=stored))


def test_answers_from_before_a_kill_are_reused(policy, generated, tmp_path):
    stored = tmp_path / "answers" / "policy.jsonl"
    without = answers(policy, requests(5), None)
    assert generated == [2, 2, 1]
    with loaded_policy(policy, at_once=4, device="cpu") as answerer:
        begun = answerer.answers(requests(5), SAMPLING, stored=stored)
        first = [next(begun) for _ in range(3)]  # two batches are generated
        begun.close()
    with stored.open("a", encoding="utf-8") as file:
        file.write('{"place": 2, "dig')  # truncated by the kill
    generated.clear()

    assert answers(policy, requests(5), stored) == without

    assert first == without[:3]
    assert generated == [1]
    assert [json.loads(line)["place"] for line in stored.read_text().splitlines()] == [0, 1, 2]
    generated.clear()
    assert answers(policy, requests(5), stored) == without
    assert generated == []


@pytest.mark.parametrize(
    "change", ["question", "seed", "strategy", "sampling", "weights", "adapter", "order"]
)
def test_answers_are_generated_again_after_a_change(policy, generated, tmp_path, change):
    stored, to_answer, sampling = tmp_path / "stored.jsonl", requests(4), {}
    answers(policy, to_answer, stored)
    match change:
        case "question":
            to_answer[3] = requests(4, "Goodbye")[3]
        case "seed":
            to_answer[3] = AnswerRequest(to_answer[3].dialogue, (6, 8))
        case "strategy":
            to_answer[3] = replace(to_answer[3], strategy="Question")
        case "sampling":
            sampling = {"temperature": 0.6}
        case "weights":
            build_qwen(Path(policy.source), seed=1)
        case "adapter":
            build_adapter(Path(policy.source), tmp_path / "adapter")
            policy = policy.model_copy(update={"adapter": tmp_path / "adapter"})
        case "order":
            to_answer.reverse()
    generated.clear()

    again = answers(policy, to_answer, stored, **sampling)

    assert generated == ([2] if change in {"question", "seed", "strategy"} else [2, 2])
    assert again == answers(policy, to_answer, None, **sampling)
    assert len(stored.read_text().splitlines()) == 2


def test_fewer_requests_do_not_truncate_the_file(policy, generated, tmp_path):
    stored = tmp_path / "stored.jsonl"
    whole = answers(policy, requests(4), stored)
    generated.clear()

    assert answers(policy, requests(2), stored) == whole[:2]
    assert answers(policy, requests(4), stored) == whole
    assert generated == []


def test_a_policys_own_temperature_replaces_that_of_sampling_but_not_of_greedy_decoding(
    policy, monkeypatch
):
    temperatures: list[float] = []

    def record(_: Any, prompts: Any, sampling: Any) -> list[tuple[str, ...]]:
        temperatures.append(sampling.temperature)
        return [("",) for _ in prompts]

    monkeypatch.setattr(Answerer, "_generate_batch", record)
    answers(policy, requests(1), None, temperature=0.7)
    cold = policy.model_copy(update={"temperature": 0.2})
    answers(cold, requests(1), None, temperature=0.7)
    answers(cold, requests(1), None, temperature=0.0)

    assert temperatures == [0.7, 0.2, 0.0]


@pytest.mark.parametrize(
    ("gate", "temperature", "seeds", "texts"),
    [
        (False, 0.7, [[0, 1]], [TEXT, "no format"]),
        (True, 0.7, [[0, 1], [draw_seed(1, 1)], [draw_seed(1, 2)]], [TEXT, TEXT]),
        (True, 0.0, [[0, 1]], [TEXT, ""]),
    ],
)
def test_with_the_gate_a_rejected_answer_is_drawn_again(
    policy, monkeypatch, gate, temperature, seeds, texts
):
    used: list[list[int]] = []
    passing = {0, draw_seed(1, 2)}

    def generate(_: Any, prompts: Any, sampling: Any) -> list[tuple[Turn, ...]]:
        used.append([seed for prompt in prompts for seed in prompt.seeds])
        return [
            tuple(
                Turn(TEXT if seed in passing else "no format", (), ended=True)
                for seed in prompt.seeds
            )
            for prompt in prompts
        ]

    monkeypatch.setattr(Answerer, "_generate_batch", generate)
    gated = policy.model_copy(update={"gate": gate})
    [turns] = answers(gated, requests(1), None, temperature=temperature)

    assert used == seeds
    assert [turn.text for turn in turns] == texts


def test_an_answer_that_no_draw_makes_usable_is_empty(policy, monkeypatch):
    def generate(_: Any, prompts: Any, sampling: Any) -> list[tuple[Turn, ...]]:
        return [tuple(Turn("no format", (), ended=True) for _ in each.seeds) for each in prompts]

    monkeypatch.setattr(Answerer, "_generate_batch", generate)
    [turns] = answers(policy.model_copy(update={"gate": True}), requests(1), None)

    assert [turn.text for turn in turns] == ["", ""]


def test_a_policy_without_the_gate_is_described_as_before_it_existed(policy):
    assert "gate" not in policy.model_dump(mode="json")
    assert policy.model_copy(update={"gate": True}).model_dump()["gate"] is True


# --- a forced strategy ---------------------------------------------------------------------------


def test_a_strategy_is_forced_as_on_the_page_and_other_requests_are_not_changed(policy):
    free, forced = requests(2)
    forced = replace(forced, strategy="Self-disclosure")
    page = Policy("page", load_transformers(policy.source, device="cpu"))
    expected = []
    for seed in forced.seeds:
        controls = Controls("Self-disclosure", sampling=replace(SAMPLING, seed=seed))
        *_, last = page.respond(forced.dialogue, controls, threading.Event())
        expected.append(last.reading.raw)
    page.backend.close()

    [turns_free, turns_forced] = answers(policy, [free, forced], None)

    assert [turn.text for turn in turns_forced] == expected
    assert turns_free == answers(policy, [free], None)[0]


@pytest.mark.parametrize(
    ("draws", "temperature", "replies", "used", "kept"),
    [
        (1, 0.7, ["Oh no."], 1, 0),
        (3, 0.7, ["Oh no.", "Oh.", "Why?"], 3, 2),
        (2, 0.7, ["Oh no.", "Oh."], 2, 0),
        (3, 0.7, ["Why?"], 1, 0),
        (3, 0.0, ["Oh no."], 1, 0),
    ],
)
def test_a_reply_that_ignores_its_strategy_is_drawn_again(
    policy, monkeypatch, draws, temperature, replies, used, kept
):
    texts = [f"<reply>{reply}</reply>" for reply in replies]
    seeds: list[int | None] = []

    def respond(_: Policy, dialogue: Dialogue, controls: Controls, stop: threading.Event) -> Any:
        assert controls.strategy == "Question"
        assert controls.sampling is not None
        seeds.append(controls.sampling.seed)
        backend = ScriptedBackend([texts[len(seeds) - 1]], can_write=False)
        return TurnStream(Policy("scripted", backend), dialogue, Controls(), stop)

    monkeypatch.setattr(Policy, "respond", respond)
    request = AnswerRequest(requests(1)[0].dialogue, (5,), strategy="Question", draws=draws)
    [[turn]] = answers(policy, [request], None, temperature=temperature)

    assert seeds == [5, draw_seed(5, 1), draw_seed(draw_seed(5, 1), 1)][:used]
    assert turn.text == texts[kept]
