"""The recipes of the paper's variants: they load, and differ in what the paper says they differ in."""

from pathlib import Path
from typing import Any

import pytest

from compeer_core.config import load_toml
from training import recipe
from training.evaluation.grpo import Config as Evaluation
from training.grpo.train import Config


@pytest.fixture
def planned(repository: Path) -> Any:
    def of(name: str) -> list[Any]:
        folder = repository / "training" / "configs" / "nano"
        config = load_toml(folder / f"{name}.toml", recipe.Config)
        config = config.model_copy(update={"folder": folder})
        return [
            (step.name, recipe._plan(config, number, step)[2])
            for number, step in enumerate(config.stage, start=1)
        ]

    return of


@pytest.mark.parametrize(
    ("name", "kinds", "form", "rewritten"),
    [
        ("ur", ["unified"], "off", False),
        ("por", ["process", "outcome"], "off", False),
        ("urp", ["unified"], "signed", True),
    ],
)
def test_a_variant_goes_from_the_corpora_to_its_checkpoint(planned, name, kinds, form, rewritten):
    stages = planned(name)

    names = [stage for stage, _ in stages]
    assert names == [
        "tokenizer",
        "pretrain",
        "vision",
        "sft",
        "cer",
        *["reward"] * len(kinds),
        *("pretrain", "vision", "sft dialogues"),
        "grpo",
    ]
    settings = dict(stages[:5])
    policy = dict(stages[-4:-1])
    judges = [config for stage, config in stages if stage == "reward"]
    last = stages[-1][1]
    assert isinstance(last, Config)
    assert [judge.kind for judge in judges] == kinds
    assert last.reweighting.form == form
    assert bool(last.rewritten) == rewritten
    # each stage reads what one before it wrote
    assert policy["vision"].model == policy["pretrain"].output / "model"
    assert policy["sft dialogues"].base == policy["vision"].output
    assert Path(last.base) == policy["sft dialogues"].output / "model"
    assert last.prompts == (policy["sft dialogues"].output / "samples.train.jsonl",)
    asked = [last.judge.source, last.judge.reply_source]
    assert [source for source in asked if source] == [
        str(judge.output / "model") for judge in judges
    ]
    assert all(Path(judge.base) == settings["sft"].output / "model" for judge in judges)
    assert settings["cer"].mixing is not None
    for judge in judges:
        silver = settings["cer"].output
        rows = (silver / "train.jsonl", silver / "train.jsonl", silver / "mixed.jsonl")
        assert judge.records[:3] == rows
    assert last.output == Path("runs/nano") / name
    last.training.check_batches(1)


def test_variants_share_the_stages_before_the_judge_and_the_policy(planned):
    plans = [planned(name) for name in ("ur", "por", "urp")]
    first, *others = ([*stages[:5], *stages[-4:-1]] for stages in plans)

    assert all(other == first for other in others)
    # and that policy is the one that is shipped: what is done for one is not done again for the other
    assert first[5:] == planned("full")[1:4]
    assert first[0] == planned("full")[0]


def test_the_evaluation_compares_what_the_recipes_make(repository, planned):
    path = repository / "training" / "configs" / "nano" / "evaluate_grpo.toml"
    config = load_toml(path, Evaluation)

    made = {name: planned(name)[-1][1].output / "model" for name in ("por", "ur", "urp")}
    assert {one.name: Path(one.source) for one in config.policies[1:]} == made
    assert Path(config.policies[0].source) == planned("ur")[-2][1].output / "model"
