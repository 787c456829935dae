"""The recipes of the paper's variants: they load, and differ in what the paper says they differ in."""

from pathlib import Path
from typing import Any

import pytest

from compeer_core.config import load_toml
from training import recipe
from training.finetune.merge import Config as Merge
from training.grpo.train import Config
from training.reward_model.train import Config as Reward
from training.sft.cer import Config as Supervised


@pytest.fixture
def planned(repository: Path) -> Any:
    def of(name: str) -> list[Any]:
        folder = repository / "training" / "configs" / "qwen"
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
def test_a_variant_goes_from_the_corpora_to_its_adapter(planned, name, kinds, form):
    stages = planned(name)

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
