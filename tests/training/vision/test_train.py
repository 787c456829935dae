"""Training of the image tower on faces: only the tower changes."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from compeer_core.errors import ConfigError
from compeer_core.images import read_image
from compeer_core.processing import load_processor
from tests.training.corpora_fixture import jpeg, write_faces
from training.data.face_tokens import embeddings_of, word_vectors
from training.data.faces import FACE_CLASSES, read_faces
from training.finetune.architecture import ModelShape
from training.stages import StoppedEarly
from training.vision import teacher as vision_teacher
from training.vision import train as vision
from training.vision.photo_batches import PhotoBatches, patchify
from training.vision.train import Config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(
    small_corpora: Path, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    return Config(
        faces=small_corpora / "faces",
        model=tiny_base,
        output=tmp_path_factory.mktemp("vision") / "out",
        image_side=56,
        steps=4,
        warmup_steps=1,
        decay_steps=2,
        evaluate_every=2,
        batch_size=8,
    )


@pytest.fixture(scope="module")
def trained(one_thread: None, config: Config) -> Path:
    vision.run(config)
    return config.output / "model"


def interrupting_after(steps: int, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Send SIGINT during a step."""
    calls = 0

    def interrupting(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == steps + 1:  # the validation after step 2 is one more call
            os.kill(os.getpid(), signal.SIGINT)
        return wrapped(*arguments)

    return interrupting


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def report_of(run: Path) -> dict[str, Any]:
    text = (run / vision.REPORT).read_text(encoding="utf-8")
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_report_contains_the_accuracy_of_the_tower(trained, config):
    report = report_of(config.output)

    assert report.keys() == {
        *("steps", "passes", "validation_photos", "validation_accuracy", "by_class")
    }
    # 2 of FER2013 for each of 7 classes; every 10th of muxspace's 15 rows: the 1st and the 11th
    assert report["validation_photos"] == 2 * 7 + 2
    assert report["steps"] == 4
    assert report["by_class"].keys() == {*FACE_CLASSES}
    assert 0 <= report["validation_accuracy"] <= 1


def test_tokens_are_mapped_to_words_and_predictions_are_saved(trained, config):
    predictions = json.loads((config.output / vision.READINGS).read_text(encoding="utf-8"))
    faces = {face.file: face for face in read_faces(config.faces)}
    assert predictions.keys() == faces.keys()
    assert {*predictions.values()} <= {*FACE_CLASSES}
    model = AutoModelForImageTextToText.from_pretrained(trained)
    processor = load_processor(trained)
    embeddings = embeddings_of(model)
    words = word_vectors(embeddings, processor.tokenizer)

    names = sorted(predictions)
    photos = PhotoBatches([faces[name] for name in names], config.image_side)
    patches, grid = patchify(photos.batch(range(len(names))), processor.image_processor)
    with torch.no_grad():
        tokens = model.model.visual(patches, grid_thw=grid).pooler_output
    means = tokens.view(len(names), -1, tokens.shape[-1]).mean(1)

    directions = torch.nn.functional.normalize(words - words.mean(0), dim=-1)
    offsets = means - words.mean(0)
    projected = offsets @ torch.linalg.pinv(directions) @ directions
    assert torch.allclose(projected, offsets, atol=1e-4)
    assert projected.norm() > 1
    length = embeddings.norm(dim=-1).mean().item()
    training = [place for place, name in enumerate(names) if faces[name].split == "train"]
    assert offsets[training].norm(dim=-1).mean().item() == pytest.approx(length, rel=0.05)
    assert offsets[training].mean(0).norm() < 0.05 * length


def test_only_the_tower_changes(trained, tiny_base):
    before, after = weights(tiny_base), weights(trained)

    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("visual." in name for name in changed)
    frozen = {name for name in before if "visual." in name} - changed
    assert not frozen


def test_photo_becomes_few_tokens(trained):
    processor = load_processor(trained)
    photo = read_image(jpeg(48, "sad", 1)).to_pil()
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}
    text = processor.apply_chat_template([message], tokenize=False)

    inputs = processor(images=[photo], text=[text], return_tensors="pt")

    # 48 pixels are scaled up to 56 = 4 patches of 14, and 2 x 2 patches are one token
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    image_token = processor.tokenizer.get_vocab()["<|image_pad|>"]
    assert (inputs["input_ids"] == image_token).sum() == 4


@pytest.mark.parametrize("pixels", [20, 48, 112, 640])
def test_photos_of_any_size_are_scaled_to_the_training_size(tiny_base, pixels):
    processor = vision.build_processor(tiny_base, ModelShape(), 112)
    photo = read_image(jpeg(pixels, "sad", 1)).to_pil()

    patches = processor.image_processor(images=[photo], return_tensors="pt")["image_grid_thw"]

    assert patches.tolist() == [[1, 8, 8]]  # 112 pixels in patches of 14


def test_class_without_photos_has_no_accuracy(config, tmp_path):
    few = config.model_copy(
        update={
            "faces": write_faces(tmp_path / "faces", train=1, valid=0, muxspace=1),
            "output": tmp_path / "out",
            "batch_size": 64,  # more than there are photos: an epoch has one step
        }
    )

    vision.run(few)

    # without a validation split in FER2013, every 10th photo of either data set becomes one
    report = report_of(few.output)
    assert 0 < len(report["by_class"]) < len(FACE_CLASSES)
    assert report["passes"] == 4


def test_number_of_photos_can_be_limited(config, tmp_path):
    limited = config.model_copy(
        update={"output": tmp_path / "out", "max_photos": 5, "steps": 1, "batch_size": 4}
    )

    vision.run(limited)

    assert report_of(limited.output)["validation_photos"] == 5


def test_result_depends_only_on_the_seed(config, trained, tmp_path):
    again = config.model_copy(update={"output": tmp_path / "again"})

    vision.run(again)

    first, second = weights(trained), weights(again.output / "model")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_interrupted_run_resumes_to_the_same_weights(config, trained, tmp_path, monkeypatch):
    interrupted = config.model_copy(update={"output": tmp_path / "interrupted"})
    with monkeypatch.context() as patch:
        patch.setattr(vision, "patchify", interrupting_after(3, vision.patchify))
        with pytest.raises(StoppedEarly, match="saved at step 3"):
            vision.run(interrupted)

    vision.run(interrupted, resume=interrupted.output)

    first, second = weights(trained), weights(interrupted.output / "model")
    assert all(torch.equal(first[name], second[name]) for name in first)
    rows = (interrupted.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]


def test_reports_invalid_input_and_dry_run_writes_nothing(config, tmp_path):
    fresh = config.model_copy(update={"output": tmp_path / "out"})

    vision.run(fresh, dry_run=True)
    assert not fresh.output.exists()
    with pytest.raises(ConfigError, match="elsewhere: not a checkpoint"):
        vision.run(fresh.model_copy(update={"model": tmp_path / "elsewhere"}), dry_run=True)
    with pytest.raises(ConfigError, match=r"emotion_map\.csv: no such file"):
        vision.run(fresh.model_copy(update={"faces": tmp_path}), dry_run=True)
    with pytest.raises(ConfigError, match="image_side is 60; it must be a multiple of 28"):
        vision.run(fresh.model_copy(update={"image_side": 60}), dry_run=True)
    with pytest.raises(ConfigError, match=r"teacher\.safetensors: no such file"):
        vision.run(fresh.model_copy(update={"teacher": tmp_path}), dry_run=True)
    with pytest.raises(ConfigError, match="no run to resume"):
        vision.run(fresh, resume=tmp_path)


def test_targets_mix_labels_and_teacher_probabilities(config):
    class Sure(torch.nn.Module):
        """At temperature 2, predicts the third class with three times the probability of others."""

        def forward(self, photos: torch.Tensor) -> torch.Tensor:
            assert photos.shape == (2, 3, 56, 56)
            return torch.tensor([0, 0, 2 * math.log(3), 0, 0, 0, 0]).expand(2, -1)

    settings = config.model_copy(update={"teacher_share": 0.5, "teacher_temperature": 2.0})
    photos, labels = torch.zeros(2, 3, 56, 56), torch.tensor([2, 6])

    by_label = vision._targets(photos, labels, None, settings)
    with_teacher = vision._targets(photos, labels, Sure(), settings)

    # smoothing 0.1 over 7 classes; the teacher's probabilities are 1 / 9 and 3 / 9
    assert by_label[0].tolist() == pytest.approx([0.1 / 7] * 2 + [0.9 + 0.1 / 7] + [0.1 / 7] * 4)
    teacher_probabilities = torch.tensor([1, 1, 3, 1, 1, 1, 1]) / 9
    assert torch.allclose(with_teacher, (by_label + teacher_probabilities) / 2, atol=1e-6)


def test_tower_is_distilled_from_an_unchanged_teacher(config, trained, tmp_path):
    taught = vision_teacher.Config(
        faces=config.faces, output=tmp_path / "teacher", steps=2, batch_size=8
    )
    vision_teacher.run(taught)
    before = load_file(taught.output / vision_teacher.WEIGHTS)
    student = config.model_copy(update={"output": tmp_path / "student", "teacher": taught.output})

    vision.run(student)

    ours, theirs = weights(student.output / "model"), weights(trained)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)
    after = load_file(taught.output / vision_teacher.WEIGHTS)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_batched_attention_equals_the_default(tiny_base):
    model = AutoModelForImageTextToText.from_pretrained(tiny_base, dtype=torch.float32)
    tower = model.model.visual
    torch.manual_seed(0)
    patches = torch.randn(3 * 16, 3 * 2 * 14 * 14)
    grid = torch.tensor([[1, 4, 4]] * 3)

    with torch.no_grad():
        expected = tower(patches, grid_thw=grid).pooler_output
        vision.use_batched_attention(tower)
        batched = tower(patches, grid_thw=grid).pooler_output

    assert torch.allclose(batched, expected, atol=1e-5)
    assert expected.abs().max() > 1e-3
