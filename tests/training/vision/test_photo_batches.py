"""Photos are varied within bounds, and cut as the processor cuts them."""

import numpy as np
import pytest
import torch

from compeer_core.images import read_image
from tests.training.corpora_fixture import jpeg
from training.data.faces import FACE_CLASSES, Face
from training.finetune.architecture import ModelShape
from training.vision.photo_batches import PhotoBatches, patched, varied
from training.vision.train import build_processor

pytestmark = pytest.mark.usefixtures("one_thread")


def square() -> torch.Tensor:
    """A light square in the middle of a grey photo of 100 pixels."""
    photo = torch.full((3, 100, 100), 90 / 255)
    photo[:, 40:60, 40:60] = 250 / 255
    return photo


def test_photos_come_in_their_size_with_their_labels():
    faces = [
        Face("a", "train", "sad", jpeg(48, "sad", 1)),
        Face("b", "train", "happy", jpeg(60, "happy", 2)),
    ]

    photos = PhotoBatches(faces, 56)

    assert len(photos) == 2
    assert [FACE_CLASSES[label] for label in photos.labels] == ["sad", "happy"]
    found = photos.batch([1])
    assert found.shape == (1, 3, 56, 56)
    image = read_image(faces[1].data).to_pil().convert("RGB").resize((56, 56))
    assert np.array_equal(
        (found[0] * 255).permute(1, 2, 0).numpy(), np.array(image, dtype=np.float32)
    )


def test_a_varied_photo_is_the_same_face_a_little_moved():
    found = varied(square().expand(400, -1, -1, -1), np.random.default_rng(0)).mean(1).numpy()

    assert found.shape == (400, 100, 100)
    middles, lights = [], []
    for one in found:
        rows, columns = np.nonzero(one > one.max() * 0.7)  # 250 against 90
        if 0.85**2 * 400 * 0.9 < len(rows) < 1.15**2 * 400 * 1.1:  # nothing of it was erased
            middles.append((rows.mean() - 49.5, columns.mean() - 49.5))
            lights.append(one.max())
    assert (
        len(middles) > 280
    )  # a rectangle lies over the square, or is the lightest, in some of a quarter
    far = np.abs(middles)
    assert 6 < far.max() < 8 * 1.15 * 1.3 + 1  # up to 8 of 100 either way, turned and enlarged
    assert np.abs(np.mean(middles, axis=0)).max() < 1.5  # as often to one side as to the other
    assert max(lights) == 1 and min(lights) < 0.87


def test_a_quarter_of_the_photos_loses_a_rectangle():
    found = varied(torch.full((400, 1, 64, 64), 0.5), np.random.default_rng(0))

    middle = found[:, 0, 20:44, 20:44]  # where no black comes in from outside
    uneven = (middle.amax((1, 2)) - middle.amin((1, 2)) > 0.01).sum().item()
    assert 40 < uneven < 110  # some of the hundred lie outside the middle or over all of it


def test_half_of_the_photos_are_mirrored_and_a_seed_says_which():
    photo = torch.zeros(1, 60, 60)
    photo[:, :, :30] = 1  # light on the left
    many = photo.expand(200, -1, -1, -1)

    found = varied(many, np.random.default_rng(1))

    left = found[:, 0, :, :20].mean((1, 2)) > found[:, 0, :, 40:].mean((1, 2))
    assert 70 < left.sum() < 130
    assert torch.equal(found, varied(many, np.random.default_rng(1)))
    assert not torch.equal(found, varied(many, np.random.default_rng(2)))


@pytest.mark.parametrize("side", [56, 112])
def test_patches_are_those_of_the_processor(tiny_base, side):
    processor = build_processor(tiny_base, ModelShape(), side).image_processor
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, side, side, 3), dtype=np.uint8)

    expected = processor(images=list(pixels), return_tensors="pt")
    patches, grid = patched(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, processor)

    assert grid.tolist() == expected["image_grid_thw"].tolist()
    assert torch.allclose(patches, expected["pixel_values"], atol=1e-5)
