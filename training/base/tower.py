"""Transfers an image tower to the base: `python -m training base tower <config.toml>`.

The tower of a checkpoint from the stage `vision` keeps its weights, except for its last layer. That is
replaced: a logistic regression predicts the expression from the layer's input, and the predictions are
mapped to word embeddings of the new language model (`face_tokens`). The predicted class of each photo
is saved, so that SFT can select photos whose prediction fits the text.
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
from training.stages import refuse_resume
from training.vision.expressions import accuracy_report, predicted_classes
from training.vision.photo_batches import PhotoBatches, patchify
from training.vision.train import READINGS, REPORT, use_batched_attention

_log = logging.getLogger(__name__)

_VISUAL = "model.visual."
_LAST = f"{_VISUAL}merger.mlp.2."


class Config(FrozenModel):
    """`[base tower]`: checkpoints and photos."""

    base: Path
    """Checkpoint of the `base` stage."""
    tower: Path
    """Checkpoint that provides the image tower, which must have the base's sizes."""
    faces: Path
    """Folder of the packed faces."""
    output: Path
    """Folder for `model`, `readings.json` and `vision.json`."""
    max_photos: int | None = Field(default=None, ge=1)
    """Use only the first photos of each split; None uses all."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Transfer the tower; a dry run checks that checkpoints and photos exist."""
    refuse_resume(resume, "base tower takes minutes and cannot be resumed")
    if not (config.base / PACKED).is_file():
        raise CheckpointError(f"{config.base}: contains no {PACKED} (the base stage writes it)")
    for folder in (config.base, config.tower):
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: not a checkpoint")
    faces = read_faces(config.faces)
    if dry_run:
        return
    source = load_model(config.tower, torch.float32)
    target = load_model(config.base, torch.float32)
    _check_sizes(config, source.config.vision_config, target.config.vision_config)
    processor = load_processor(config.base)
    side = round(processor.image_processor.size["longest_edge"] ** 0.5)
    parts = [_photos(faces, split, config.max_photos, side) for split in ("train", "valid")]
    features = [_features(source.model.visual, part, processor.image_processor) for part in parts]
    head = _fit_head(features[0].mean(dim=1), parts[0].labels)
    logits = [head(each.mean(dim=1)).detach() for each in features]
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
                f"{config.tower}: {name} of its image tower is {getattr(theirs, name)}, that of "
                f"{config.base} is {getattr(ours, name)}; use a tower of the same sizes"
            )


def _photos(faces: list[Face], split: str, most: int | None, side: int) -> PhotoBatches:
    chosen = [face for face in faces if face.split == split][:most]
    if not chosen:
        raise ConfigError(f"the folder of faces has no photo in its {split} split")
    return PhotoBatches(chosen, side)


def _features(tower: Any, photos: PhotoBatches, image_processor: Any) -> Tensor:
    """Return the input of the tower's last layer, shape (photos, tokens, features)."""
    use_batched_attention(tower)
    last = tower.merger.mlp[2]
    tower.merger.mlp[2] = nn.Identity()
    batches = []
    with torch.inference_mode():
        for start in range(0, len(photos), 128):
            batch = photos.batch(range(start, min(start + 128, len(photos))))
            patches, grid = patchify(batch, image_processor)
            features = tower(patches, grid_thw=grid).pooler_output
            batches.append(features.view(len(batch), -1, features.shape[-1]).half())
    tower.merger.mlp[2] = last
    return torch.cat(batches).float()


def _fit_head(features: Tensor, labels: Tensor) -> nn.Linear:
    """Return a logistic regression as a linear layer, including the standardisation."""
    mean, deviation = features.mean(dim=0), features.std(dim=0).clamp(min=1e-6)
    model = LogisticRegression(C=0.03, max_iter=300)
    model.fit(((features - mean) / deviation).numpy(), labels.numpy())
    classes = [int(label) for label in model.classes_]
    head = nn.Linear(features.shape[1], len(FACE_CLASSES)).requires_grad_(False)
    head.weight.zero_()
    head.bias.fill_(-10.0)  # classes without photos are never predicted
    weight = torch.from_numpy(np.asarray(model.coef_)).float() / deviation
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
    adjusted = zip(parts, (each + added for each in logits), strict=True)
    correct = logits[1].argmax(-1) == parts[1].labels
    _log.info("accuracy %.1f %% on %d photos", 100 * correct.float().mean(), len(correct))
    report = accuracy_report(correct, parts[1])
    for file, content in ((READINGS, predicted_classes(adjusted)), (REPORT, report)):
        (config.output / file).write_text(json.dumps(content, indent=1), encoding="utf-8")
