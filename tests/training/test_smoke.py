"""`configs/smoke.toml`: the stages from the image tower to GRPO, end to end on small corpora."""

import json
import shutil
from pathlib import Path

import pytest

from compeer_core.cer import SPLITS
from compeer_core.processing import load_processor
from tests.checkpoints import build_adapter
from tests.training.cer.endpoint import Endpoint
from tests.training.cer.whole_route import answer
from training.__main__ import main
from training.common.run_directory import METRICS_FILE

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


SHIPPED = "assets/checkpoints/compeer-small"
WRITER = '"generators.compeer-small.max_new_tokens=200"'
"""A line of the stage `cer`, which an endpoint answers here."""


@pytest.mark.usefixtures("drawn_plots")
def test_the_smoke_recipe_runs_from_the_image_tower_to_grpo(
    repository: Path,
    small_corpora: Path,
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.chdir(repository)
    adapter = build_adapter(tiny_base, tmp_path / "adapter")
    configs = repository / "training" / "configs"
    text = (configs / "smoke.toml").read_text(encoding="utf-8")
    assert WRITER in text
    text = text.replace(f"{SHIPPED}-base", str(tiny_base)).replace(SHIPPED, str(adapter))
    recipe = tmp_path / "smoke.toml"
    output = tmp_path / "smoke"
    settings = {"data_dir": small_corpora, "output": output, "folder": configs}
    command = ["run", str(recipe)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]

    with Endpoint(answer) as endpoint:
        writer = f"'generators={{writer={{source=\"{endpoint.source}\"}}}}'"
        recipe.write_text(text.replace(WRITER, writer), encoding="utf-8")
        assert main([*command, "--dry-run"]) == 0
        assert not output.exists()
        assert main(command) == 0

    for stage in ("sft", "reward"):
        rows = (output / stage / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        losses = [row["loss"] for row in map(json.loads, rows) if "loss" in row]
        # 600 tokens after a few steps: ln 600 = 6.4
        assert losses and all(4 < loss < 8 for loss in losses), (stage, losses)
    assert (output / "rules" / "rows.jsonl").is_file()
    for split in SPLITS:
        assert (output / "cer" / f"{split}.jsonl").is_file()
    assert (output / "vision" / "vision.json").is_file()
    assert load_processor(output / "sft" / "model").tokenizer.get_vocab()["<reply>"]
    assert (output / "reward" / "adapter" / "adapter_model.safetensors").is_file()

    grpo = output / "grpo"
    rows = (grpo / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    rewards = [row["reward/total"] for row in map(json.loads, rows) if "reward/total" in row]
    assert len(rewards) == 1 and -5 <= rewards[0] <= 5
    assert (grpo / "adapter" / "adapter_model.safetensors").is_file()
    assert (grpo / "rollouts.jsonl").is_file() and (grpo / "plots" / "reward.png").is_file()
    assert (output / "results" / "grpo.json").is_file()

    assert (output / "cer" / "train.jsonl").stat().st_size > 0
    assert (output / "cer" / "README.md").is_file()

    # finished stages are skipped even if their folders are gone
    shutil.rmtree(output / "vision")
    caplog.clear()
    assert main(command) == 0
    assert [record.message.partition(": ")[2] for record in caplog.records] == ["already done"] * 8
