"""Shared by the two stages that train on photos of expressions: data, training loop, report."""

import itertools
from collections.abc import Callable, Iterable, Iterator
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
    """Photos, batch size and schedule."""

    faces: Path
    """Folder of the packed faces."""
    output: Path
    """Run directory."""
    image_side: int = Field(default=112, gt=0)
    """Photos are scaled to this side, in pixels. For an image tower it must be a multiple of the side of
    a token: 28, two patches of 14."""
    batch_size: int = Field(default=64, gt=0)
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    max_photos: int | None = Field(default=None, ge=1)
    """Maximum number of photos of each split, sampled by the seed; None uses all."""
    compile: bool = False
    """Compile the forward pass: 1.2 to 1.4 times faster on a CPU; needs a C++ compiler."""

    @property
    def resumable_keys(self) -> frozenset[str]:
        return super().resumable_keys | {"compile"}


def photos_of_splits(faces: list[Face], config: PhotoSchedule) -> tuple[PhotoBatches, PhotoBatches]:
    """Return the photos of the training and the validation split.

    Raises:
        ConfigError: A split has no photo.
    """
    rng = np.random.default_rng(config.seed)
    train, valid = (
        PhotoBatches(_sample(faces, split, config.max_photos, rng), config.image_side)
        for split in ("train", "valid")
    )
    return train, valid


def _sample(
    faces: list[Face], split: str, most: int | None, rng: np.random.Generator
) -> list[Face]:
    chosen = [face for face in faces if face.split == split]
    if not chosen:
        raise ConfigError(f"the folder of faces has no photo in its {split} split")
    if most is None or len(chosen) <= most:
        return chosen
    return [chosen[i] for i in sorted(rng.choice(len(chosen), size=most, replace=False))]


def _training_batches(
    photos: PhotoBatches, config: PhotoSchedule, skip: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield augmented photos and their labels endlessly, starting at step `skip`."""
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


def smooth_labels(labels: Tensor, config: PhotoSchedule) -> Tensor:
    """Return smoothed labels, shape (photos, classes)."""
    classes = len(FACE_CLASSES)
    hard = functional.one_hot(labels, classes) * (1 - config.label_smoothing)
    return hard + config.label_smoothing / classes


def learn_expressions(
    model: nn.Module,
    optimisers: Optimisers,
    config: PhotoSchedule,
    directory: RunDirectory,
    photos: tuple[PhotoBatches, PhotoBatches],
    logits_of: Callable[[Tensor], Tensor],
    targets_of: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, object]:
    """Run the remaining steps and return a report on the model.

    Args:
        model: Model to train and save.
        optimisers: Optimisers of its weights.
        config: The stage's config.
        directory: The run's directory; "tokens" in its metrics are photos.
        photos: Photos of the training and the validation split.
        logits_of: Maps photos, shape (photos, 3, side, side), to logits, shape (photos, views, classes).
            The loss is on every view, validation on their mean.
        targets_of: Maps photos and labels to target probabilities, shape (photos, classes).
    """
    train, valid = photos
    step = load_checkpoint(directory.path / CHECKPOINT, model, optimisers.all)
    directory.rewind(step)
    batches = _training_batches(train, config, skip=step)

    def learn() -> tuple[float, int]:
        batch, labels = next(batches)
        with torch.autocast(config.device_type, dtype=torch.bfloat16):
            logits = logits_of(batch)
        targets = targets_of(batch, labels)[:, None].expand_as(logits)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
        loss.backward()
        return loss.item(), len(batch)

    def evaluate() -> tuple[float, Tensor]:
        model.eval()
        logits = mean_logits(logits_of, valid)
        model.train()
        loss = functional.cross_entropy(logits, valid.labels).item()
        return loss, logits.argmax(-1) == valid.labels

    def validate() -> float:
        loss, correct = evaluate()
        directory.log("accuracy %.1f %% on %d photos", 100 * correct.float().mean(), len(valid))
        return loss

    step = run_steps(model, optimisers, config, directory, step, learn, validate)
    return {
        "steps": step,
        "passes": step * min(config.batch_size, len(train)) / len(train),
        **accuracy_report(evaluate()[1], valid),
    }


def mean_logits(logits_of: Callable[[Tensor], Tensor], photos: PhotoBatches) -> Tensor:
    """Return the logits of photos without augmentation, mean over views, shape (photos, classes)."""
    with torch.no_grad():
        logits = [
            logits_of(photos.batch(range(start, min(start + 128, len(photos))))).mean(1).cpu()
            for start in range(0, len(photos), 128)
        ]
    return torch.cat(logits)


def accuracy_report(correct: Tensor, photos: PhotoBatches) -> dict[str, object]:
    """Return the accuracy on photos, overall and for each class that has photos."""
    return {
        "validation_photos": len(correct),
        "validation_accuracy": correct.float().mean().item(),
        "by_class": {
            name: correct[photos.labels == number].float().mean().item()
            for number, name in enumerate(FACE_CLASSES)
            if (photos.labels == number).any()
        },
    }


def predicted_classes(parts: Iterable[tuple[PhotoBatches, Tensor]]) -> dict[str, str]:
    """Return the predicted class of each photo by file name, from logits (photos, classes)."""
    return {
        name: FACE_CLASSES[number]
        for photos, logits in parts
        for name, number in zip(photos.names, logits.argmax(-1).tolist(), strict=True)
    }
