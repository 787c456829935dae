"""Augmentation stays within bounds, and patches equal the processor's."""

import numpy as np
import pytest
import torch

from compeer_core.images import read_image
from tests.training.corpora_fixture import jpeg
from training.data.faces import FACE_CLASSES, Face
from training.finetune.architecture import ModelShape
from training.vision.photo_batches import PhotoBatches, augment, patchify
from training.vision.train import build_processor

pytestmark = pytest.mark.usefixtures("one_thread")


def square() -> torch.Tensor:
    """A light square in the centre of a grey photo of 100 pixels."""
    photo = torch.full((3, 100, 100), 90 / 255)
    photo[:, 40:60, 40:60] = 250 / 255
    return photo


def test_photos_are_scaled_and_labelled():
    faces = [
        Face("a", "train", "sad", jpeg(48, "sad", 1)),
        Face("b", "train", "happy", jpeg(60, "happy", 2)),
    ]

    photos = PhotoBatches(faces, 56)

    assert len(photos) == 2
    assert [FACE_CLASSES[label] for label in photos.labels] == ["sad", "happy"]
    batch = photos.batch([1])
    assert batch.shape == (1, 3, 56, 56)
    image = read_image(faces[1].data).to_pil().convert("RGB").resize((56, 56))
    assert np.array_equal(
        (batch[0] * 255).permute(1, 2, 0).numpy(), np.array(image, dtype=np.float32)
    )


def test_augmentation_moves_scales_and_lights_within_bounds():
    augmented = augment(square().expand(400, -1, -1, -1), np.random.default_rng(0)).mean(1).numpy()

    assert augmented.shape == (400, 100, 100)
    centres, brightness = [], []
    for photo in augmented:
        rows, columns = np.nonzero(photo > photo.max() * 0.7)  # 250 against 90
        if 0.85**2 * 400 * 0.9 < len(rows) < 1.15**2 * 400 * 1.1:  # the square was not erased
            centres.append((rows.mean() - 49.5, columns.mean() - 49.5))
            brightness.append(photo.max())
    # up to a quarter have a rectangle that covers the square or is lighter
    assert len(centres) > 280
    distance = np.abs(centres)
    assert 6 < distance.max() < 8 * 1.15 * 1.3 + 1  # shifted by up to 8 of 100, rotated, scaled
    assert np.abs(np.mean(centres, axis=0)).max() < 1.5  # symmetric
    assert max(brightness) == 1 and min(brightness) < 0.87


def test_a_quarter_of_the_photos_has_an_erased_rectangle():
    augmented = augment(torch.full((400, 1, 64, 64), 0.5), np.random.default_rng(0))

    centre = augmented[:, 0, 20:44, 20:44]  # never reached by the black border
    uneven = (centre.amax((1, 2)) - centre.amin((1, 2)) > 0.01).sum().item()
    assert 40 < uneven < 110  # some of the hundred rectangles miss the centre or cover it all


def test_half_of_the_photos_are_mirrored_depending_on_the_seed():
    photo = torch.zeros(1, 60, 60)
    photo[:, :, :30] = 1  # light on the left
    many = photo.expand(200, -1, -1, -1)

    augmented = augment(many, np.random.default_rng(1))

    left = augmented[:, 0, :, :20].mean((1, 2)) > augmented[:, 0, :, 40:].mean((1, 2))
    assert 70 < left.sum() < 130
    assert torch.equal(augmented, augment(many, np.random.default_rng(1)))
    assert not torch.equal(augmented, augment(many, np.random.default_rng(2)))


@pytest.mark.parametrize("side", [56, 112])
def test_patches_equal_those_of_the_processor(tiny_base, side):
    processor = build_processor(tiny_base, ModelShape(), side).image_processor
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, side, side, 3), dtype=np.uint8)

    expected = processor(images=list(pixels), return_tensors="pt")
    patches, grid = patchify(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, processor)

    assert grid.tolist() == expected["image_grid_thw"].tolist()
    assert torch.allclose(patches, expected["pixel_values"], atol=1e-5)
