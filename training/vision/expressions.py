"""What the two stages that learn expressions from photos share: their photos, their steps, their figures."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from compeer_core.errors import ConfigError
from training.common.run_directory import RunDirectory
from training.data.faces import FACE_CLASSES, Face
from training.finetune.optimisation import (
    CHECKPOINT,
    Optimisers,
    Schedule,
    load_checkpoint,
    run_steps,
)
from training.vision.photo_batches import PhotoBatches


class PhotoSchedule(Schedule):
    """Which photos, how many at a time, how long."""

    faces: Path
    """Folder of the packed faces."""
    output: Path
    """Run directory."""
    image_side: int = Field(default=112, gt=0)
    """Photos are scaled to this side, in pixels. An image tower asks for a multiple of a token's side:
    of 28, two patches of 14."""
    batch_size: int = Field(default=64, gt=0)
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    max_photos: int | None = Field(default=None, ge=1)
    """Use at most so many photos of each split, drawn by the seed; None uses all."""


def photos_of_splits(faces: list[Face], config: PhotoSchedule) -> tuple[PhotoBatches, PhotoBatches]:
    """Return the photos to be learnt and those of the validation part.

    Raises:
        ConfigError: A split has no photo.
    """
    rng = np.random.default_rng(config.seed)
    train, valid = (
        PhotoBatches(_drawn(faces, split, config.max_photos, rng), config.image_side)
        for split in ("train", "valid")
    )
    return train, valid


def _drawn(faces: list[Face], split: str, most: int | None, rng: np.random.Generator) -> list[Face]:
    chosen = [face for face in faces if face.split == split]
    if not chosen:
        raise ConfigError(f"the folder of faces has no photo in its {split} part")
    if most is None or len(chosen) <= most:
        return chosen
    return [chosen[i] for i in sorted(rng.choice(len(chosen), size=most, replace=False))]


def _steps(
    photos: PhotoBatches, config: PhotoSchedule, skip: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield varied photos and their labels for ever, from step `skip` on."""
    size = min(config.batch_size, len(photos))
    for number in itertools.count():
        order = np.random.default_rng([config.seed, number]).permutation(len(photos))
        for start in range(0, len(photos) - size + 1, size):
            if skip:
                skip -= 1
                continue
            rows = order[start : start + size].tolist()
            rng = np.random.default_rng([config.seed, number, start])
            yield photos.batch(rows, rng), photos.labels[rows]


def smoothed(labels: Tensor, config: PhotoSchedule) -> Tensor:
    """Return labels as probabilities, shape (photos, classes), a little of each given to all classes."""
    classes = len(FACE_CLASSES)
    sure = functional.one_hot(labels, classes) * (1 - config.label_smoothing)
    return sure + config.label_smoothing / classes


def learn_expressions(
    model: nn.Module,
    optimisers: Optimisers,
    config: PhotoSchedule,
    directory: RunDirectory,
    photos: tuple[PhotoBatches, PhotoBatches],
    logits_of: Callable[[Tensor], Tensor],
    targets_of: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, object]:
    """Make the steps that are left, and return what the model is worth then.

    Args:
        model: What is learnt and saved.
        optimisers: They move it.
        config: How long.
        directory: Of the run; in its metrics "tokens" are photos.
        photos: Those to be learnt, and those of the validation part.
        logits_of: Gives photos of shape (photos, 3, side, side) their logits, (photos, looks, classes): each
            look at a photo is to name it by itself, and in validation their mean does.
        targets_of: Gives photos and their labels the probabilities to be learnt.
    """
    train, valid = photos
    step = load_checkpoint(directory.path / CHECKPOINT, model, optimisers.all)
    directory.rewind(step)
    steps = _steps(train, config, skip=step)

    def learn() -> tuple[float, int]:
        shown, labels = next(steps)
        with torch.autocast(config.device_type, dtype=torch.bfloat16):
            logits = logits_of(shown)
        targets = targets_of(shown, labels)[:, None].expand_as(logits)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        loss.backward()
        return loss.item(), len(shown)

    def assess() -> tuple[float, Tensor]:
        model.eval()
        found = _assessed(logits_of, valid)
        model.train()
        return found

    def validate() -> float:
        loss, right = assess()
        directory.log("%.1f %% of %d photos named rightly", 100 * right.float().mean(), len(valid))
        return loss

    step = run_steps(model, optimisers, config, directory, step, learn, validate)
    _, right = assess()
    return {
        "steps": step,
        "passes": step * min(config.batch_size, len(train)) / len(train),
        "validation_photos": len(valid),
        "validation_accuracy": right.float().mean().item(),
        "by_class": {
            name: right[valid.labels == place].float().mean().item()
            for place, name in enumerate(FACE_CLASSES)
            if (valid.labels == place).any()
        },
    }


def looked_at(logits_of: Callable[[Tensor], Tensor], photos: PhotoBatches) -> Tensor:
    """Return the mean logits of photos as they are, shape (photos, classes)."""
    with torch.no_grad():
        found = [
            logits_of(photos.batch(range(start, min(start + 128, len(photos))))).mean(1).cpu()
            for start in range(0, len(photos), 128)
        ]
    return torch.cat(found)


def _assessed(logits_of: Callable[[Tensor], Tensor], photos: PhotoBatches) -> tuple[float, Tensor]:
    """Return the loss on photos as they are, in nats a photo, and which of them are named rightly."""
    logits = looked_at(logits_of, photos)
    loss = functional.cross_entropy(logits, photos.labels).item()
    return loss, logits.argmax(-1) == photos.labels
