"""Policies compared on held-out histories: measures by hand, pairs, and the stage end to end."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compeer_core.errors import ConfigError
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import read
from tests.checkpoints import build_adapter, build_qwen
from tests.training.grpo.world import WordEncoder, judge, record, turn, write_rows
from training.common import results
from training.data.pictures import Pictures
from training.evaluation import grpo
from training.evaluation.grpo import Answer, Config, compared, diversity, surprising
from training.evaluation.likelihood import LikelihoodModel
from training.evaluation.metrics import jackknife
from training.evaluation.plots import TRAINING

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

HISTORIES = [record(n, source_id=f"s{n // 2}", original="a b d") for n in range(4)]


def answer(history: int, reward: float, reply: str = "a b c", seed: int = 0) -> Answer:
    text = turn(reply) if reply else "no turn"
    return Answer(history, seed, read(text), reward, reward / 5, 1.0, reward > 0, None)


def found(metrics: list[results.Metric]) -> dict[tuple[str, str, str], results.Metric]:
    return {(one.of, one.about, one.name): one for one in metrics}


def test_means_and_differences_of_pairs_by_hand():
    sft = [answer(n, reward) for n, reward in enumerate([1.0, 3.0, -5.0, math.nan])]
    urp = [answer(n, reward) for n, reward in enumerate([3.0, 5.0, -3.0, 1.0])]

    table = found(
        compared({"sft": sft, "urp": urp}, HISTORIES, WordEncoder(), {"sft": (), "urp": ("sft",)})
    )

    judge, people, replies = "the judge", "people's labels", "replies"
    assert table["sft", judge, "reward"].value == pytest.approx(-1 / 3)
    assert table["urp", judge, "reward"].value == pytest.approx(1.5)
    assert table["urp less sft", judge, "reward"].value == pytest.approx(1.5 + 1 / 3)
    assert table["sft", judge, "not scorable"].value == 25.0
    assert table["sft", judge, "complete"].value == 100.0
    assert table["sft", people, "strategy"].value == 50.0
    assert table["sft", replies, "ROUGE-L"].value == pytest.approx(100 * 2 / 3)  # "a b" of three
    # runs of one and two words: 2 of 3, and 1 of 2
    assert table["sft", replies, "BLEU-2"].value == pytest.approx(100 * math.sqrt(2 / 3 * 1 / 2))
    assert table["sft", replies, "words"].value == 3
    assert ("sft", replies, "surprise of the first policy") not in table  # it was not asked
    assert table["urp", judge, "reward"].n == 2  # source dialogues
    assert ("sft", people, "emotion") not in table  # nobody said
    assert {of for of, _, _ in table} == {"sft", "urp", "urp less sft"}


def test_a_policy_is_no_different_from_itself():
    given = [answer(n, reward, f"word {n}") for n, reward in enumerate([1.0, 3.0, -5.0, 5.0])]

    table = found(
        compared(
            {"one": given, "other": given}, HISTORIES, WordEncoder(), {"one": (), "other": ("one",)}
        )
    )

    pairs = [metric for (of, _, _), metric in table.items() if of == "other less one"]
    assert len(pairs) >= 8
    assert all(one.value == one.low == one.high == 0 for one in pairs)


def test_diversity_is_taken_within_a_seed_and_without_each_source_by_hand():
    answers = [
        *(answer(0, 1.0, "a b", seed=0), answer(2, 1.0, "a b", seed=0)),
        *(answer(0, 1.0, "c d", seed=1), answer(2, 1.0, "e f", seed=1)),
    ]

    values = diversity(answers, ["s0", "s0", "s1", "s1"], WordEncoder())

    # seed 0: one pair of two; seed 1: two of two. Alone, each reply is all different.
    assert values["distinct-2"].tolist() == pytest.approx([(0.5 + 1.0) / 2, 1.0, 1.0])
    assert values["Vendi score"].tolist() == pytest.approx([(1.0 + 2.0) / 2, 1.0, 1.0])


def test_longer_replies_are_compared_by_as_many_pairs_of_words():
    words = [f"w{n}" for n in range(120)]
    short = " ".join(words[:103])  # 102 pairs, all different
    long = " ".join(words + words)  # 239 pairs, of which 120 are different
    given = {
        name: [answer(n, 1.0, text) for n in (0, 2)] for name, text in [("a", short), ("b", long)]
    }

    table = found(compared(given, HISTORIES, WordEncoder(), {"a": (), "b": ("a",)}))

    assert table["a", "variety", "distinct-2"].value == pytest.approx(0.5)
    assert table["b", "variety", "distinct-2"].value == pytest.approx(120 / 478)
    assert table["a", "variety", "distinct-2 of 100 pairs"].n == 2
    # each of 102 kinds is there twice among 204: missed by a draw of 100 with 104 103 / (204 203)
    missed = 104 * 103 / (204 * 203)
    assert table["a", "variety", "distinct-2 of 100 pairs"].value == pytest.approx(
        102 * (1 - missed) / 100
    )
    # 119 kinds are there four times among 478, and "w119 w0" twice
    of_four, of_two = (math.comb(478 - times, 100) / math.comb(478, 100) for times in (4, 2))
    assert table["b", "variety", "distinct-2 of 100 pairs"].value == pytest.approx(
        (119 * (1 - of_four) + (1 - of_two)) / 100
    )


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.array([1.0, 4.0, 2.0, 7.0])
    without = [np.delete(values, place).mean() for place in range(4)]

    interval = jackknife(np.array([values.mean(), *without]), 4)

    error = values.std(ddof=1) / math.sqrt(4)
    assert interval.value == 3.5
    assert interval.high - interval.value == pytest.approx(1.96 * error)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    policy = build_qwen(tmp_path / "policy")
    build_adapter(policy, tmp_path / "adapter")
    write_rows(tmp_path / "test.jsonl", 3, "test")
    return Config(
        policies=(
            {"name": "sft", "source": str(policy)},
            {"name": "urp", "source": str(policy), "adapter": tmp_path / "adapter"},
        ),
        judge={"source": "words"},
        histories=(tmp_path / "test.jsonl",),
        seeds=(0, 1),
        max_new_tokens=8,
        at_once=3,
        folder=tmp_path / "run",
        output=tmp_path / "results",
        device="cpu",
    )


def test_the_stage_writes_turns_a_table_and_a_plot(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.JudgeSource, "load", lambda source: judge())
    monkeypatch.setattr(grpo, "load_encoder", lambda source: WordEncoder())

    grpo.run(config)

    def texts(name: str) -> list[str]:
        path = tmp_path / "run" / f"turns.{name}.jsonl"
        return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]

    before = texts("sft")
    assert len(before) == 6 and len({*before}) > 3
    assert before != texts("urp")
    result = results.load(tmp_path / "results" / "grpo_nano.json")
    table = found(list(result.metrics))
    # an untrained model writes no whole turn
    assert table["sft", "the judge", "reward"].value == -5.0
    assert table["sft", "the judge", "complete"].value == 0.0
    assert table["urp less sft", "the judge", "reward"].value == 0.0
    assert table["sft", "people's labels", "emotion"].value == 0.0
    assert ("sft", "replies", "surprise of the first policy") not in table
    assert (tmp_path / "run" / "reward.png").is_file()
    table = (tmp_path / "run" / "table.md").read_text(encoding="utf-8")
    assert "| Question | Policy |" in table
    grpo.run(config)
    assert texts("sft") == before
    assert not (tmp_path / "run" / "answers").exists()


def test_the_first_policy_is_surprised_by_another_reply_as_its_likelihood_says(config):
    histories = [record(0)]
    text = turn("a good day")
    whole = Answer(0, 0, read(text), 1.0, 1.0, 1.0, None, None)
    broken = replace(whole, reading=read("nothing"))

    found = surprising({"urp": [whole, broken]}, histories, Pictures(None, None), config)

    model = LikelihoodModel(config.policies[0].source)
    messages = policy_messages(histories[0].case.dialogue(), "trained")
    expected = model.surprise(messages, text)
    assert found["urp"][0].surprise == expected.reply_loss / expected.reply_tokens
    assert found["urp"][0].surprise > 1  # an untrained model expects nothing
    assert math.isnan(found["urp"][1].surprise)
    assert found["urp"][0].reading is whole.reading


def test_a_dry_run_writes_nothing_and_names_must_differ(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.JudgeSource, "load", lambda source: judge())
    monkeypatch.setattr(grpo, "load_encoder", lambda source: WordEncoder())

    grpo.run(config, dry_run=True)

    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="begin it again"):
        grpo.run(config, resume=tmp_path)
    with pytest.raises(ValueError, match="two policies have one name: sft, sft"):
        Config.model_validate(
            config.model_dump() | {"policies": [config.policies[0], config.policies[0]]}
        )
    with pytest.raises(ValueError, match="names 'ur'; the others are sft"):
        Config.model_validate(
            config.model_dump()
            | {"policies": [config.policies[0], {**dict(config.policies[1]), "against": ["ur"]}]}
        )


def test_training_is_drawn_beside_that_of_others(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.JudgeSource, "load", lambda source: judge())
    monkeypatch.setattr(grpo, "load_encoder", lambda source: WordEncoder())
    log = tmp_path / "metrics.jsonl"
    step = dict.fromkeys(TRAINING, 0.5)
    rows = [{"step": n, **step} for n in (1, 2, 6)]
    log.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"loss": 1}]), "utf-8")
    sft, urp = (dict(policy) for policy in config.policies)
    drawn = Config.model_validate(
        config.model_dump() | {"policies": [sft, {**urp, "metrics": log}]}
    )

    grpo.run(drawn)

    assert (tmp_path / "run" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert grpo.metrics_of_training(drawn) == {"urp": [rows]}
    log.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is not there, or holds no steps"):
        grpo.run(drawn)


def test_runs_of_one_policy_answer_from_the_seeds_of_their_training(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.JudgeSource, "load", lambda source: judge())
    monkeypatch.setattr(grpo, "load_encoder", lambda source: WordEncoder())
    sft, urp = (dict(policy) for policy in config.policies)
    policy = Path(sft["source"])
    build_adapter(policy, tmp_path / "run0")
    build_adapter(policy, tmp_path / "run1", seed=2)
    runs = {**urp, "adapter": tmp_path / "run{seed}"}
    alone = {**urp, "name": "alone", "adapter": tmp_path / "run1"}
    three = Config.model_validate(config.model_dump() | {"policies": [sft, runs, alone]})

    grpo.run(three)

    assert three.pairs == {"sft": (), "urp": ("sft",), "alone": ("sft",)}
    together, second = rows_of(tmp_path, "urp"), rows_of(tmp_path, "alone")
    assert together[1] == second[1]
    assert len(together[0]) == 3 and together[0] != second[0]
    result = results.load(tmp_path / "results" / "grpo_nano.json")
    of_runs = [one for one in result.metrics if one.about == "reward of each run"]
    assert [(one.of, one.name, one.value) for one in of_runs] == [
        ("urp", "seed 0", -5.0),
        ("urp", "seed 1", -5.0),
    ]


def rows_of(folder: Path, name: str) -> dict[int, list[str]]:
    """Return the turns of a policy by their seed."""
    path = folder / "run" / f"turns.{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {seed: [row["text"] for row in rows if row["seed"] == seed] for seed in (0, 1)}
