"""The full recipe of COMPEER-nano runs end to end, from corpora to the shipped folder and results."""

import json
import logging
import shutil
import tomllib
from pathlib import Path
from types import MappingProxyType

import pytest
from transformers import AutoModelForImageTextToText

from compeer_core.processing import load_processor
from training.__main__ import main

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGS = Path(__file__).parents[3] / "training" / "configs" / "nano"

_FEW_STEPS = ("steps=2", "decay_steps=1", "warmup_steps=1")
_FEW_DIALOGUES = ("dialogues_per_step=1", "validation_dialogues=1", "compile=false")

SMALL = MappingProxyType(
    {
        "tokenizer.toml": (),
        "pretrain.toml": (
            *(*_FEW_STEPS, "compile=false", "batch_size=1"),
            *("block_size=64", "validation_blocks=2", "shape.layers=1", "shape.hidden_size=96"),
            *("shape.vision_layers=1",),
        ),
        "vision_teacher.toml": (*_FEW_STEPS, "batch_size=8"),
        "vision.toml": (*_FEW_STEPS, "batch_size=8", "compile=false"),
        "cer_rules.toml": (),
        "sft_dialogues.toml": (*_FEW_STEPS, *_FEW_DIALOGUES),
        "export_policy.toml": (),
        "evaluate_esconv.toml": ("turns=6", "picture_turns=2", "perplexity_turns=2"),
    }
)
"""Overrides that reduce each stage to seconds; files and folders are the recipe's."""


def _small_recipe(folder: Path, name: str) -> Path:
    """Copy the shipped configs and add the overrides to one recipe."""
    shutil.copytree(CONFIGS, folder)
    path = folder / name
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    assert [stage["config"] for stage in recipe["stage"]] == [*SMALL]
    lines = [f"{key} = {json.dumps(recipe[key])}" for key in ("output", "data_dir")]
    for stage in recipe["stage"]:
        lines += [
            "[[stage]]",
            f"name = {json.dumps(stage['name'])}",
            f"config = {json.dumps(stage['config'])}",
            f"set = {json.dumps([*stage.get('set', ()), *SMALL[stage['config']]])}",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_one_command_produces_the_shipped_folder_and_its_results(
    small_corpora, tmp_path, monkeypatch, caplog
):
    recipe = _small_recipe(tmp_path / "configs", "full.toml")
    monkeypatch.chdir(tmp_path)
    command = ["run", str(recipe), "--set", f"data_dir={small_corpora}"]

    assert main(command) == 0

    shipped = tmp_path / "assets" / "checkpoints" / "compeer-nano"
    model = AutoModelForImageTextToText.from_pretrained(shipped)
    assert model.config.text_config.num_hidden_layers == 1
    side = load_processor(shipped).image_processor.size
    assert side["shortest_edge"] == side["longest_edge"] == 112**2
    written = tmp_path / "runs" / "nano" / "evaluate_esconv"
    for way in ("greedy", "sampled"):
        answers = (written / f"turns.{way}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(answers) == 6
    table = (written / "table.md").read_text(encoding="utf-8")
    for row in (
        "strategy | policy, greedy",
        "strategy | MISC (published)",
        "image tower alone",
    ):
        assert row in table

    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert main(command) == 0
    assert caplog.text.count("already done") == len(SMALL)
