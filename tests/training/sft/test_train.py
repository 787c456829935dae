"""The SFT stage: samples on disk, rows as the policy will read them, and a run of two steps."""

import json
from pathlib import Path

import pytest

from compeer_core.backends.protocol import Message
from compeer_core.cer import SPLITS
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.images import read_image
from compeer_core.processing import load_processor
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import parse
from training.data.faces import read_faces
from training.data.samples import Sample, read_records
from training.finetune.sft_trainer import FineTuning, message_rows
from training.sft import train as sft
from training.sft.source import prepare_samples
from training.sft.train import Config, sample_row

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    return Config(
        esconv=small_corpora / "esconv",
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "run",
        face_share=0.8,
        history_characters=300,
        row_share=0.2,
        training=FineTuning(batch_size=2, max_steps=2, lr=1e-3, log_steps=1, freeze_vision=False),
    )


def samples(folder: Path, split: str) -> list[Sample]:
    return list(read_records(folder / f"samples.{split}.jsonl", Sample))


def test_photos_of_validation_and_test_are_never_shown_in_training(config, tmp_path):
    prepare_samples(config, 0, tmp_path)

    split_of = {face.file: face.split for face in read_faces(config.faces)}
    class_of = {face.file: face.face_class for face in read_faces(config.faces)}
    for split in SPLITS:
        shown = {turn.face for s in samples(tmp_path, split) for turn in s.history} - {None}
        assert {split_of[file] for file in shown} == {"train" if split == "train" else "valid"}
        assert len({class_of[file] for file in shown}) > 2


def test_every_split_has_its_own_dialogues(config, tmp_path):
    prepare_samples(config, 0, tmp_path)

    dialogues = [{sample.dialogue_id for sample in samples(tmp_path, split)} for split in SPLITS]
    assert [len(ids) for ids in dialogues] == [12, 8, 8]
    assert not dialogues[0] & dialogues[1] and not dialogues[0] & dialogues[2]
    assert all(
        ids == {f"esconv/{split}/{n}" for n in range(len(ids))}
        for ids, split in zip(dialogues, SPLITS, strict=True)
    )


def test_a_row_asks_what_the_policy_is_asked_and_answers_with_the_turn(config, tmp_path):
    prepare_samples(config, 0, tmp_path)
    photos = {face.file: face.data for face in read_faces(config.faces)}
    sample = next(s for s in samples(tmp_path, "train") if s.history[-1].face)

    row = sample_row(sample, photos)

    asked = policy_messages(sample.dialogue(photos), "trained")
    assert (row["prompt"], row["images"]) == message_rows(asked)
    assert row["images"] == [
        {"bytes": read_image(photos[sample.history[-1].face]).data, "path": None}
    ]
    assert row["completion"] == message_rows([Message("assistant", (sample.completion,))])[0]
    assert row["length"] == sum(len(t.text) for t in sample.history) + len(sample.completion)


def test_the_stage_leaves_samples_metrics_and_a_policy_that_loads(config):
    sft.run(config)

    rows = (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, rows) if "loss" in row]
    # 600 tokens, none of them learnt yet: ln 600 = 6.4
    assert losses == pytest.approx([6.4, 6.4], abs=0.3)
    assert all(parse(sample.completion) for sample in samples(config.output, "test"))
    assert load_processor(config.output / "model").tokenizer.eos_token == "<|im_end|>"
    # five turns of each of 12 dialogues, a fifth of them used
    log = (config.output / "log.txt").read_text(encoding="utf-8")
    assert "60 samples, 12 of them used" in log


def test_samples_of_a_start_that_failed_are_made_anew_and_those_of_a_run_are_kept(config):
    with pytest.raises(CheckpointError):
        sft.run(config.model_copy(update={"base": Path("nowhere"), "face_share": 0.0}))
    assert not any(s.history[-1].face for s in samples(config.output, "train"))

    sft.run(config)
    made = samples(config.output, "train")
    assert any(sample.history[-1].face for sample in made)

    path = config.output / "samples.train.jsonl"
    path.write_text(made[0].model_dump_json() + "\n", encoding="utf-8")
    sft.run(config, resume=config.output)
    assert samples(config.output, "train") == made[:1]


def test_another_config_does_not_resume_the_run(config):
    sft.run(config)
    other = config.model_copy(
        update={
            "history_characters": 500,
            "training": config.training.model_copy(update={"lr": 0.5}),
        }
    )

    with pytest.raises(
        ConfigError, match=r"history_characters \(was 300.*training\.lr \(was 0\.001"
    ):
        sft.run(other, resume=config.output)


def test_a_dry_run_writes_nothing(config, caplog):
    caplog.set_level("INFO")

    sft.run(config, dry_run=True)

    assert not config.output.exists()
    assert "train: 60 samples" in caplog.text
    with pytest.raises(ConfigError, match=r"train\.txt\.gz: no such file"):
        sft.run(config.model_copy(update={"esconv": config.faces}), dry_run=True)
