"""The GRPO benchmark: correct counts, and equal rewards from all methods."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from compeer_core.model_pool import ModelPool, load_label_scorer
from compeer_core.unifireward import Judge
from tests.checkpoints import build_adapter, build_qwen
from tests.training.grpo.world import WordEncoder
from training.benchmark import grpo
from training.benchmark.grpo import Config, Step
from training.benchmark.naive_scoring import NaiveScorer
from training.benchmark.random_checkpoints import SHAPES, write_random_checkpoint
from training.benchmark.synthetic_dialogues import (
    synthetic_reference,
    synthetic_turn,
    synthetic_utterances,
)
from training.common import results
from training.grpo import train
from training.grpo.settings import GRPOSettings

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 and trl 1.16 still read a property that transformers 5.23 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A list with an untrained policy, a judge that is an adapter on it, and a remote policy."""
    folder = tmp_path_factory.mktemp("models")
    base = build_qwen(folder / "base", max_position_embeddings=4096)
    build_adapter(base, folder / "judge")
    (folder / "models.toml").write_text(
        '[[models]]\nname = "p"\nkind = "policy"\nsource = "base"\nstyle = "trained"\n'
        '[[models]]\nname = "j"\nkind = "judge"\nsource = "base"\nadapter = "judge"\n'
        '[[models]]\nname = "remote"\nkind = "policy"\nsource = "openai:http://localhost:9/v1#m"\n',
        encoding="utf-8",
    )
    return folder / "models.toml"


@pytest.fixture
def config(models, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "load_encoder", lambda *_, **__: WordEncoder())

    def build(**changes) -> Config:
        training = {
            "batch_size": 4,
            "accumulation": 1,
            "group_size": 2,
            "max_new_tokens": 12,
            "precision": "fp32",
            **changes.pop("training", {}),
        }
        defaults = {"models": models, "utterances": (1, 3), "steps": 1, "output": tmp_path / "out"}
        return Config(training=GRPOSettings(**training), **{**defaults, **changes})

    return build


def measure(config: Config, folder: Path) -> list[Step]:
    steps, peak, _ = grpo.measure_run(config, folder, dry_run=False)
    assert peak > 2**20
    return steps


LORA = {"rank": 4}


@pytest.mark.parametrize(
    ("training", "others"),
    [
        ({}, {}),
        ({"lora": LORA, "weights": "bf16", "precision": "bf16", "group_size": 4}, {}),
        ({"lora": LORA, "weights": "bf16", "quantize": "4bit"}, {"judge_quantize": "4bit"}),
        ({"lora": LORA, "rollout_weights": "bf16", "update": "shared"}, {}),
    ],
    ids=["whole", "LoRA in bf16", "QLoRA", "LoRA and a copy"],
)
def test_each_step_runs_all_methods(config, tmp_path, training, others):
    steps = measure(config(shape="tiny", training=training, **others), tmp_path)

    assert len(steps) == 1  # the warm-up step is not counted
    for step in steps:
        # Synthetic turns are complete; a random policy uses up its token budget.
        assert step.complete == 1
        assert 0 < step.tokens <= 4 * 12 and 0 < step.plain_tokens <= 4 * 12
        # Ours prefills each prompt once, trl once per completion, with padding.
        assert training.get("group_size", 2) * step.read <= step.plain_read
        # Three steps and the reply in two orders, each processed from the beginning.
        assert step.naive_judge_read > 1.3 * step.judge_read > 0
        assert step.rewards == 4
        if not others:  # at 4 bits, rounding may change a verdict
            assert step.unequal == 0
        parts = (step.rollouts, step.judging, step.reweighting, step.preparing, step.update)
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(step.seconds)
        assert step.naive_judging > 0 and step.plain_rollouts > 0


def test_stage_writes_its_results(config, tmp_path):
    grpo.run(config(name="grpo_test", warm_up=0, steps=2, encoder="unused"))

    result = results.load(tmp_path / "out" / "grpo_test.json")
    metrics = {metric.name: metric for metric in result.metrics}
    assert result.model == "p judged by j"
    assert metrics["A step"].n == 2
    assert metrics["Complete turns among those judged"].value == 0  # an untrained policy's
    assert metrics["Tokens of prompts read, trl's to ours"].value >= 2
    assert metrics["Peak resident memory"].value > 0
    shares = [
        metric.value for name, metric in metrics.items() if name.endswith("share of the step")
    ]
    assert all(0 <= share <= 100 for share in shares)
    differing = metrics["Rewards that differ between naive and ours"]
    assert (differing.value, differing.n) == (0, 8)


def test_dry_run_measures_nothing(config, tmp_path):
    grpo.run(config(), dry_run=True)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"iterations": 2}}, "a generation in every step"),
        ({"training": {"rollouts": "plain"}}, "a generation in every step"),
        ({"policy": "remote"}, "only a policy with a checkpoint"),
        ({"shape": "qwen2.5-vl-7b"}, "needs a GPU"),
    ],
)
def test_rejects_unsupported_configs(config, changes, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        grpo.run(config(**changes))


def test_rejects_several_processes(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="runs in one process"):
        grpo.run(config())


def test_alternatives_replace_one_part_of_the_step():
    step = Step(
        seconds=10,
        rollouts=3,
        judging=1,
        reweighting=0.5,
        preparing=0.5,
        naive_judging=4,
        plain_rollouts=7,
    )

    assert step.update == 5
    assert step.rewarding_share == pytest.approx(0.15)
    assert step.with_naive_reward == 13
    assert step.with_plain_rollouts == 14


def test_naive_judge_agrees_with_ours_and_reads_more(models):
    folder = models.parent
    scorer = load_label_scorer(str(folder / "base"), adapter=folder / "judge", pool=ModelPool())
    naive = NaiveScorer(scorer)
    rng = np.random.default_rng(0)
    from compeer_core.dialogue import Dialogue

    dialogue = Dialogue(tuple(synthetic_utterances(rng, 5)))
    turns = [synthetic_turn(rng) for _ in range(3)]
    references = [synthetic_reference(rng) for _ in turns]

    ours = Judge("ours", scorer).judge(dialogue, turns, references)
    other = Judge("naive", naive).judge(dialogue, turns, references)

    for first, second in zip(ours, other, strict=True):
        assert first.reward().total == second.reward().total
        assert first.reward("soft").total == pytest.approx(second.reward("soft").total, abs=1e-4)
    assert naive.work.passes == 5 * len(turns)
    assert naive.work.tokens > scorer.work.tokens
    naive.close()
    scorer.close()


# --- random checkpoints ------------------------------------------------------------------------


def test_random_checkpoint_has_the_shape_and_the_given_tokenizer(models, tmp_path):
    folder = write_random_checkpoint(tmp_path / "tiny", "tiny", models.parent / "base")

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    like = json.loads((models.parent / "base" / "config.json").read_text(encoding="utf-8"))
    assert config["text_config"]["vocab_size"] == SHAPES["tiny"]["text_config"]["vocab_size"]
    assert config["text_config"]["eos_token_id"] == like["text_config"]["eos_token_id"]
    assert config["image_token_id"] == like["image_token_id"]
    assert config["text_config"]["dtype"] == "bfloat16"


def test_checks_the_disk_space_before_creating_weights(models, tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 10, 10))
    # The size is computed without creating weights: 8.29 billion of two bytes.
    with pytest.raises(ConfigError, match=r"needs 16.6 GB of disk space, only 0.0 GB are free"):
        write_random_checkpoint(tmp_path / "seven", "qwen2.5-vl-7b", models.parent / "base")


def test_synthetic_dialogues_start_and_end_with_the_seeker(models, tmp_path):
    from training.data.histories import read_histories

    config = Config(models=models, utterances=(1, 4))
    path = grpo.write_synthetic_prompts(tmp_path / "p.jsonl", 20, config)

    histories, left_out = read_histories([path], "train")
    assert {len(row.case.history) for row in histories} == {1, 5}
    assert all(row.case.history[-1].speaker == "seeker" for row in histories)
    assert all(row.case.original for row in histories)
    assert len(histories) == 40 and not left_out


@pytest.mark.parametrize(
    ("file", "shape"),
    [("benchmark_grpo.toml", None), ("qwen/benchmark_grpo.toml", "qwen2.5-vl-7b")],
)
def test_configs_use_the_papers_batch_and_record_their_command(repository, file, shape):
    config = load_toml(repository / "training" / "configs" / file, Config)

    settings = config.training
    assert (settings.batch_size * settings.accumulation, settings.group_size) == (32, 4)
    settings.check_batches(1)
    assert config.shape == shape
    assert config.command == f"python -m training benchmark grpo training/configs/{file}"


def test_cpu_config_times_a_step_of_the_recipe(repository):
    folder = repository / "training" / "configs"
    timed = load_toml(folder / "benchmark_grpo.toml", Config).training
    recipe = load_toml(folder / "small" / "grpo.toml", train.Config).training

    irrelevant = {"adapter", "lr", "warmup_share", "schedule", "max_steps", "save_steps"}
    assert timed.model_dump(exclude=irrelevant) == recipe.model_dump(exclude=irrelevant)
