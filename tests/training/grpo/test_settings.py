"""Settings: the paper's numbers are the defaults, and what cannot work is refused with a way out."""

import pytest

from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from compeer_core.redundancy import Settings as Reweighting
from training.common.judge_source import JudgeSource
from training.grpo.settings import GRPOSettings
from training.grpo.train import Config


def test_the_papers_numbers_are_the_defaults():
    settings, reweighting = GRPOSettings(), Reweighting()

    assert settings.lr == 1e-6
    assert settings.batch_size * settings.accumulation == 32
    assert settings.group_size == 4
    assert (reweighting.alpha, reweighting.beta) == (0.5, 5.0)
    assert (settings.loss, settings.kl, settings.scale) == ("grpo", 0.0, "group")
    settings.check_batches(1)


@pytest.mark.parametrize(
    ("changes", "processes", "says"),
    [
        ({"batch_size": 3, "accumulation": 2}, 1, r"completions splits a group of 4"),
        ({"batch_size": 1, "accumulation": 1}, 6, r"x 6 processes = 6 completions splits"),
        ({"save_steps": 3, "iterations": 2}, 1, r"save_steps = 3 falls between .* use 4"),
        ({"save_steps": 5, "generation_steps": 2, "iterations": 2}, 1, r"every 4 steps .* use 8"),
        (
            {"batch_size": 2, "evaluate_every": 5},
            1,
            r"batch_size 2 x 1 processes is not a multiple",
        ),
    ],
)
def test_batches_that_split_groups_are_refused(changes, processes, says):
    with pytest.raises(ConfigError, match=says):
        GRPOSettings(**changes).check_batches(processes)


def test_a_group_may_be_spread_over_processes():
    GRPOSettings(batch_size=1, accumulation=2, group_size=4).check_batches(2)


def test_unknown_keys_are_named_with_the_nearest(tmp_path):
    path = tmp_path / "grpo.toml"
    path.write_text(
        'prompts = ["a"]\nbase = "b"\noutput = "c"\n[judge]\nsource = "d"\n'
        "[training]\ngroupsize = 4\n[reweighting]\naplha = 1\n",
        encoding="utf-8",
    )

    with pytest.raises(ConfigError) as caught:
        load_toml(path, Config)

    assert "training.groupsize" in str(caught.value) and "group_size" in str(caught.value)
    assert "reweighting.aplha" in str(caught.value) and "alpha" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "name a list of models"),
        ({"source": "a", "models": "b"}, "name a list of models"),
        ({"models": "b", "adapter": "c"}, "the list describes the judge"),
    ],
)
def test_a_judge_is_named_in_one_way(values, says):
    with pytest.raises(ValueError, match=says):
        JudgeSource(**values)


def test_a_missing_judge_is_named(tmp_path):
    with pytest.raises(Exception, match=r"there is no folder .*nothing"):
        JudgeSource(source=str(tmp_path / "nothing")).load()
    models = tmp_path / "models.toml"
    models.write_text('[[models]]\nname="p"\nkind="policy"\nsource="x"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="no judge in this list"):
        JudgeSource(models=models).load()


def test_an_adapter_is_trained_further_or_a_new_one_is_begun():
    with pytest.raises(ValueError, match="set only one of them"):
        GRPOSettings(adapter="a", lora={"rank": 4})
    assert GRPOSettings(adapter="a", quantize="4bit").trains_adapter
    with pytest.raises(ValueError, match="needs a"):
        GRPOSettings(quantize="4bit")
