"""Comparison of policies on held-out histories: measures by hand, and the stage end to end."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from compeer_core.errors import ConfigError
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import read
from tests.checkpoints import build_adapter, build_qwen
from tests.training.grpo.world import WordEncoder, judge, record, turn, write_rows
from training.common import results
from training.data.pictures import Pictures
from training.evaluation import grpo
from training.evaluation.grpo import (
    Answer,
    Config,
    comparison_metrics,
    diversity,
    with_reply_nll,
)
from training.evaluation.likelihood import LikelihoodModel
from training.evaluation.plots import TRAINING

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

HISTORIES = [record(n, source_id=f"s{n // 2}", original="a b d") for n in range(4)]


def answer(history: int, reward: float, reply: str = "a b c", seed: int = 0) -> Answer:
    text = turn(reply) if reply else "no turn"
    return Answer(history, seed, read(text), reward, reward / 5, 1.0, reward > 0, None)


def by_key(metrics: list[results.Metric]) -> dict[tuple[str, str, str], results.Metric]:
    return {(metric.label, metric.about, metric.name): metric for metric in metrics}


def test_means_and_paired_differences_by_hand():
    sft = [answer(n, reward) for n, reward in enumerate([1.0, 3.0, -5.0, math.nan])]
    urp = [answer(n, reward) for n, reward in enumerate([3.0, 5.0, -3.0, 1.0])]

    table = by_key(
        comparison_metrics(
            {"sft": sft, "urp": urp}, HISTORIES, WordEncoder(), {"sft": (), "urp": ("sft",)}
        )
    )

    judge, people, replies = "the judge", "people's labels", "replies"
    assert table["sft", judge, "reward"].value == pytest.approx(-1 / 3)
    assert table["urp", judge, "reward"].value == pytest.approx(1.5)
    assert table["difference (urp - sft)", judge, "reward"].value == pytest.approx(1.5 + 1 / 3)
    assert table["sft", judge, "unscorable"].value == 25.0
    assert table["sft", judge, "complete"].value == 100.0
    assert table["sft", people, "strategy"].value == 50.0
    assert table["sft", replies, "ROUGE-L"].value == pytest.approx(100 * 2 / 3)  # "a b" of three
    # unigrams 2 of 3, bigrams 1 of 2
    assert table["sft", replies, "BLEU-2"].value == pytest.approx(100 * math.sqrt(2 / 3 * 1 / 2))
    assert table["sft", replies, "words"].value == 3
    assert ("sft", replies, "NLL under the SFT policy, nats/token") not in table  # not computed
    assert table["urp", judge, "reward"].n == 2  # source dialogues
    assert ("sft", people, "emotion") not in table  # no labels
    assert {of for of, _, _ in table} == {"sft", "urp", "difference (urp - sft)"}


def test_difference_of_a_policy_to_itself_is_zero():
    given = [answer(n, reward, f"word {n}") for n, reward in enumerate([1.0, 3.0, -5.0, 5.0])]

    table = by_key(
        comparison_metrics(
            {"one": given, "other": given}, HISTORIES, WordEncoder(), {"one": (), "other": ("one",)}
        )
    )

    pairs = [metric for (of, _, _), metric in table.items() if of == "difference (other - one)"]
    assert len(pairs) >= 8
    assert all(metric.value == metric.low == metric.high == 0 for metric in pairs)


def test_diversity_within_seeds_and_without_each_source_by_hand():
    answers = [
        *(answer(0, 1.0, "a b", seed=0), answer(2, 1.0, "a b", seed=0)),
        *(answer(0, 1.0, "c d", seed=1), answer(2, 1.0, "e f", seed=1)),
    ]

    values = diversity(answers, ["s0", "s0", "s1", "s1"], WordEncoder())

    # seed 0: one of two bigrams is distinct; seed 1: both. A single reply has only distinct ones.
    assert values["distinct-2"].tolist() == pytest.approx([(0.5 + 1.0) / 2, 1.0, 1.0])
    assert values["Vendi score"].tolist() == pytest.approx([(1.0 + 2.0) / 2, 1.0, 1.0])


def test_distinct_2_at_an_equal_number_of_bigrams():
    words = [f"w{n}" for n in range(120)]
    short = " ".join(words[:103])  # 102 bigrams, all distinct
    long = " ".join(words + words)  # 239 bigrams, 120 distinct
    given = {
        name: [answer(n, 1.0, text) for n in (0, 2)] for name, text in [("a", short), ("b", long)]
    }

    table = by_key(comparison_metrics(given, HISTORIES, WordEncoder(), {"a": (), "b": ("a",)}))

    assert table["a", "variety", "distinct-2"].value == pytest.approx(0.5)
    assert table["b", "variety", "distinct-2"].value == pytest.approx(120 / 478)
    assert table["a", "variety", "distinct-2 of 100 pairs"].n == 2
    # each of 102 bigrams occurs twice among 204; probability of none in a sample of 100
    missed = 104 * 103 / (204 * 203)
    assert table["a", "variety", "distinct-2 of 100 pairs"].value == pytest.approx(
        102 * (1 - missed) / 100
    )
    # 119 bigrams occur four times among 478, "w119 w0" twice
    of_four, of_two = (math.comb(478 - times, 100) / math.comb(478, 100) for times in (4, 2))
    assert table["b", "variety", "distinct-2 of 100 pairs"].value == pytest.approx(
        (119 * (1 - of_four) + (1 - of_two)) / 100
    )


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


@pytest.mark.usefixtures("drawn_plots")
def test_stage_writes_turns_table_and_plot(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.JudgeSource, "load", lambda source: judge())
    monkeypatch.setattr(grpo, "load_encoder", lambda source: WordEncoder())

    grpo.run(config)

    def texts(name: str) -> list[str]:
        path = tmp_path / "run" / f"turns.{name}.jsonl"
        return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]

    before = texts("sft")
    assert len(before) == 6 and len({*before}) > 3
    assert before != texts("urp")
    result = results.load(tmp_path / "results" / "grpo.json")
    table = by_key(list(result.metrics))
    # an untrained model writes no complete turn
    assert table["sft", "the judge", "reward"].value == -5.0
    assert table["sft", "the judge", "complete"].value == 0.0
    assert table["difference (urp - sft)", "the judge", "reward"].value == 0.0
    assert table["sft", "people's labels", "emotion"].value == 0.0
    assert ("sft", "replies", "NLL under the SFT policy, nats/token") not in table
    assert (tmp_path / "run" / "reward.png").is_file()
    table = (tmp_path / "run" / "table.md").read_text(encoding="utf-8")
    assert "| Question | Policy |" in table
    grpo.run(config)
    assert texts("sft") == before
    assert not (tmp_path / "run" / "answers").exists()


def test_reply_nll_is_the_likelihood_under_the_first_policy(config):
    histories = [record(0)]
    text = turn("a good day")
    complete = Answer(0, 0, read(text), 1.0, 1.0, 1.0, None, None)
    malformed = replace(complete, reading=read("nothing"))

    first, second = with_reply_nll(
        {"urp": [complete, malformed]}, histories, Pictures(None, None), config
    )["urp"]

    model = LikelihoodModel(config.policies[0].source)
    messages = policy_messages(histories[0].case.dialogue(), "trained")
    expected = model.score(messages, text)
    assert first.reply_nll == expected.reply_loss / expected.reply_tokens
    assert first.reply_nll > 1  # the model is untrained
    assert math.isnan(second.reply_nll)
    assert first.reading is complete.reading


def test_dry_run_writes_nothing_and_names_must_differ(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.JudgeSource, "load", lambda source: judge())
    monkeypatch.setattr(grpo, "load_encoder", lambda source: WordEncoder())

    grpo.run(config, dry_run=True)

    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="leave out --resume"):
        grpo.run(config, resume=tmp_path)
    with pytest.raises(ValueError, match="two policies have the same name: sft, sft"):
        Config.model_validate(
            config.model_dump() | {"policies": [config.policies[0], config.policies[0]]}
        )
    with pytest.raises(ValueError, match="names 'ur'; the others are sft"):
        Config.model_validate(
            config.model_dump()
            | {"policies": [config.policies[0], {**dict(config.policies[1]), "against": ["ur"]}]}
        )


@pytest.mark.usefixtures("drawn_plots")
def test_training_curves_are_plotted(config, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo.JudgeSource, "load", lambda source: judge())
    monkeypatch.setattr(grpo, "load_encoder", lambda source: WordEncoder())
    log = tmp_path / "metrics.jsonl"
    step = dict.fromkeys(TRAINING, 0.5)
    rows = [{"step": n, **step} for n in (1, 2, 6)]
    log.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"loss": 1}]), "utf-8")
    sft, urp = (dict(policy) for policy in config.policies)
    plotted = Config.model_validate(
        config.model_dump() | {"policies": [sft, {**urp, "metrics": log}]}
    )

    grpo.run(plotted)

    assert (tmp_path / "run" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert grpo.training_metrics(plotted) == {"urp": [rows]}
    log.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing or has no GRPO steps"):
        grpo.run(plotted)


def test_training_runs_answer_with_their_own_seeds(config, tmp_path, monkeypatch):
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
    both_runs, second_run = rows_of(tmp_path, "urp"), rows_of(tmp_path, "alone")
    assert both_runs[1] == second_run[1]
    assert len(both_runs[0]) == 3 and both_runs[0] != second_run[0]
    result = results.load(tmp_path / "results" / "grpo.json")
    runs = [metric for metric in result.metrics if metric.about == "reward of each run"]
    assert [(metric.of, metric.name, metric.value) for metric in runs] == [
        ("urp", "seed 0", -5.0),
        ("urp", "seed 1", -5.0),
    ]


def rows_of(folder: Path, name: str) -> dict[int, list[str]]:
    """Return the turns of a policy by seed."""
    path = folder / "run" / f"turns.{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {seed: [row["text"] for row in rows if row["seed"] == seed] for seed in (0, 1)}
