"""Batches of face photos, with augmentation, and their patches for an image tower.

All photos are in memory at one size. Augmentation is vectorised over a batch (docs/experiments.md has
timings).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from compeer_core.images import read_image
from training.data.faces import FACE_CLASSES, Face


class PhotoBatches:
    """All photos of a split.

    Attributes:
        names: File names.
        labels: Class indices in `FACE_CLASSES`, shape (photos,).
    """

    def __init__(self, faces: Sequence[Face], side: int) -> None:
        """Read the photos and scale each to `side` pixels squared."""
        self.names = tuple(face.file for face in faces)
        self.labels = torch.tensor([FACE_CLASSES.index(face.face_class) for face in faces])
        self._pixels = torch.stack([_pixels(face, side) for face in faces])

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> Tensor:
        """Return photos, shape (rows, 3, side, side), in [0, 1]; augmented if `rng` is given."""
        photos = self._pixels[torch.as_tensor(rows)].float() / 255
        return photos if rng is None else augment(photos, rng)


def _pixels(face: Face, side: int) -> Tensor:
    image = read_image(face.data).to_pil().convert("RGB").resize((side, side))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def augment(photos: Tensor, rng: np.random.Generator) -> Tensor:
    """Return randomly augmented photos.

    Half are mirrored. Each is rotated by up to 15 degrees, scaled by 0.85 to 1.15, shifted by up to 8 % of
    its side, with 0.7 to 1.3 times the contrast and 0.75 to 1.25 times the brightness; pixels from outside
    are black. A quarter get a uniform grey rectangle of an eighth to a half of each side (random erasing,
    Zhong et al. 2020).

    Args:
        photos: Shape (photos, channels, side, side), in [0, 1].
        rng: Random generator.
    """
    count = len(photos)

    def draw(low: float, high: float) -> Tensor:
        return torch.from_numpy(rng.uniform(low, high, count)).float()

    angle, zoom = torch.deg2rad(draw(-15, 15)), draw(0.85, 1.15)
    mirrored = torch.where(torch.from_numpy(rng.random(count) < 0.5), -1.0, 1.0)
    cosine, sine = torch.cos(angle) / zoom, torch.sin(angle) / zoom
    right, down = draw(-0.16, 0.16), draw(-0.16, 0.16)  # the side is 2 in these coordinates
    # Maps points of the result to points of the original.
    transform = torch.stack(
        [
            torch.stack([mirrored * cosine, sine, right], 1),
            torch.stack([-mirrored * sine, cosine, down], 1),
        ],
        1,
    )
    grid = functional.affine_grid(transform, list(photos.shape), align_corners=False)
    photos = functional.grid_sample(photos, grid, align_corners=False)
    grey = photos.mean((1, 2, 3), keepdim=True)
    photos = (photos - grey) * draw(0.7, 1.3).view(-1, 1, 1, 1) + grey
    photos = (photos * draw(0.75, 1.25).view(-1, 1, 1, 1)).clamp(0, 1)
    return _erase(photos, rng)


def _erase(photos: Tensor, rng: np.random.Generator) -> Tensor:
    side = photos.shape[-1]
    for place in np.flatnonzero(rng.random(len(photos)) < 0.25):
        height, width = rng.integers(side // 8, side // 2, 2, endpoint=True)
        top, left = rng.integers(0, side - height + 1), rng.integers(0, side - width + 1)
        photos[place, :, top : top + height, left : left + width] = rng.random()
    return photos


def patchify(photos: Tensor, processor: Qwen2VLImageProcessorPil) -> tuple[Tensor, Tensor]:
    """Return the patches that the processor would return for photos of this size.

    Args:
        photos: Shape (photos, 3, side, side), in [0, 1]; the side is a multiple of a merged patch.
        processor: Image processor of the checkpoint, for means, deviations and patch sizes.

    Returns:
        Patches, shape (photos * patches, values), and the grid (time, height, width) of each photo.
    """
    patch, merge, repeats = (
        processor.patch_size,
        processor.merge_size,
        processor.temporal_patch_size,
    )
    mean, deviation = (
        torch.tensor(values)[:, None, None]
        for values in (processor.image_mean, processor.image_std)
    )
    count, channels, side, _ = photos.shape
    blocks = side // (patch * merge)
    patches = ((photos - mean) / deviation).view(
        count, channels, blocks, merge, patch, blocks, merge, patch
    )
    # (photo, block row, block column, patch row, patch column, channel, pixel row, pixel column)
    patches = patches.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :]
    patches = patches.expand(*(-1,) * 6, repeats, -1, -1)
    grid = torch.tensor([[1, blocks * merge, blocks * merge]]).repeat(count, 1)
    return patches.flatten(0, 4).flatten(1), grid
