"""Photos of faces as batches of pixels, varied from pass to pass, and cut into the patches of an image tower.

All photos lie in memory at one size. A batch is turned, moved and lit by a few operations on all of its photos
at once (docs/experiments.md has what that saves).
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
        names: Of their files.
        labels: The class of each, as its place in `FACE_CLASSES`; shape (photos).
    """

    def __init__(self, faces: Sequence[Face], side: int) -> None:
        """Read the photos and scale each to `side` pixels squared."""
        self.names = tuple(face.file for face in faces)
        self.labels = torch.tensor([FACE_CLASSES.index(face.face_class) for face in faces])
        self._pixels = torch.stack([_pixels(face, side) for face in faces])

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Sequence[int], rng: np.random.Generator | None = None) -> Tensor:
        """Return chosen photos, shape (chosen, 3, side, side), in [0, 1]; with `rng` each is varied."""
        photos = self._pixels[torch.as_tensor(rows)].float() / 255
        return photos if rng is None else varied(photos, rng)


def _pixels(face: Face, side: int) -> Tensor:
    image = read_image(face.data).to_pil().convert("RGB").resize((side, side))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def varied(photos: Tensor, rng: np.random.Generator) -> Tensor:
    """Return photos as they might also have been taken, so that no pass shows the same ones again.

    Half are mirrored. Each is turned by up to 15 degrees, 0.85 to 1.15 times as large, moved by up to
    8 % of its side, and has 0.7 to 1.3 times its contrast and 0.75 to 1.25 times its brightness. What
    was outside the photo is black. In a quarter of them a rectangle of an eighth to a half of each side is
    one grey (random erasing, Zhong et al. 2020).

    Args:
        photos: Of shape (photos, channels, side, side), in [0, 1].
        rng: Draws all of this.
    """
    count = len(photos)

    def draw(low: float, high: float) -> Tensor:
        return torch.from_numpy(rng.uniform(low, high, count)).float()

    angle, zoom = torch.deg2rad(draw(-15, 15)), draw(0.85, 1.15)
    mirrored = torch.where(torch.from_numpy(rng.random(count) < 0.5), -1.0, 1.0)
    cosine, sine = torch.cos(angle) / zoom, torch.sin(angle) / zoom
    right, down = draw(-0.16, 0.16), draw(-0.16, 0.16)  # sides are 2 long here
    # Where in the old photo a point of the new one comes from.
    places = torch.stack(
        [
            torch.stack([mirrored * cosine, sine, right], 1),
            torch.stack([-mirrored * sine, cosine, down], 1),
        ],
        1,
    )
    grid = functional.affine_grid(places, list(photos.shape), align_corners=False)
    photos = functional.grid_sample(photos, grid, align_corners=False)
    grey = photos.mean((1, 2, 3), keepdim=True)
    photos = (photos - grey) * draw(0.7, 1.3).view(-1, 1, 1, 1) + grey
    photos = (photos * draw(0.75, 1.25).view(-1, 1, 1, 1)).clamp(0, 1)
    return _erased(photos, rng)


def _erased(photos: Tensor, rng: np.random.Generator) -> Tensor:
    side = photos.shape[-1]
    for place in np.flatnonzero(rng.random(len(photos)) < 0.25):
        height, width = rng.integers(side // 8, side // 2, 2, endpoint=True)
        top, left = rng.integers(0, side - height + 1), rng.integers(0, side - width + 1)
        photos[place, :, top : top + height, left : left + width] = rng.random()
    return photos


def patched(photos: Tensor, processor: Qwen2VLImageProcessorPil) -> tuple[Tensor, Tensor]:
    """Cut photos into what an image tower reads, as the processor does with photos of this size.

    Args:
        photos: Of shape (photos, 3, side, side), in [0, 1]; the side is a multiple of a merged patch.
        processor: Of the checkpoint; its means, deviations and patch sizes are used.

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
    cut = ((photos - mean) / deviation).view(
        count, channels, blocks, merge, patch, blocks, merge, patch
    )
    # photo, block down and across, patch of the block down and across, channel, row, column
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :]
    cut = cut.expand(*(-1,) * 6, repeats, -1, -1)
    grid = torch.tensor([[1, blocks * merge, blocks * merge]]).repeat(count, 1)
    return cut.flatten(0, 4).flatten(1), grid
