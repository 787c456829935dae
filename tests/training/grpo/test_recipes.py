"""The recipes of the paper's variants: they load, and differ in what the paper says they differ in."""

from pathlib import Path
from typing import Any

import pytest

from compeer_core.config import load_toml
from training import recipe
from training.evaluation.grpo import Config as Evaluation
from training.finetune.merge import Config as Merge
from training.grpo.train import Config
from training.reward_model.train import Config as Reward
from training.sft.cer import Config as Supervised
from training.vision.train import READINGS


@pytest.fixture
def planned(repository: Path) -> Any:
    def of(name: str, size: str = "nano") -> list[Any]:
        folder = repository / "training" / "configs" / size
        config = load_toml(folder / f"{name}.toml", recipe.Config)
        config = config.model_copy(update={"folder": folder})
        return [
            (step.name, recipe._plan(config, number, step)[2])
            for number, step in enumerate(config.stage, start=1)
        ]

    return of


@pytest.mark.parametrize(
    ("name", "kinds", "form"),
    [
        ("ur", ["unified"], "off"),
        ("por", ["process", "outcome"], "off"),
        ("urp", ["unified"], "signed"),
    ],
)
def test_a_variant_goes_from_the_corpora_to_its_checkpoint(planned, name, kinds, form):
    stages = planned(name)

    names = [stage for stage, _ in stages]
    assert names == [
        "tokenizer",
        "pretrain",
        *("vision", "cer rules", "sft cer", "cer"),
        *["reward"] * len(kinds),
        *("pretrain", "vision teacher", "vision", "cer rules", "sft dialogues"),
        *["grpo"] * 3,
    ]
    settings = dict(stages[:6])
    policy = dict(stages[-8:-3])
    supervised = policy["sft dialogues"]
    judges = [config for stage, config in stages if stage == "reward"]
    runs = [config for stage, config in stages if stage == "grpo"]
    last = runs[-1]
    assert isinstance(last, Config)
    assert [run.training.seed for run in runs] == [0, 1, 2]
    assert len({run.output for run in runs}) == 3
    # but for the seed they are one
    alike = [
        run.model_copy(update={"output": last.output, "training": last.training}) for run in runs
    ]
    assert all(run == last for run in alike)
    assert [judge.kind for judge in judges] == kinds
    assert last.reweighting.form == form
    # each stage reads what one before it wrote
    assert policy["vision"].model == policy["pretrain"].output / "model"
    assert policy["vision"].teacher == policy["vision teacher"].output
    assert policy["cer rules"].readings == policy["vision"].output / READINGS
    assert supervised.base == policy["vision"].output / "model"
    assert Path(last.base) == supervised.output / "model"
    assert last.prompts == supervised.records == (policy["cer rules"].output / "rows.jsonl",)
    assert settings["sft cer"].records == (settings["cer rules"].output / "rows.jsonl",)
    asked = [last.judge.source, last.judge.reply_source]
    assert [source for source in asked if source] == [
        str(judge.output / "model") for judge in judges
    ]
    assert all(Path(judge.base) == settings["sft cer"].output / "model" for judge in judges)
    assert settings["cer"].mixing is not None
    for judge in judges:
        silver = settings["cer"].output
        rows = (silver / "train.jsonl", silver / "train.jsonl", silver / "mixed.jsonl")
        assert judge.records[:3] == rows
    assert last.output == Path("runs/nano") / name / "seed2"
    last.training.check_batches(1)


def test_variants_share_the_stages_before_the_judge_and_the_policy(planned):
    plans = [planned(name) for name in ("ur", "por", "urp")]
    first, *others = ([*stages[:6], *stages[-8:-3]] for stages in plans)

    assert all(other == first for other in others)
    # and that policy is the one that is shipped: what is done for one is not done again for the other
    assert first[6:] == planned("full")[1:6]
    assert first[0] == planned("full")[0]


def test_the_evaluation_compares_what_the_recipes_make(repository, planned):
    path = repository / "training" / "configs" / "nano" / "evaluate_grpo.toml"
    config = load_toml(path, Evaluation)

    first, *others = config.policies
    for policy in others:
        runs = [one for one, _ in policy.runs(config.seeds)]
        made = [settings for stage, settings in planned(policy.name) if stage == "grpo"]
        assert [run.adapter for run in runs] == [one.output / "adapter" for one in made]
        assert [run.metrics for run in runs] == [one.output / "metrics.jsonl" for one in made]
        assert {run.source for run in runs} == {str(one.base) for one in made}
        assert config.seeds == tuple(one.training.seed for one in made)
    assert [policy.name for policy in others] == ["por", "ur", "urp"]
    assert first.source == str(made[-1].base)
    assert config.pairs["por"] == ("sft",)
    assert config.pairs["ur"] == ("sft", "por")
    assert config.pairs["urp"] == ("sft", "ur")
    assert config.judge.source == planned("ur")[-1][1].judge.source


@pytest.mark.parametrize(
    ("name", "kinds", "form"),
    [
        ("ur", ["unified"], "off"),
        ("por", ["process", "outcome"], "off"),
        ("urp", ["unified"], "signed"),
    ],
)
def test_a_variant_at_7b_goes_from_the_corpora_to_its_adapter(planned, name, kinds, form):
    stages = planned(name, "qwen")

    names = [stage for stage, _ in stages]
    assert names == ["cer", "sft cer", "merge", *["reward"] * len(kinds), "grpo"]
    (_, cer), (_, sft), (_, merge), *_, (_, last) = stages
    judges = [config for stage, config in stages if stage == "reward"]
    assert [judge.kind for judge in judges] == kinds
    assert last.reweighting.form == form
    assert last.output == Path("runs/qwen") / name
    # each stage reads what one before it wrote
    rows = cer.output / "train.jsonl"
    assert all(of.records == (rows,) for of in (sft, *judges)) and last.prompts == (rows,)
    assert sft.training.lora is not None
    assert (merge.base, merge.adapter) == (sft.base, sft.output / "adapter")
    assert Path(last.base) == merge.output
    asked = [(last.judge.source, last.judge.adapter)]
    if last.judge.reply_source:
        asked.append((last.judge.reply_source, last.judge.reply_adapter))
    assert asked == [(f"hf:{judge.base}", judge.output / "adapter") for judge in judges]


@pytest.mark.parametrize(("name", "processes"), [("full", 8), ("lora", 1), ("qlora", 1)])
def test_sft_at_7b_begins_as_the_judge_does_and_ends_where_grpo_begins(repository, name, processes):
    folder = repository / "training" / "configs" / "qwen"
    sft = load_toml(folder / f"sft_cer_{name}.toml", Supervised)
    judge = load_toml(folder / f"reward_{name}.toml", Reward)
    merge = load_toml(folder / "merge_sft.toml", Merge)
    policy = load_toml(folder / f"grpo_{name}.toml", Config)

    assert (sft.base, sft.records) == (judge.base, judge.records)
    assert sft.training.batch_size * sft.training.accumulation * processes == 64
    assert (sft.training.lora is None) == (judge.training.lora is None)
    made = sft.output / "model"
    assert made == merge.output and made == Path(policy.base)
