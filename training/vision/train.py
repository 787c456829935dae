"""The image tower of COMPEER-nano learns faces: `python -m training vision <config.toml>`.

Each image token is to tell the seven expressions apart by itself. The tower may also learn from what a
convolutional network says of each photo as it was varied: `teacher` (distillation,
https://arxiv.org/abs/2012.12877). At the end its tokens are laid along words for the classes (`face_tokens`): SFT
then only has to connect what the tower already sees with what is said of it. The tower's own accuracy is written
beside the weights, so that a card can report what the pictures are worth, and so is what it takes each photo for.

A run stopped at any point continues from its last checkpoint with the same photos.
"""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.errors import ConfigError
from compeer_core.processing import ImageOnlyQwen2_5_VLProcessor
from training.data.face_tokens import embeddings_of, even_handed, speaking_layer, word_vectors
from training.data.faces import FACE_CLASSES, read_faces
from training.finetune.architecture import ModelShape
from training.finetune.optimisation import Optimisers, open_run, split_for_muon
from training.vision.expressions import (
    PhotoSchedule,
    learn_expressions,
    looked_at,
    photos_of_splits,
    smoothed,
)
from training.vision.photo_batches import patched
from training.vision.teacher import read_teacher

REPORT = "vision.json"
"""What the tower is worth, in the run's directory."""
READINGS = "readings.json"
"""What the tower takes each photo for, by the photo's file; in the run's directory."""


class Config(PhotoSchedule):
    """`[vision]`: which faces, how long."""

    model: Path
    """Checkpoint whose tower is trained, for example `runs/nano/pretrain/model`. The run directory's
    `model` is that checkpoint with its trained tower and its processor."""
    muon_lr: float = 0.01
    """Of the matrices of the tower's layers."""
    adamw_lr: float = 1e-3
    """Of the rest of the tower, and of the head."""
    teacher: Path | None = None
    """Run directory of a teacher (`vision teacher`); None learns from the labels alone."""
    teacher_share: float = Field(default=0.7, ge=0, le=1)
    """Share of the teacher's probabilities in what is to be learnt; the rest are the smoothed labels."""
    teacher_temperature: float = Field(default=1.5, gt=0)
    """The teacher's logits are divided by it: above 1 they say more about the likeness of classes."""


def build_processor(
    tokenizer_folder: Path, shape: ModelShape, image_side: int
) -> ImageOnlyQwen2_5_VLProcessor:
    """Return the processor of a nano checkpoint: every image, small or large, comes at one size.

    The tower knows no other: it was trained with photos of `image_side`.

    Args:
        tokenizer_folder: Where the tokenizer lies.
        shape: Of the model.
        image_side: An image is scaled to about this side squared, in pixels: of 112, it is 16 tokens.
    """
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=shape.patch_size,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": image_side**2, "longest_edge": image_side**2},
    )
    return ImageOnlyQwen2_5_VLProcessor(
        image_processor, AutoTokenizer.from_pretrained(tokenizer_folder)
    )


class _Classifier(nn.Module):
    """A tower; while it learns, its last layer gives each image token logits."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        values = tower.merger.mlp[-1].in_features
        tower.merger.mlp[-1] = nn.Linear(values, len(FACE_CLASSES))

    @property
    def head(self) -> nn.Linear:
        last: nn.Linear = self.tower.merger.mlp[-1]
        return last

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        """Return logits, shape (photos, tokens, classes)."""
        tokens: Tensor = self.tower(patches, grid_thw=grid).pooler_output
        return tokens.view(len(grid), -1, tokens.shape[-1]).float()

    def speak(self, added: Tensor, logits: Tensor, words: Tensor, length: float) -> None:
        """Let the tower make tokens from now on; see `speaking_layer`."""
        weight, bias = speaking_layer(self.head, added, logits, words, length)
        last = nn.Linear(weight.shape[1], weight.shape[0])
        last.load_state_dict({"weight": weight, "bias": bias})
        self.tower.merger.mlp[-1] = last


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


def _targets(photos: Tensor, labels: Tensor, teacher: nn.Module | None, config: Config) -> Tensor:
    """Return the probabilities to be learnt, shape (photos, classes)."""
    targets = smoothed(labels, config)
    if teacher is None:
        return targets
    with torch.no_grad(), torch.autocast(config.device_type, dtype=torch.bfloat16):
        said = torch.softmax(teacher(photos) / config.teacher_temperature, -1)
    return torch.lerp(targets, said, config.teacher_share)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train the tower to `config.steps`, or continue a run; Ctrl-C saves first."""
    if not (config.model / "config.json").is_file():
        raise ConfigError(f"{config.model}: no checkpoint there (the pretrain stage writes it)")
    faces = read_faces(config.faces)
    model = load_model(config.model, torch.float32)
    sizes: Any = model.config
    shape = ModelShape(patch_size=sizes.vision_config.patch_size)
    if config.image_side % (2 * shape.patch_size):
        raise ConfigError(
            f"image_side is {config.image_side}; it must be a multiple of {2 * shape.patch_size}"
        )
    processor = build_processor(config.model, shape, config.image_side)
    teacher = None if config.teacher is None else read_teacher(config.teacher).to(config.device)
    if dry_run:
        return
    directory = open_run(config.output, config, resume)
    torch.manual_seed(config.seed)
    photos = photos_of_splits(faces, config)
    tower = model.model.visual
    attend_at_once(tower)
    classifier = _Classifier(tower).to(config.device)
    if config.compile:
        for block in tower.blocks:
            block.compile()
    matrices, rest = split_for_muon(classifier, tower.blocks)
    optimisers = Optimisers(matrices, [(rest, config.adamw_lr)], config)
    cut = processor.image_processor

    def logits_of(photos: Tensor) -> Tensor:
        patches, grid = patched(photos, cut)
        logits: Tensor = classifier(patches.to(config.device), grid.to(config.device))
        return logits

    def targets_of(photos: Tensor, labels: Tensor) -> Tensor:
        return _targets(photos.to(config.device), labels.to(config.device), teacher, config)

    report = learn_expressions(
        classifier, optimisers, config, directory, photos, logits_of, targets_of
    )
    (directory.path / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")
    classifier.eval()
    taken_for = {part: looked_at(logits_of, part) for part in photos}
    classifier.cpu()
    learnt, _ = photos
    added = even_handed(taken_for[learnt], learnt.labels)
    (directory.path / READINGS).write_text(
        json.dumps(
            {
                name: FACE_CLASSES[place]
                for part, logits in taken_for.items()
                for name, place in zip(
                    part.names, (logits + added).argmax(-1).tolist(), strict=True
                )
            },
            indent=0,
        ),
        encoding="utf-8",
    )
    embeddings = embeddings_of(model)
    classifier.speak(
        added,
        taken_for[learnt],
        word_vectors(embeddings, processor.tokenizer),
        embeddings.norm(dim=-1).mean().item(),
    )
    model.save_pretrained(directory.path / "model")
    processor.save_pretrained(directory.path / "model")
