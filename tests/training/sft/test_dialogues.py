"""SFT on whole dialogues: a run from rows to a policy that loads, stopped and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.errors import ConfigError
from tests.training.runs import interrupt_at_step_3
from training.cer import esconv_rules
from training.sft import dialogues
from training.sft.dialogues import Config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def records(small_corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ESConv's turns by rule, half of them with a photo."""
    output = tmp_path_factory.mktemp("rules")
    esconv_rules.run(
        esconv_rules.Config(
            esconv=small_corpora / "esconv",
            faces=small_corpora / "faces",
            face_share=0.5,
            output=output,
        )
    )
    return output / "rows.jsonl"


@pytest.fixture
def config(records: Path, small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    """12 dialogues of five turns, five a step: a pass is two steps."""
    return Config(
        records=(records,),
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "run",
        dialogues_per_step=5,
        steps=5,
        warmup_steps=1,
        decay_steps=2,
        save_every=2,
        evaluate_every=2,
        validation_dialogues=3,
    )


def rows(run: Path) -> list[dict[str, Any]]:
    """What was measured, without what depends on the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"time", "tokens_per_second"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def test_the_stage_leaves_metrics_and_a_policy_that_loads(config):
    dialogues.run(config)

    measured = rows(config.output)
    assert [row["step"] for row in measured] == [1, 2, 3, 4, 5]
    # 600 tokens, none of them learnt yet: ln 600 = 6.4
    assert measured[0]["loss"] == pytest.approx(6.4, abs=0.3)
    assert measured[-1]["loss"] < measured[0]["loss"] - 0.3
    validated = [row["validation_loss"] for row in measured if "validation_loss" in row]
    assert len(validated) == 3  # at 2, 4 and the end
    assert validated[-1] < validated[0]
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(config.output / "model")
    # what is only good for training is not what others get
    assert model.config.text_config._attn_implementation == "sdpa"
    written = (config.output / "model" / "config.json").read_text(encoding="utf-8")
    assert "shared_prefix" not in written


def test_the_image_tower_is_trained_only_where_the_config_says_so(config, tiny_base, tmp_path):
    before = load_file(tiny_base / "model.safetensors")
    dialogues.run(config)
    still = config.model_copy(update={"freeze_vision": True, "output": tmp_path / "still"})
    dialogues.run(still)

    def moved(run: Path) -> set[bool]:
        after = load_file(run / "model" / "model.safetensors")
        return {torch.equal(after[n], before[n]) for n in after if n.startswith("visual")}

    assert moved(still.output) == {True}
    assert False in moved(config.output)


def test_a_stopped_run_resumes_as_if_it_had_not_stopped(config, tmp_path, monkeypatch):
    whole = config.model_copy(update={"output": tmp_path / "whole"})
    dialogues.run(whole)
    with interrupt_at_step_3(monkeypatch):  # in the second pass, and at no save
        dialogues.run(config)
    assert not (config.output / "model").exists()
    dialogues.run(config, resume=config.output)

    assert rows(config.output) == rows(whole.output)
    ours, theirs = (load_file(c.output / "model" / "model.safetensors") for c in (config, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_turns_longer_than_the_context_are_skipped_and_counted(config, tiny_base, tmp_path):
    short = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_base)
    short.config.text_config.max_position_embeddings = 200
    base = tmp_path / "short"
    short.save_pretrained(base)
    for path in tiny_base.iterdir():
        if not (base / path.name).exists():
            (base / path.name).write_bytes(path.read_bytes())

    dialogues.run(config.model_copy(update={"base": base, "steps": 2}))

    log = (config.output / "log.txt").read_text(encoding="utf-8")
    assert "skipped turns of more than 200 tokens" in log


def test_another_config_does_not_resume_but_a_longer_run_does(config):
    dialogues.run(config)

    with pytest.raises(ConfigError, match=r"muon_lr \(was 0\.02, now 0\.5\)"):
        dialogues.run(config.model_copy(update={"muon_lr": 0.5}), resume=config.output)
    dialogues.run(config.model_copy(update={"steps": 6}), resume=config.output)
    assert [row["step"] for row in rows(config.output)] == [1, 2, 3, 4, 5, 6]


def test_a_dry_run_writes_nothing(config, caplog):
    caplog.set_level("INFO")

    dialogues.run(config, dry_run=True)

    assert not config.output.exists()
    assert "60 turns of 12 dialogues to learn" in caplog.text


def test_rows_without_a_turn_to_learn_are_an_error(config, tmp_path):
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"empty\.jsonl: no turn of the train split to learn"):
        dialogues.run(config.model_copy(update={"records": (tmp_path / "empty.jsonl",)}))
