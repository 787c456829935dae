"""The CNN teacher learns expressions, and an interrupted run resumes to the same network."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compeer_core.errors import ConfigError
from tests.training.corpora_fixture import write_faces
from tests.training.runs import interrupt_at_step_3
from training.data.faces import FACE_CLASSES, read_faces
from training.vision import teacher as vision_teacher
from training.vision.expressions import photos_of_splits
from training.vision.teacher import REPORT, WEIGHTS, Config, ExpressionNetwork, read_teacher

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """21 training photos of FER2013 and 12 of muxspace, at half of FER2013's side; an epoch has two steps."""
    return Config(
        faces=write_faces(tmp_path / "faces", train=3, valid=1, muxspace=2),
        output=tmp_path / "run",
        image_side=24,
        steps=5,
        warmup_steps=1,
        decay_steps=2,
        evaluate_every=2,
        save_every=2,
        batch_size=16,
    )


def test_network_learns_the_training_photos(config):
    """The fixture's photos differ by class, so thirty epochs must be enough for most of them."""
    vision_teacher.run(config.model_copy(update={"steps": 60, "decay_steps": 45}))

    teacher = read_teacher(config.output)
    train, valid = photos_of_splits(read_faces(config.faces), config)
    with torch.no_grad():
        predicted = teacher(train.batch(range(len(train)))).argmax(-1)
    assert (predicted == train.labels).float().mean() > 0.8
    assert not any(weight.requires_grad for weight in teacher.parameters())
    report = json.loads((config.output / REPORT).read_text(encoding="utf-8"))
    assert report["validation_photos"] == len(valid)
    assert report["steps"] == 60
    assert set(report["by_class"]) <= {*FACE_CLASSES}


def test_logits_do_not_depend_on_colour_or_on_other_photos():
    torch.manual_seed(0)
    network = ExpressionNetwork(48).eval()
    photos = torch.rand(3, 3, 48, 48)

    with torch.no_grad():
        logits = network(photos)
        grey = network(photos.mean(1, keepdim=True).expand(-1, 3, -1, -1))
        alone = network(photos[:1])

    assert logits.shape == (3, 7)
    assert torch.allclose(grey, logits, atol=1e-5)
    assert torch.allclose(alone, logits[:1], atol=1e-5)


def test_network_saves_its_side_and_scales_photos_to_it(config):
    vision_teacher.run(config.model_copy(update={"image_side": 32, "steps": 1}))
    network = read_teacher(config.output)
    flat = torch.full((1, 3, 32, 32), 0.3)

    with torch.no_grad():
        small, large = network(flat), network(torch.full((1, 3, 112, 112), 0.3))

    assert network.side == 32
    assert torch.allclose(large, small, atol=1e-5)


def test_interrupted_run_resumes_to_the_same_network(config, tmp_path, monkeypatch):
    whole = config.model_copy(update={"output": tmp_path / "whole"})
    vision_teacher.run(whole)
    with interrupt_at_step_3(monkeypatch):  # in the second epoch, between two checkpoints
        vision_teacher.run(config)
    assert not (config.output / WEIGHTS).exists()
    vision_teacher.run(config, resume=config.output)

    ours, theirs = (load_file(run.output / WEIGHTS) for run in (config, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_reports_missing_files_and_dry_run_writes_nothing(config, tmp_path):
    vision_teacher.run(config, dry_run=True)
    assert not config.output.exists()
    with pytest.raises(ConfigError, match=r"emotion_map\.csv: no such file"):
        vision_teacher.run(config.model_copy(update={"faces": tmp_path}), dry_run=True)
    with pytest.raises(ConfigError, match="the vision teacher stage writes it"):
        read_teacher(tmp_path)
