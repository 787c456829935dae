"""The image tower of COMPEER-nano learns faces: `python -m training vision <config.toml>`.

A linear head on the mean image token tells the seven expressions apart; the head is thrown away.
SFT then only has to connect what the tower already sees with words. The tower's own accuracy is
written beside the weights, so that a card can report what the pictures are worth.

A run stopped at any point continues from its last checkpoint with the same photos.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from compeer_core.errors import ConfigError
from compeer_core.processing import ImageOnlyQwen2_5_VLProcessor
from training.faces import FACE_CLASSES, Face, read_faces
from training.nano.architecture import NanoShape
from training.nano.photo_batches import PhotoBatches, patched
from training.optimisation import (
    CHECKPOINT,
    Optimisers,
    Schedule,
    forget_checkpoints,
    load_checkpoint,
    parted,
    run_steps,
)
from training.run_directory import RunDirectory

REPORT = "vision.json"
"""What the tower is worth, in the run's directory."""


class Config(Schedule):
    """`[vision]`: which faces, how long."""

    faces: Path
    """Folder of the packed faces."""
    model: Path
    """Checkpoint whose tower is trained, for example `runs/nano/pretrain/model`."""
    output: Path
    """Run directory: `model` is the checkpoint with its trained tower and its processor."""
    muon_lr: float = 0.01
    """Of the matrices of the tower's layers."""
    adamw_lr: float = 1e-3
    """Of the rest of the tower, and of the head."""
    image_side: int = 112
    """Photos are scaled to this side, in pixels: a multiple of 28 (two patches of 14)."""
    batch_size: int = Field(default=64, gt=0)
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    max_photos: int | None = Field(default=None, ge=1)
    """Use at most so many photos of each split, drawn by the seed; None uses all."""


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


class _Classifier(nn.Module):
    def __init__(self, tower: nn.Module, width: int) -> None:
        super().__init__()
        self.tower = tower
        self.head = nn.Linear(width, len(FACE_CLASSES))

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        tokens = self.tower(patches, grid_thw=grid).pooler_output
        means = tokens.view(len(grid), -1, tokens.shape[-1]).float().mean(1)
        logits: Tensor = self.head(functional.normalize(means, dim=-1) * math.sqrt(means.shape[-1]))
        return logits.float()


def equal_pictures_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attend within each picture of a batch whose pictures are all of one size.

    transformers' own implementations for processors go through the pictures one by one. Registered under a
    name of its own; the word "flash" in it makes transformers hand over the batch in one piece.

    Args:
        module: Not used.
        query: Shape (1, heads, pictures * patches, width of a head).
        key: As `query`.
        value: As `query`.
        attention_mask: None: nothing is masked.
        scaling: Of the scores.
        cu_seq_lens_q: Where each picture begins, and the end of the last.
        unused: What else transformers hands over.
    """
    pictures, heads, width = len(cu_seq_lens_q) - 1, query.shape[1], query.shape[3]
    query, key, value = (
        states[0].reshape(heads, pictures, -1, width).transpose(0, 1)
        for states in (query, key, value)
    )
    weights = torch.softmax((query @ key.transpose(2, 3)).float() * scaling, -1)
    attended = weights.to(value.dtype) @ value
    return attended.transpose(1, 2).reshape(1, -1, heads, width), None


_ATTENTION = "flash_equal_pictures"
AttentionInterface.register(_ATTENTION, equal_pictures_attention)


def attend_at_once(tower: PreTrainedModel) -> None:
    """Let a tower attend by `equal_pictures_attention`; from now on it reads pictures of one size."""
    # `set_attn_implementation` would look for a kernel by a name with "flash" in it.
    tower.config._attn_implementation = _ATTENTION


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


def _steps(photos: PhotoBatches, config: Config, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
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


def _assessed(
    classifier: _Classifier,
    photos: PhotoBatches,
    processor: Qwen2VLImageProcessorPil,
    device: str,
) -> tuple[float, Tensor]:
    """Return the loss on photos in nats a photo, and which of them are named rightly."""
    classifier.eval()
    found = []
    with torch.no_grad():
        for start in range(0, len(photos), 128):
            rows = list(range(start, min(start + 128, len(photos))))
            patches, grid = patched(photos.batch(rows), processor)
            found.append(classifier(patches.to(device), grid.to(device)).cpu())
    classifier.train()
    logits = torch.cat(found)
    loss = functional.cross_entropy(logits, photos.labels).item()
    return loss, logits.argmax(-1) == photos.labels


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train the tower to `config.steps`, or continue a run; Ctrl-C saves first."""
    if not (config.model / "config.json").is_file():
        raise ConfigError(f"{config.model}: no checkpoint there (the pretrain stage writes it)")
    faces = read_faces(config.faces)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(config.model, dtype=torch.float32)
    sizes: Any = model.config
    shape = NanoShape(patch_size=sizes.vision_config.patch_size)
    if config.image_side % (2 * shape.patch_size):
        raise ConfigError(
            f"image_side is {config.image_side}; it must be a multiple of {2 * shape.patch_size}"
        )
    processor = build_processor(config.model, shape, config.image_side)
    if dry_run:
        return
    directory = RunDirectory.open(
        resume or config.output, config, resume=resume is not None, may_change=config.resumable_keys
    )
    checkpoint = directory.path / CHECKPOINT
    if resume is None:
        forget_checkpoints(checkpoint)  # of a start that made no step, under another config
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    train, valid = (
        PhotoBatches(_drawn(faces, split, config.max_photos, rng), config.image_side)
        for split in ("train", "valid")
    )
    tower = model.model.visual
    attend_at_once(tower)
    classifier = _Classifier(tower, sizes.text_config.hidden_size).to(config.device)
    if config.compile:
        for block in tower.blocks:
            block.compile()
    matrices, rest = parted(classifier, tower.blocks)
    optimisers = Optimisers(matrices, [(rest, config.adamw_lr)], config)
    step = load_checkpoint(checkpoint, classifier, optimisers.all)
    directory.rewind(step)
    steps = _steps(train, config, skip=step)
    cut = processor.image_processor

    def learn() -> tuple[float, int]:
        photos, labels = next(steps)
        patches, grid = patched(photos, cut)
        with torch.autocast(config.device_type, dtype=torch.bfloat16):
            logits = classifier(patches.to(config.device), grid.to(config.device))
        loss = functional.cross_entropy(
            logits, labels.to(config.device), label_smoothing=config.label_smoothing
        )
        loss.backward()
        return loss.item(), len(patches)

    def validate() -> float:
        loss, right = _assessed(classifier, valid, cut, config.device)
        directory.log("%.1f %% of %d photos named rightly", 100 * right.float().mean(), len(valid))
        return loss

    step = run_steps(classifier, optimisers, config, directory, step, learn, validate)
    _, right = _assessed(classifier, valid, cut, config.device)
    report = {
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
    (directory.path / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")
    model.save_pretrained(directory.path / "model")
    processor.save_pretrained(directory.path / "model")
