"""The benchmark of a step of GRPO: what it counts is right, and all ways are paid the same."""

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
from training.benchmark.made_up_talk import made_up_reference, made_up_turn, made_up_utterances
from training.benchmark.naive import NaiveScorer
from training.benchmark.shapes import SHAPES, write_random_checkpoint
from training.common import results
from training.grpo import train
from training.grpo.settings import GRPOSettings

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 and trl 1.16 still read a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A list of an untrained policy, and a judge that is an adapter on it."""
    folder = tmp_path_factory.mktemp("models")
    base = build_qwen(folder / "base", max_position_embeddings=4096)
    build_adapter(base, folder / "judge")
    (folder / "models.toml").write_text(
        '[[models]]\nname = "p"\nkind = "policy"\nsource = "base"\nstyle = "trained"\n'
        '[[models]]\nname = "j"\nkind = "judge"\nsource = "base"\nadapter = "judge"\n'
        '[[models]]\nname = "afar"\nkind = "policy"\nsource = "openai:http://localhost:9/v1#m"\n',
        encoding="utf-8",
    )
    return folder / "models.toml"


@pytest.fixture
def config(models, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "load_encoder", lambda *_, **__: WordEncoder())

    def made(**changes) -> Config:
        training = {
            "batch_size": 4,
            "accumulation": 1,
            "group_size": 2,
            "max_new_tokens": 12,
            "precision": "fp32",
            **changes.pop("training", {}),
        }
        known = {"models": models, "utterances": (1, 3), "steps": 2, "output": tmp_path / "out"}
        return Config(training=GRPOSettings(**training), **{**known, **changes})

    return made


def measured(config: Config, folder: Path) -> list[Step]:
    steps, peak, _ = grpo.measured(config, folder, dry_run=False)
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
def test_of_a_shape_each_step_is_done_in_all_ways(config, tmp_path, training, others):
    steps = measured(config(shape="tiny", training=training, **others), tmp_path)

    assert len(steps) == 2  # the one that warms up is not counted
    for step in steps:
        # Made-up turns are complete; a random policy's are not, and spend the budget.
        assert step.complete == 1
        assert 0 < step.tokens <= 4 * 12 and 0 < step.plain_tokens <= 4 * 12
        # Ours reads each prompt once, trl's as often as there are completions for it, padded.
        assert training.get("group_size", 2) * step.read <= step.plain_read
        # Three steps and the reply in two orders, each from the beginning.
        assert step.naive_judge_read > 1.3 * step.judge_read > 0
        assert step.rewards == 4
        if not others:  # in 4 bits rounding may decide between two labels
            assert step.unequal == 0
        parts = (step.rollouts, step.judging, step.reweighting, step.preparing, step.update)
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(step.seconds)
        assert step.naive_judging > 0 and step.plain_rollouts > 0


def test_the_stage_writes_its_results(config, tmp_path):
    grpo.run(config(name="grpo_test", warm_up=0, steps=2, encoder="unused"))

    result = results.load(tmp_path / "out" / "grpo_test.json")
    found = {metric.name: metric for metric in result.metrics}
    assert result.model == "p judged by j"
    assert found["A step"].n == 2
    assert found["Complete turns among what was judged"].value == 0  # an untrained policy's
    assert found["Tokens of prompts read, trl's to ours"].value >= 2
    assert found["Peak resident memory"].value > 0
    shares = [metric.value for name, metric in found.items() if name.endswith("share of the step")]
    assert all(0 <= share <= 100 for share in shares)
    differing = found["Rewards that differ between naive and ours"]
    assert (differing.value, differing.n) == (0, 8)


def test_a_dry_run_measures_nothing(config, tmp_path):
    grpo.run(config(), dry_run=True)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"iterations": 2}}, "a generation in every step"),
        ({"training": {"rollouts": "plain"}}, "a generation in every step"),
        ({"policy": "afar"}, "only a policy with a checkpoint"),
        ({"shape": "qwen2.5-vl-7b"}, "needs a GPU"),
    ],
)
def test_what_cannot_be_timed_is_said_at_once(config, changes, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        grpo.run(config(**changes))


def test_several_processes_are_not_timed(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="times one process"):
        grpo.run(config())


def test_what_another_way_would_take_is_the_step_with_a_part_replaced():
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


def test_a_naive_judge_says_what_ours_says_and_reads_more(models):
    folder = models.parent
    scorer = load_label_scorer(str(folder / "base"), adapter=folder / "judge", pool=ModelPool())
    naive = NaiveScorer(scorer)
    rng = np.random.default_rng(0)
    from compeer_core.dialogue import Dialogue

    dialogue = Dialogue(tuple(made_up_utterances(rng, 5)))
    turns = [made_up_turn(rng) for _ in range(3)]
    references = [made_up_reference(rng) for _ in turns]

    ours = Judge("ours", scorer).judge(dialogue, turns, references)
    other = Judge("naive", naive).judge(dialogue, turns, references)

    assert [one.reward().total for one in ours] == [one.reward().total for one in other]
    for one, two in zip(ours, other, strict=True):
        soft = (one.reward("soft").total, two.reward("soft").total)
        assert soft[0] == pytest.approx(soft[1], abs=1e-4)
    assert naive.work.passes == 5 * len(turns)
    assert naive.work.tokens > scorer.work.tokens
    naive.close()
    scorer.close()


# --- random checkpoints ------------------------------------------------------------------------


def test_a_random_checkpoint_has_the_shape_and_anothers_tokens(models, tmp_path):
    made = write_random_checkpoint(tmp_path / "tiny", "tiny", models.parent / "base")

    held = json.loads((made / "config.json").read_text(encoding="utf-8"))
    like = json.loads((models.parent / "base" / "config.json").read_text(encoding="utf-8"))
    assert held["text_config"]["vocab_size"] == SHAPES["tiny"]["text_config"]["vocab_size"]
    assert held["text_config"]["eos_token_id"] == like["text_config"]["eos_token_id"]
    assert held["image_token_id"] == like["image_token_id"]
    assert held["text_config"]["dtype"] == "bfloat16"


def test_a_disk_without_room_is_refused_before_weights_are_drawn(models, tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 10, 10))
    # The size is counted without the weights: 8.29 thousand million of two bytes.
    with pytest.raises(ConfigError, match=r"qwen2.5-vl-7b take 16.6 GB and the disk has 0.0 GB"):
        write_random_checkpoint(tmp_path / "seven", "qwen2.5-vl-7b", models.parent / "base")


def test_made_up_dialogues_begin_and_end_with_the_seeker(models, tmp_path):
    from training.data.histories import read_histories

    config = Config(models=models, utterances=(1, 4))
    path = grpo.made_up_prompts(tmp_path / "p.jsonl", 20, config)

    histories, left_out = read_histories([path], "train")
    assert {len(one.case.history) for one in histories} == {1, 5}
    assert all(one.case.history[-1].speaker == "seeker" for one in histories)
    assert all(one.case.original for one in histories)
    assert len(histories) == 40 and not left_out


@pytest.mark.parametrize(
    ("file", "shape"),
    [("benchmark_grpo.toml", None), ("qwen/benchmark_grpo.toml", "qwen2.5-vl-7b")],
)
def test_the_configs_take_the_papers_batch_and_say_how_they_are_run(repository, file, shape):
    config = load_toml(repository / "training" / "configs" / file, Config)

    settings = config.training
    assert (settings.batch_size * settings.accumulation, settings.group_size) == (32, 4)
    settings.check_batches(1)
    assert config.shape == shape
    assert config.command == f"python -m training benchmark grpo training/configs/{file}"


def test_the_config_for_this_machine_times_a_step_of_the_recipe(repository):
    folder = repository / "training" / "configs"
    timed = load_toml(folder / "benchmark_grpo.toml", Config).training
    recipe = load_toml(folder / "nano" / "grpo.toml", train.Config).training

    of_the_run = {"lr", "warmup_share", "schedule", "max_steps", "save_steps"}
    assert timed.model_dump(exclude=of_the_run) == recipe.model_dump(exclude=of_the_run)
