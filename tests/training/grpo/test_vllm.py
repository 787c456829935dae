"""Rollouts by vLLM, as far as it goes without vLLM: what trl is told, and what is refused in words."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from trl.trainer import grpo_trainer

from compeer_core.errors import ConfigError
from training.grpo import train, vllm
from training.grpo.settings import GRPOSettings
from training.grpo.vllm import NEWEST, OLDEST, VllmRollouts, check_vllm, vllm_arguments

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def installed(monkeypatch):
    """Makes it look as if some version were installed, beside a GPU."""

    def install(version: str) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    return install


# --- what trl is told ----------------------------------------------------------------------------


def test_colocated_vllm_gets_its_part_of_the_gpu():
    settings = GRPOSettings(
        rollouts="vllm",
        vllm=VllmRollouts(memory_share=0.4, tensor_parallel=2, sleep=True, context=4096),
        precision="fp32",
    )

    arguments = train.grpo_arguments(settings, Path("checkpoints"), 1)

    assert arguments.use_vllm and arguments.vllm_mode == "colocate"
    assert arguments.vllm_gpu_memory_utilization == 0.4
    assert arguments.vllm_tensor_parallel_size == 2
    assert arguments.vllm_enable_sleep_mode
    assert arguments.vllm_max_model_length == 4096
    assert arguments.vllm_importance_sampling_correction


def test_a_server_is_told_by_its_address():
    settings = GRPOSettings(
        rollouts="vllm",
        vllm=VllmRollouts(mode="server", url="http://gpu2:8001", correction=False),
        precision="fp32",
    )

    arguments = train.grpo_arguments(settings, Path("checkpoints"), 1)

    assert arguments.use_vllm and arguments.vllm_mode == "server"
    assert arguments.vllm_server_base_url == "http://gpu2:8001"
    assert not arguments.vllm_importance_sampling_correction
    # what belongs to the other mode is left to trl
    assert arguments.vllm_gpu_memory_utilization == 0.3


@pytest.mark.parametrize("rollouts", ["shared", "plain"])
def test_without_vllm_trl_is_told_nothing_about_it(rollouts):
    settings = GRPOSettings(rollouts=rollouts, precision="fp32")

    assert not train.grpo_arguments(settings, Path("checkpoints"), 1).use_vllm


def test_every_argument_is_one_of_trls():
    known = set(train.GRPOConfig.__dataclass_fields__)

    for mode in ("server", "colocate"):
        assert vllm_arguments(VllmRollouts(mode=mode)).keys() <= known


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("rollouts", ["shared", "plain"])
def test_its_table_without_its_use_is_a_mistake(rollouts):
    with pytest.raises(ValidationError, match=f"needs rollouts = 'vllm', not '{rollouts}'"):
        GRPOSettings(rollouts=rollouts, vllm=VllmRollouts())


def test_it_is_missing_and_the_way_out_is_named(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"not installed; run `pip install 'compeer\[vllm\]'`"):
        check_vllm(VllmRollouts(), 1, 0, None)


@pytest.mark.parametrize("version", ["0.21.9", "0.31.1", "0.33.0", "1.0", "nightly"])
def test_a_version_that_trl_does_not_know_is_refused(installed, version):
    installed(version)
    with pytest.raises(ConfigError, match=f"0.22.0 to 0.31.0, and {re.escape(version)} is"):
        check_vllm(VllmRollouts(), 1, 0, None)


@pytest.mark.parametrize("version", ["0.22.0", "0.25.1rc2+cu129", "0.31.0"])
def test_a_version_that_trl_knows_is_taken(installed, version):
    installed(version)
    check_vllm(VllmRollouts(tensor_parallel=2, context=100), 4, 100, None)


@pytest.mark.parametrize(
    ("settings", "others", "says"),
    [
        ({"tensor_parallel": 2}, (3, 0, None), "tensor_parallel = 2 must divide the 3 processes"),
        ({"context": 99}, (1, 100, None), "context = 99 is less than the 100 tokens"),
        ({}, (1, 0, "4bit"), "which cannot take those of quantize = '4bit'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(installed, settings, others, says):
    installed("0.31.0")
    with pytest.raises(ConfigError, match=says):
        check_vllm(VllmRollouts(**settings), *others)


def test_without_a_gpu_it_is_refused(installed, monkeypatch):
    installed("0.31.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        check_vllm(VllmRollouts(), 1, 0, None)


def test_the_stage_asks_before_it_opens_the_run(config, tmp_path, monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(vllm.importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        train.run(config(rollouts="vllm"))

    assert not (tmp_path / "run").exists()


# --- one range, said in three places -------------------------------------------------------------


def test_the_extra_names_the_range_that_trl_supports(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={OLDEST},<={NEWEST}"]

    told = [one for one in importlib.metadata.requires("trl") or () if one.startswith("vllm")]
    (of_trl,) = {re.sub(r"\s*;.*", "", one) for one in told}
    assert set(of_trl.removeprefix("vllm").split(",")) == {f">={OLDEST}", f"<={NEWEST}"}


# --- the run, with vLLM played -------------------------------------------------------------------


class Played:
    """Stands where trl's `VLLMGeneration` does; writes the same few tokens for every prompt."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.synced = 0
        made.append(self)

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> Any:
        assert len(prompts) % num_generations == 0
        ids = [[300 + place % 7, 301, 302] for place in range(len(prompts))]
        return prompts, ids, [[[-2.0]] * 3 for _ in ids], None


made: list[Played] = []


@pytest.mark.usefixtures("words")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_a_run_learns_from_what_vllm_writes(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "check_vllm", lambda *_: None)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Played)
    made.clear()

    train.run(config(rollouts="vllm", vllm={"memory_share": 0.2}, max_steps=2))

    (played,) = made
    assert played.synced == 2  # before each generation
    assert played.options["gpu_memory_utilization"] == 0.2
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "sampling/importance_sampling_ratio/mean" in metrics
    assert "reward/total" in metrics
