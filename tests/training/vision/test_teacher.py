"""The teacher of the image tower learns expressions, and a run cut short goes on to the same network."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compeer_core.errors import ConfigError
from tests.training.corpora_fixture import write_faces
from training.data.faces import FACE_CLASSES, read_faces
from training.finetune.optimisation import Optimisers
from training.stages import StoppedEarly
from training.vision import teacher as vision_teacher
from training.vision.expressions import photos_of_splits
from training.vision.teacher import REPORT, WEIGHTS, Config, ExpressionNetwork, read_teacher

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """21 photos of FER2013 and 12 of muxspace are learnt; a pass is two steps."""
    return Config(
        faces=write_faces(tmp_path / "faces", train=3, valid=1, muxspace=2),
        output=tmp_path / "run",
        steps=5,
        warmup_steps=1,
        decay_steps=2,
        evaluate_every=2,
        save_every=2,
        batch_size=16,
    )


def test_a_face_that_is_told_from_the_others_in_training_is_told_afterwards(config):
    """The fixture's photos differ by class, so forty passes over them must name nearly all of them."""
    vision_teacher.run(config.model_copy(update={"steps": 80, "decay_steps": 60}))

    teacher = read_teacher(config.output)
    train, valid = photos_of_splits(read_faces(config.faces), config)
    with torch.no_grad():
        named = teacher(train.batch(range(len(train)))).argmax(-1)
    assert (named == train.labels).float().mean() > 0.8
    assert not any(weight.requires_grad for weight in teacher.parameters())
    report = json.loads((config.output / REPORT).read_text(encoding="utf-8"))
    assert report["validation_photos"] == len(valid)
    assert report["steps"] == 80
    assert set(report["by_class"]) <= {*FACE_CLASSES}


def test_a_photo_has_a_logit_for_each_class_whatever_its_colours_and_its_neighbours():
    torch.manual_seed(0)
    network = ExpressionNetwork(48).eval()
    photos = torch.rand(3, 3, 48, 48)

    with torch.no_grad():
        found = network(photos)
        grey = network(photos.mean(1, keepdim=True).expand(-1, 3, -1, -1))
        alone = network(photos[:1])

    assert found.shape == (3, 7)
    assert torch.allclose(grey, found, atol=1e-5)
    assert torch.allclose(alone, found[:1], atol=1e-5)


def test_the_network_keeps_the_side_it_learnt_with_and_scales_photos_to_it(config):
    vision_teacher.run(config.model_copy(update={"image_side": 32, "steps": 1}))
    network = read_teacher(config.output)
    flat = torch.full((1, 3, 32, 32), 0.3)

    with torch.no_grad():
        small, large = network(flat), network(torch.full((1, 3, 112, 112), 0.3))

    assert network.side == 32
    assert torch.allclose(large, small, atol=1e-5)


def test_a_run_that_was_stopped_goes_on_to_the_same_network(config, tmp_path, monkeypatch):
    whole = config.model_copy(update={"output": tmp_path / "whole"})
    vision_teacher.run(whole)
    step = Optimisers.step

    def asked_to_stop(self: Optimisers, number: int) -> Any:
        if number == 2:  # in the second pass, and at no save
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(Optimisers, "step", asked_to_stop)
        with pytest.raises(StoppedEarly, match="saved at step 3"):
            vision_teacher.run(config)
    assert not (config.output / WEIGHTS).exists()
    vision_teacher.run(config, resume=config.output)

    ours, theirs = (load_file(run.output / WEIGHTS) for run in (config, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_missing_is_said_and_a_dry_run_writes_nothing(config, tmp_path):
    vision_teacher.run(config, dry_run=True)
    assert not config.output.exists()
    with pytest.raises(ConfigError, match=r"emotion_map\.csv: no such file"):
        vision_teacher.run(config.model_copy(update={"faces": tmp_path}), dry_run=True)
    with pytest.raises(ConfigError, match="the vision teacher stage writes it"):
        read_teacher(tmp_path)
