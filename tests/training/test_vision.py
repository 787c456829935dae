"""The image tower learns faces, and nothing else learns with it."""

import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file

from compeer_core.errors import ConfigError
from compeer_core.images import read_image
from compeer_core.processing import load_processor
from tests.training.corpora_fixture import jpeg, write_faces
from training.faces import FACE_CLASSES
from training.nano import vision
from training.nano.vision import Config

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
        epochs=2,
        batch_size=8,
    )


@pytest.fixture(scope="module")
def trained(one_thread: None, config: Config) -> Path:
    vision.run(config)
    return config.output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_report_says_how_good_the_tower_is(trained):
    report = json.loads((trained / "vision.json").read_text(encoding="utf-8"))

    assert report.keys() == {
        *("epoch", "train_loss", "validation_photos", "validation_accuracy", "by_class")
    }
    # 2 of FER2013 for each of 7 classes; every 10th of muxspace's 15 rows: the 1st and the 11th
    assert report["validation_photos"] == 2 * 7 + 2
    assert report["epoch"] == 2
    assert report["by_class"].keys() == {*FACE_CLASSES}
    assert 0 <= report["validation_accuracy"] <= 1


def test_the_tower_changes_and_the_language_model_does_not(trained, tiny_base):
    before, after = weights(tiny_base), weights(trained)

    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("visual." in name for name in changed)
    frozen = {name for name in before if "visual." in name} - changed
    assert not frozen


def test_the_checkpoint_reads_a_photo_as_few_tokens(trained):
    processor = load_processor(trained)
    photo = read_image(jpeg(48, "sad", 1)).to_pil()
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}
    text = processor.apply_chat_template([message], tokenize=False)

    inputs = processor(images=[photo], text=[text], return_tensors="pt")

    # 48 pixels are scaled up to 56 = 4 patches of 14, and 2 x 2 patches are one token
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    image_token = processor.tokenizer.get_vocab()["<|image_pad|>"]
    assert (inputs["input_ids"] == image_token).sum() == 4


def test_a_class_without_photos_has_no_accuracy(config, tmp_path):
    few = config.model_copy(
        update={
            "faces": write_faces(tmp_path / "faces", train=1, valid=0, muxspace=1),
            "output": tmp_path / "out",
            "epochs": 1,
            "batch_size": 64,  # more than there are photos: one step all the same
        }
    )

    vision.run(few)

    text = (few.output / "vision.json").read_text(encoding="utf-8")
    # FER2013 then has no validation part, so that every 10th of either pack becomes one
    report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert 0 < len(report["by_class"]) < len(FACE_CLASSES)


def test_the_number_of_photos_can_be_limited(config, tmp_path):
    limited = config.model_copy(
        update={"output": tmp_path / "out", "max_photos": 5, "epochs": 1, "batch_size": 4}
    )

    vision.run(limited)

    report = json.loads((limited.output / "vision.json").read_text(encoding="utf-8"))
    assert report["validation_photos"] == 5


def test_the_seed_alone_decides_what_is_learnt(config, trained, tmp_path):
    again = config.model_copy(update={"output": tmp_path / "again"})

    vision.run(again)

    first, second = weights(trained), weights(again.output)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_missing_is_said_and_a_dry_run_writes_nothing(config, tmp_path):
    fresh = config.model_copy(update={"output": tmp_path / "out"})

    vision.run(fresh, dry_run=True)
    assert not fresh.output.exists()
    with pytest.raises(ConfigError, match="elsewhere: no checkpoint there"):
        vision.run(fresh.model_copy(update={"model": tmp_path / "elsewhere"}), dry_run=True)
    with pytest.raises(ConfigError, match=r"emotion_map\.csv: no such file"):
        vision.run(fresh.model_copy(update={"faces": tmp_path}), dry_run=True)
    with pytest.raises(ConfigError, match="cannot be resumed"):
        vision.run(fresh, resume=tmp_path)


def test_a_varied_photo_is_the_same_face_a_little_moved():
    ground = PIL.Image.new("RGB", (100, 100), (90, 90, 90))
    ground.paste((250, 250, 250), (40, 40, 60, 60))  # a light square in the middle
    rng = np.random.default_rng(0)

    found = [np.asarray(vision.varied(ground, rng).convert("L"), float) for _ in range(200)]

    assert {one.shape for one in found} == {(100, 100)}
    middles = []
    for one in found:
        light = one > one.max() * 0.7  # 250 against 90: contrast keeps them apart
        rows, columns = np.nonzero(light)
        assert 0.85**2 * 400 * 0.9 < len(rows) < 1.15**2 * 400 * 1.1
        middles.append((rows.mean() - 49.5, columns.mean() - 49.5))
    far = np.abs(middles)
    assert far.max() < 8 + 1 and far.max() > 6  # up to 8 of 100 either way
    assert np.abs(np.mean(middles, axis=0)).max() < 1.5  # as often to one side as to the other
    light = [one.max() for one in found]
    assert max(light) == 255 and min(light) < 220


def test_half_of_the_photos_are_mirrored_and_a_seed_says_which():
    photo = PIL.Image.new("L", (60, 60), 0)
    photo.paste(255, (0, 0, 30, 60))  # light on the left

    def left(seed):
        pixels = np.asarray(vision.varied(photo, np.random.default_rng(seed)), float)
        return bool(pixels[:, :20].mean() > pixels[:, 40:].mean())

    sides = [left(seed) for seed in range(200)]
    assert 70 < sum(sides) < 130
    assert sides == [left(seed) for seed in range(200)]
