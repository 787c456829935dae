"""SFT on whole dialogues: a run from samples to a policy that loads, cut short and gone on with."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.cer import Split
from compeer_core.errors import ConfigError
from tests.training.runs import interrupt_at_step_3
from training.data.face_tokens import embeddings_of, sure_tokens, word_vectors
from training.data.faces import FACE_CLASSES, read_faces, read_readings
from training.data.samples import Sample, read_records
from training.evaluation.face_swap import with_face
from training.sft import dialogues
from training.sft.dialogues import Config
from training.sft.source import drawn_samples
from training.sft.tokenise import SampleReader

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    """12 dialogues of five turns, five a step: a pass is two steps."""
    return Config(
        esconv=small_corpora / "esconv",
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "run",
        face_share=0.5,
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


def test_the_stage_leaves_samples_metrics_and_a_policy_that_loads(config):
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
    for split, count in (("train", 60), ("valid", 40), ("test", 40)):
        path = config.output / f"samples.{split}.jsonl"
        assert len(list(read_records(path, Sample))) == count


def test_the_image_tower_is_moved_only_where_it_is_asked_for(config, tiny_base, tmp_path):
    before = load_file(tiny_base / "model.safetensors")
    dialogues.run(config)
    still = config.model_copy(update={"freeze_vision": True, "output": tmp_path / "still"})
    dialogues.run(still)

    def moved(run: Path) -> set[bool]:
        after = load_file(run / "model" / "model.safetensors")
        return {torch.equal(after[n], before[n]) for n in after if n.startswith("visual")}

    assert moved(still.output) == {True}
    assert False in moved(config.output)


def test_a_frozen_language_model_learns_from_photos_by_its_tower_alone(config, tiny_base):
    before = load_file(tiny_base / "model.safetensors")
    seeing = config.model_copy(
        update={"freeze_language": True, "face_share": 1.0, "vision_lr": 0.03, "steps": 8}
    )

    dialogues.run(seeing)

    after = load_file(config.output / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    moved = {
        name.startswith("visual") for name in after if not torch.equal(after[name], before[name])
    }
    assert moved == {True}
    validated = [row["validation_loss"] for row in rows(config.output) if "validation_loss" in row]
    assert validated[-1] < validated[0]


def test_a_run_that_would_train_nothing_is_refused(config):
    with pytest.raises(ValidationError, match="nothing is left to be trained"):
        Config(**{**dict(config), "freeze_language": True, "freeze_vision": True})


@pytest.mark.parametrize(("name", "value"), [("sure_share", 0.5), ("only_faces", True)])
def test_what_is_about_readings_needs_them(config, name, value):
    with pytest.raises(ValidationError, match=f"{name} needs readings"):
        Config(**{**dict(config), name: value})


@pytest.mark.parametrize(("held_out", "with_photo"), [(0.0, 0), (None, 40)])
def test_held_out_turns_can_have_photos_less_often_than_those_that_are_learnt(
    config, held_out, with_photo
):
    source = config.model_copy(update={"face_share": 1.0, "held_out_face_share": held_out})
    faces = read_faces(config.faces)

    def shown(split: Split) -> int:
        samples = drawn_samples(source, faces, split, seed=0)
        return sum(sample.history[-1].face is not None for sample in samples)

    assert shown("train") == 60
    assert shown("valid") == shown("test") == with_photo


@pytest.fixture
def reading(config: Config, tmp_path: Path) -> Config:
    """Every photo has one, and each is taken for the class after its own."""
    path = tmp_path / "readings.json"
    after = dict(zip(FACE_CLASSES, (*FACE_CLASSES[1:], FACE_CLASSES[0]), strict=True))
    read_as = {face.file: after[face.face_class] for face in read_faces(config.faces)}
    path.write_text(json.dumps(read_as), encoding="utf-8")
    return config.model_copy(update={"readings": path, "sure_share": 0.5, "face_share": 1.0})


def test_a_sure_face_is_the_word_for_what_the_tower_takes_it_for(reading):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(reading.base)
    faces = read_faces(reading.faces)
    reader = SampleReader(reading.base, model, {face.file: face.data for face in faces})
    made = dialogues._Dialogues(reading, faces, reader, 2048)
    samples = made.of("train", 0)[0]
    one = made.row(samples)
    assert one is not None and one.row.grid is not None

    tokens = dialogues._SureFaces(reading, model, reader.processor.tokenizer).of(one)

    assert one.photos == tuple(sample.history[-1].face for sample in samples)
    of_pictures = (one.row.tokens == model.config.image_token_id).sum().item()
    assert tokens is not None and len(tokens) == of_pictures
    embeddings = embeddings_of(model)
    words = word_vectors(embeddings, reader.processor.tokenizer)
    sure = sure_tokens(words, embeddings.norm(dim=-1).mean().item())
    readings = read_readings(reading.readings)
    start = 0
    for name, sides in zip(one.photos, one.row.grid.tolist(), strict=True):
        end = start + sides[0] * sides[1] * sides[2] // 4
        expected = sure[FACE_CLASSES.index(readings[name])].expand(end - start, -1)
        assert torch.equal(tokens[start:end], expected)
        start = end
    without = made.row([with_face(sample, None) for sample in samples])
    assert without is not None
    assert dialogues._SureFaces(reading, model, reader.processor.tokenizer).of(without) is None


def test_what_is_said_of_the_face_may_be_all_that_is_learnt(reading):
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(reading.base)
    faces = read_faces(reading.faces)
    reader = SampleReader(reading.base, model, {face.file: face.data for face in faces})
    some = reading.model_copy(update={"only_faces": True, "face_share": 0.5})
    made = dialogues._Dialogues(some, faces, reader, 2048)
    samples = [sample for one in made.of("train", 0) for sample in one][:15]
    shown = [sample for sample in samples if sample.history[-1].face is not None]
    assert 0 < len(shown) < len(samples)

    one = made.row(samples)

    assert one is not None and len(one.photos) == len(shown)
    said = reader.processor.tokenizer.decode(one.row.targets)
    assert len(re.findall(r"The face in the picture|In the photo", said)) == len(shown)
    assert said.count(".") == len(shown)
    assert not re.search(r"<|Sentiment|Emotion", said)
    assert made.row([with_face(sample, None) for sample in samples]) is None


def test_about_the_asked_share_of_dialogues_has_sure_faces_and_the_loss_learns_from_them(reading):
    steps = dialogues._Dialogues(reading, read_faces(reading.faces), None, 0)  # type: ignore[arg-type]
    steps.row = lambda samples: samples  # type: ignore[assignment, method-assign, return-value]
    drawn = [sure for rows in itertools.islice(steps.steps(0), 40) for _, sure in rows]
    again = [sure for rows in itertools.islice(steps.steps(30), 10) for _, sure in rows]
    assert drawn[150:] == again  # a run that goes on has the same ones
    assert 70 <= sum(drawn) <= 130  # of 200

    unsure = reading.model_copy(update={"sure_share": 0.0, "output": reading.output / "unsure"})
    dialogues.run(reading)
    dialogues.run(unsure)

    assert rows(reading.output)[-1]["loss"] != rows(unsure.output)[-1]["loss"]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(config, tmp_path, monkeypatch):
    whole = config.model_copy(update={"output": tmp_path / "whole"})
    dialogues.run(whole)
    with interrupt_at_step_3(monkeypatch):  # in the second pass, and at no save
        dialogues.run(config)
    assert not (config.output / "model").exists()
    dialogues.run(config, resume=config.output)

    assert rows(config.output) == rows(whole.output)
    ours, theirs = (load_file(c.output / "model" / "model.safetensors") for c in (config, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_pass_has_words_and_photos_of_its_own_and_the_same_turns(config):
    made = dialogues._Dialogues(config, read_faces(config.faces), None, 0)  # type: ignore[arg-type]
    first, second, again = made.of("train", 0), made.of("train", 1), made.of("train", 1)

    assert [[s.id for s in one] for one in first] == [[s.id for s in one] for one in second]
    assert second == again
    pairs = [
        (a, b)
        for one, two in zip(first, second, strict=True)
        for a, b in zip(one, two, strict=True)
    ]
    assert sum(a.completion != b.completion for a, b in pairs) > len(pairs) / 2
    assert any(a.history[-1].face != b.history[-1].face for a, b in pairs)
    replies = [(s.completion.partition("<reply>")[2]) for s, _ in pairs]
    assert replies == [(s.completion.partition("<reply>")[2]) for _, s in pairs]


def test_samples_longer_than_the_model_reads_are_left_out_and_counted(config, tiny_base, tmp_path):
    short = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_base)
    short.config.text_config.max_position_embeddings = 200
    base = tmp_path / "short"
    short.save_pretrained(base)
    for path in tiny_base.iterdir():
        if not (base / path.name).exists():
            (base / path.name).write_bytes(path.read_bytes())

    dialogues.run(config.model_copy(update={"base": base, "steps": 2}))

    log = (config.output / "log.txt").read_text(encoding="utf-8")
    assert "samples were longer than the model can read" in log


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
    assert "train: 60 samples" in caplog.text
