"""The image tower of COMPEER-nano learns faces: `python -m training vision <config.toml>`.

A linear head on the mean image token tells the seven expressions apart; the head is thrown away.
SFT then only has to connect what the tower already sees with words. The tower's own accuracy is
written beside the weights, so that a card can report what the pictures are worth.
"""

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling, Transform, Transpose
from PIL.ImageEnhance import Brightness, Contrast
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.images import read_image
from compeer_core.processing import ImageOnlyQwen2_5_VLProcessor
from training.faces import FACE_CLASSES, Face, read_faces
from training.nano.architecture import NanoShape

logger = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[vision]`: which faces, how long."""

    faces: Path
    """Folder of the packed faces."""
    model: Path
    """Checkpoint whose tower is trained, for example `runs/nano/pretrain/model`."""
    output: Path
    """Folder that receives the checkpoint with its trained tower and its processor."""
    image_side: int = 112
    """Images are scaled to at most this side squared, in pixels."""
    epochs: int = 10
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.05
    max_photos: int | None = Field(default=None, ge=1)
    """Use at most so many photos of each split, drawn by the seed; None uses all."""
    seed: int = 0


def build_processor(
    tokenizer_folder: Path, shape: NanoShape, image_side: int
) -> ImageOnlyQwen2_5_VLProcessor:
    """Return the processor of a nano checkpoint: one small image is at most 16 tokens."""
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=shape.patch_size,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": (4 * shape.patch_size) ** 2, "longest_edge": image_side**2},
    )
    return ImageOnlyQwen2_5_VLProcessor(
        image_processor, AutoTokenizer.from_pretrained(tokenizer_folder)
    )


class _Faces:
    """All faces as pixels of one size, patched by the processor in batches."""

    def __init__(
        self, faces: list[Face], processor: ImageOnlyQwen2_5_VLProcessor, side: int
    ) -> None:
        self._images = [
            read_image(face.data).to_pil().convert("RGB").resize((side, side)) for face in faces
        ]
        self.labels = torch.tensor([FACE_CLASSES.index(face.face_class) for face in faces])
        self._processor = processor.image_processor

    def __len__(self) -> int:
        return len(self._images)

    def batch(
        self, rows: Sequence[int], rng: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return patches and grid of the chosen photos; with `rng` each is varied."""
        images = [self._images[row] for row in rows]
        if rng is not None:
            images = [varied(image, rng) for image in images]
        out = self._processor(images=images, return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]


def varied(photo: Image, rng: np.random.Generator) -> Image:
    """Return a photo as it might also have been taken, so that no pass shows the same one again.

    Half are mirrored. Each is turned by up to 15 degrees, 0.85 to 1.15 times as large, moved by up to
    8 % of its side, and has 0.7 to 1.3 times its contrast and 0.75 to 1.25 times its brightness. What
    was outside the photo is black.
    """
    if rng.random() < 0.5:
        photo = photo.transpose(Transpose.FLIP_LEFT_RIGHT)
    angle, zoom = math.radians(rng.uniform(-15, 15)), rng.uniform(0.85, 1.15)
    across, down = (side / 2 for side in photo.size)
    right, below = rng.uniform(-0.08, 0.08, 2) * photo.size
    # Pillow asks where in the old photo a point of the new one comes from, whose middle stays.
    cosine, sine = math.cos(angle) / zoom, math.sin(angle) / zoom
    matrix = (
        *(cosine, sine, across - cosine * (across + right) - sine * (down + below)),
        *(-sine, cosine, down + sine * (across + right) - cosine * (down + below)),
    )
    photo = photo.transform(photo.size, Transform.AFFINE, matrix, Resampling.BILINEAR)
    photo = Contrast(photo).enhance(rng.uniform(0.7, 1.3))
    return Brightness(photo).enhance(rng.uniform(0.75, 1.25))


class _Classifier(nn.Module):
    def __init__(self, tower: nn.Module, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(width, len(FACE_CLASSES))

    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        tokens = self.tower(pixels, grid_thw=grid).pooler_output
        means = tokens.view(len(grid), -1, tokens.shape[-1]).mean(1)
        logits: Tensor = self.head(functional.normalize(means, dim=-1) * math.sqrt(means.shape[-1]))
        return logits


def _accuracy(classifier: _Classifier, faces: _Faces) -> tuple[float, dict[str, float]]:
    """Return the share of right classes in all, and by each class that there are photos of."""
    predictions = []
    classifier.eval()
    with torch.no_grad():
        for start in range(0, len(faces), 128):
            rows = list(range(start, min(start + 128, len(faces))))
            predictions.append(classifier(*faces.batch(rows)).argmax(-1))
    classifier.train()
    right = torch.cat(predictions) == faces.labels
    by_class = {
        name: right[faces.labels == index].float().mean().item()
        for index, name in enumerate(FACE_CLASSES)
        if (faces.labels == index).any()
    }
    return right.float().mean().item(), by_class


def _drawn(faces: list[Face], split: str, most: int | None, rng: np.random.Generator) -> list[Face]:
    """Return the photos of a split, at most `most` of them.

    Raises:
        ConfigError: The split has no photo.
    """
    chosen = [face for face in faces if face.split == split]
    if not chosen:
        raise ConfigError(f"the folder of faces has no photo in its {split} part")
    if most is None or len(chosen) <= most:
        return chosen
    return [chosen[i] for i in sorted(rng.choice(len(chosen), size=most, replace=False))]


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train the tower on the train photos and save the checkpoint with its processor."""
    if resume is not None:
        raise ConfigError("the image tower's training cannot be resumed: begin it again")
    if not (config.model / "config.json").is_file():
        raise ConfigError(f"{config.model}: no checkpoint there (the pretrain stage writes it)")
    faces = read_faces(config.faces)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(config.model)
    sizes: Any = model.config
    shape = NanoShape(patch_size=sizes.vision_config.patch_size)
    processor = build_processor(config.model, shape, config.image_side)
    if dry_run:
        return
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    train, valid = (
        _Faces(_drawn(faces, split, config.max_photos, rng), processor, config.image_side)
        for split in ("train", "valid")
    )
    classifier = _Classifier(model.model.visual, sizes.text_config.hidden_size)
    optimizer = torch.optim.AdamW(
        classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay
    )
    steps_an_epoch = max(1, len(train) // config.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        config.lr,
        total_steps=steps_an_epoch * config.epochs,
        pct_start=0.1001,  # with a tenth of just ten steps, torch divides by zero
    )
    report: dict[str, object] = {}
    for epoch in range(config.epochs):
        order = rng.permutation(len(train)).tolist()
        total = 0.0
        for step in range(steps_an_epoch):
            rows = order[step * config.batch_size : (step + 1) * config.batch_size]
            pixels, grid = train.batch(rows, rng)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = classifier(pixels, grid)
            loss = functional.cross_entropy(logits.float(), train.labels[rows], label_smoothing=0.1)
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            total += loss.item()
        accuracy, by_class = _accuracy(classifier, valid)
        report = {
            "epoch": epoch + 1,
            "train_loss": total / steps_an_epoch,
            "validation_photos": len(valid),
            "validation_accuracy": accuracy,
            "by_class": by_class,
        }
        logger.info("%s", report)
        # After each epoch, so that a run that is cut short leaves what it has learnt.
        model.save_pretrained(config.output)
        processor.save_pretrained(config.output)
        (config.output / "vision.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
