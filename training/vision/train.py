"""Trains the image tower of a small model on faces: `python -m training vision <config.toml>`.

Each image token learns to predict the seven expressions, optionally by distillation from a CNN
(`teacher`, https://arxiv.org/abs/2012.12877). Finally the tower's output is mapped to word embeddings of
the classes (`face_tokens`), so that SFT only has to connect them to the text. The accuracy and the
predicted class of each photo are saved in the run directory.

An interrupted run resumes from its last checkpoint with the same data order.
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

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.errors import ConfigError
from compeer_core.processing import ImageOnlyQwen2_5_VLProcessor
from training.data.face_tokens import embeddings_of, even_handed, speaking_layer, word_vectors
from training.data.faces import FACE_CLASSES, read_faces
from training.finetune.architecture import ModelShape, fixed_size_image_processor
from training.finetune.optimisation import Optimisers, open_run, split_for_muon
from training.vision.expressions import (
    PhotoSchedule,
    learn_expressions,
    mean_logits,
    photos_of_splits,
    predicted_classes,
    smooth_labels,
)
from training.vision.photo_batches import patchify
from training.vision.teacher import read_teacher

REPORT = "vision.json"
"""The tower's accuracy, in the run directory."""
READINGS = "readings.json"
"""The tower's prediction for each photo by file name, in the run directory."""


class Config(PhotoSchedule):
    """`[vision]`: checkpoint, photos and schedule."""

    model: Path
    """Checkpoint whose tower is trained, such as `assets/checkpoints/compeer-small-base`. The run directory's `model`
    is this checkpoint with the trained tower and an image processor."""
    muon_lr: float = 0.01
    """Learning rate of the matrices of the tower's layers."""
    adamw_lr: float = 1e-3
    """Learning rate of the rest of the tower, and of the head."""
    teacher: Path | None = None
    """Run directory of a teacher (`vision teacher`); None trains on labels only."""
    teacher_share: float = Field(default=0.7, ge=0, le=1)
    """Weight of the teacher's probabilities in the targets; the rest are smoothed labels."""
    teacher_temperature: float = Field(default=1.5, gt=0)
    """Temperature of the teacher's probabilities."""


def build_processor(
    tokenizer_folder: Path, shape: ModelShape, image_side: int
) -> ImageOnlyQwen2_5_VLProcessor:
    """Return the processor of a checkpoint, which scales all images to the training size.

    Args:
        tokenizer_folder: Folder of the tokenizer.
        shape: Shape of the model.
        image_side: Images are scaled to about this side squared, in pixels; 112 gives 16 tokens.
    """
    return ImageOnlyQwen2_5_VLProcessor(
        fixed_size_image_processor(shape.patch_size, image_side),
        AutoTokenizer.from_pretrained(tokenizer_folder),
    )


class _Classifier(nn.Module):
    """A tower whose last layer is replaced by a classifier of each image token during training."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        features = tower.merger.mlp[-1].in_features
        tower.merger.mlp[-1] = nn.Linear(features, len(FACE_CLASSES))

    @property
    def head(self) -> nn.Linear:
        last: nn.Linear = self.tower.merger.mlp[-1]
        return last

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        """Return logits, shape (photos, tokens, classes)."""
        tokens: Tensor = self.tower(patches, grid_thw=grid).pooler_output
        return tokens.view(len(grid), -1, tokens.shape[-1]).float()

    def map_to_words(self, added: Tensor, logits: Tensor, words: Tensor, length: float) -> None:
        """Replace the classifier by a layer that outputs embeddings; see `speaking_layer`."""
        weight, bias = speaking_layer(self.head, added, logits, words, length)
        last = nn.Linear(weight.shape[1], weight.shape[0])
        last.load_state_dict({"weight": weight, "bias": bias})
        self.tower.merger.mlp[-1] = last


def equal_sizes_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each image of a batch whose images all have the same size.

    On a CPU, transformers' own implementations loop over the images. "flash" in the registered name makes
    transformers pass the batch in one piece.

    Args:
        module: Ignored.
        query: Shape (1, heads, images * patches, head dimension).
        key: Shape of `query`.
        value: Shape of `query`.
        attention_mask: None: nothing is masked.
        scaling: Factor of the attention scores.
        cu_seq_lens_q: Cumulative sequence lengths, shape (images + 1,).
        unused: Further arguments of transformers, ignored.
    """
    images, heads, width = len(cu_seq_lens_q) - 1, query.shape[1], query.shape[3]
    query, key, value = (
        states[0].reshape(heads, images, -1, width).transpose(0, 1)
        for states in (query, key, value)
    )
    weights = torch.softmax((query @ key.transpose(2, 3)).float() * scaling, -1)
    output = weights.to(value.dtype) @ value
    return output.transpose(1, 2).reshape(1, -1, heads, width), None


_ATTENTION = "flash_equal_sizes"
AttentionInterface.register(_ATTENTION, equal_sizes_attention)


def use_batched_attention(tower: PreTrainedModel) -> None:
    """Switch a tower to `equal_sizes_attention`: its batches must have images of one size."""
    # `set_attn_implementation` would search for a kernel because of "flash" in the name.
    tower.config._attn_implementation = _ATTENTION


def _targets(photos: Tensor, labels: Tensor, teacher: nn.Module | None, config: Config) -> Tensor:
    """Return target probabilities, shape (photos, classes)."""
    targets = smooth_labels(labels, config)
    if teacher is None:
        return targets
    with torch.no_grad(), torch.autocast(config.device_type, dtype=torch.bfloat16):
        soft_labels = torch.softmax(teacher(photos) / config.teacher_temperature, -1)
    return torch.lerp(targets, soft_labels, config.teacher_share)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train the tower for `config.steps` steps, or resume a run; Ctrl-C saves first."""
    if not (config.model / "config.json").is_file():
        raise ConfigError(f"{config.model}: not a checkpoint")
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
    use_batched_attention(tower)
    classifier = _Classifier(tower).to(config.device)
    if config.compile:
        for block in tower.blocks:
            block.compile()
    matrices, rest = split_for_muon(classifier, tower.blocks)
    optimisers = Optimisers(matrices, [(rest, config.adamw_lr)], config, config.muon_lr)
    image_processor = processor.image_processor

    def logits_of(photos: Tensor) -> Tensor:
        patches, grid = patchify(photos, image_processor)
        logits: Tensor = classifier(patches.to(config.device), grid.to(config.device))
        return logits

    def targets_of(photos: Tensor, labels: Tensor) -> Tensor:
        return _targets(photos.to(config.device), labels.to(config.device), teacher, config)

    report = learn_expressions(
        classifier, optimisers, config, directory, photos, logits_of, targets_of
    )
    (directory.path / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")
    classifier.eval()
    logits = [mean_logits(logits_of, part) for part in photos]
    classifier.cpu()
    added = even_handed(logits[0], photos[0].labels)
    readings = predicted_classes(zip(photos, (each + added for each in logits), strict=True))
    (directory.path / READINGS).write_text(json.dumps(readings, indent=0), encoding="utf-8")
    embeddings = embeddings_of(model)
    classifier.map_to_words(
        added,
        logits[0],
        word_vectors(embeddings, processor.tokenizer),
        embeddings.norm(dim=-1).mean().item(),
    )
    model.save_pretrained(directory.path / "model")
    processor.save_pretrained(directory.path / "model")
