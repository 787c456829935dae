"""The image tower of the base, carried over from a smaller model: `python -m training base tower <config.toml>`.

The tower of a checkpoint that `vision` trained keeps its weights. Only its last layer is made anew: a logistic
regression reads the expressions from what comes before it, and what it reads is laid along words of the new
language model (`face_tokens`). What it takes each photo for is written beside the checkpoint, so that SFT can
show photos that the tower reads as what is said of them.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from compeer_core.backends.transformers_.packed_weights import (
    PACKED,
    load_model,
    read_packed,
    save_packed,
)
from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.processing import load_processor
from training.data.face_tokens import embeddings_of, even_handed, speaking_layer, word_vectors
from training.data.faces import FACE_CLASSES, Face, read_faces
from training.vision.photo_batches import PhotoBatches, patched
from training.vision.train import READINGS, REPORT, attend_at_once

_log = logging.getLogger(__name__)

_VISUAL = "model.visual."
_LAST = f"{_VISUAL}merger.mlp.2."


class Config(FrozenModel):
    """`[base tower]`: whose tower, which photos."""

    base: Path
    """Checkpoint of the `base` stage."""
    tower: Path
    """Checkpoint whose image tower is taken; its tower has the base's sizes."""
    faces: Path
    """Folder of the packed faces."""
    output: Path
    """Receives `model`, `readings.json` and `vision.json`."""
    max_photos: int | None = Field(default=None, ge=1)
    """Use the first so many photos of each split; None uses all."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Carry the tower over; a dry run looks for the two checkpoints and the photos."""
    if resume is not None:
        raise ConfigError("base tower takes minutes and cannot be resumed: begin it again")
    if not (config.base / PACKED).is_file():
        raise CheckpointError(f"{config.base}: no {PACKED} there (the base stage writes it)")
    for folder in (config.base, config.tower):
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: no checkpoint there")
    faces = read_faces(config.faces)
    if dry_run:
        return
    source = load_model(config.tower, torch.float32)
    target = load_model(config.base, torch.float32)
    _check_sizes(config, source.config.vision_config, target.config.vision_config)
    processor = load_processor(config.base)
    side = round(processor.image_processor.size["longest_edge"] ** 0.5)
    parts = [_part(faces, split, config.max_photos, side) for split in ("train", "valid")]
    values = [_values(source.model.visual, part, processor.image_processor) for part in parts]
    head = _fitted(values[0].mean(dim=1), parts[0].labels)
    logits = [head(each.mean(dim=1)).detach() for each in values]
    added = even_handed(logits[0], parts[0].labels)
    words = word_vectors(embeddings_of(target), processor.tokenizer)
    length = embeddings_of(target).norm(dim=-1).mean().item()
    weight, bias = speaking_layer(head, added, logits[0], words, length)
    tower = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in source.state_dict().items()
        if name.startswith(_VISUAL)
    }
    tower |= {f"{_LAST}weight": weight.bfloat16(), f"{_LAST}bias": bias.bfloat16()}
    _write(config, tower, parts, logits, added)


def _check_sizes(config: Config, theirs: Any, ours: Any) -> None:
    names = ("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size", "window_size")
    for name in names:
        if getattr(theirs, name) != getattr(ours, name):
            raise CheckpointError(
                f"{config.tower}: {name} of its image tower is {getattr(theirs, name)}, of "
                f"{config.base} {getattr(ours, name)}; take a tower of the same sizes"
            )


def _part(faces: list[Face], split: str, most: int | None, side: int) -> PhotoBatches:
    chosen = [face for face in faces if face.split == split][:most]
    if not chosen:
        raise ConfigError(f"the folder of faces has no photo in its {split} part")
    return PhotoBatches(chosen, side)


def _values(tower: Any, photos: PhotoBatches, image_processor: Any) -> Tensor:
    """Return what comes before the tower's last layer, shape (photos, tokens, values)."""
    attend_at_once(tower)
    last = tower.merger.mlp[2]
    tower.merger.mlp[2] = nn.Identity()
    batches = []
    with torch.inference_mode():
        for start in range(0, len(photos), 128):
            shown = photos.batch(range(start, min(start + 128, len(photos))))
            patches, grid = patched(shown, image_processor)
            read = tower(patches, grid_thw=grid).pooler_output
            batches.append(read.view(len(shown), -1, read.shape[-1]).half())
    tower.merger.mlp[2] = last
    return torch.cat(batches).float()


def _fitted(values: Tensor, labels: Tensor) -> nn.Linear:
    """Return the layer of a logistic regression, with its standardisation folded in."""
    mean, spread = values.mean(dim=0), values.std(dim=0).clamp(min=1e-6)
    model = LogisticRegression(C=0.03, max_iter=300)
    model.fit(((values - mean) / spread).numpy(), labels.numpy())
    classes = [int(label) for label in model.classes_]
    head = nn.Linear(values.shape[1], len(FACE_CLASSES)).requires_grad_(False)
    head.weight.zero_()
    head.bias.fill_(-10.0)  # a class without photos is never read
    weight = torch.from_numpy(np.asarray(model.coef_)).float() / spread
    head.weight[classes] = weight
    head.bias[classes] = torch.from_numpy(np.asarray(model.intercept_)).float() - weight @ mean
    return head


def _write(
    config: Config,
    tower: dict[str, Tensor],
    parts: list[PhotoBatches],
    logits: list[Tensor],
    added: Tensor,
) -> None:
    folder = config.output / "model"
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(config.base, folder)
    save_packed(folder, read_packed(config.base) | tower)
    readings = {
        name: FACE_CLASSES[place]
        for part, said in zip(parts, logits, strict=True)
        for name, place in zip(part.names, (said + added).argmax(-1).tolist(), strict=True)
    }
    right = logits[1].argmax(-1) == parts[1].labels
    report = {
        "validation_photos": len(right),
        "validation_accuracy": right.float().mean().item(),
        "by_class": {
            name: right[parts[1].labels == place].float().mean().item()
            for place, name in enumerate(FACE_CLASSES)
            if (parts[1].labels == place).any()
        },
    }
    _log.info("%.1f %% of %d validation photos", 100 * right.float().mean(), len(right))
    for file, content in ((READINGS, readings), (REPORT, report)):
        (config.output / file).write_text(json.dumps(content, indent=1), encoding="utf-8")
