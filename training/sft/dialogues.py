"""SFT of a small policy on whole dialogues: `python -m training sft dialogues <config.toml>`.

Learns from the same rows with the same loss as `training.sft.cer`, in another order of work: all
turns of a dialogue form one row whose history is read once (`training.finetune.shared_prefix`), and
Muon and AdamW update all weights (`training.finetune.optimisation`). It suits models of the size of
COMPEER-nano on one CPU or GPU; use `sft cer` for large models, LoRA or several processes.

A run stopped at any point continues from its last checkpoint with the same rows.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.errors import ConfigError
from training.data.pictures import Pictures
from training.finetune.base_model import check_base
from training.finetune.optimisation import (
    CHECKPOINT,
    Optimisers,
    load_checkpoint,
    open_run,
    run_steps,
)
from training.finetune.shared_prefix import ATTENTION, SharedPrefixRow, row_loss, shared_prefix_row
from training.sft.adapter import DialogueConfig, LearntTurn, read_dialogues, steps_of
from training.sft.tokenise import SampleReader

_log = logging.getLogger(__name__)


class Config(DialogueConfig):
    """`[sft dialogues]`: rows, base and schedule."""

    dialogues_per_step: int = Field(default=3, gt=0)
    vision_lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the image tower."""
    freeze_vision: bool = False
    """Leave the image tower as it is."""
    validation_dialogues: int = Field(default=24, gt=0)
    """Number of dialogues of the valid split on which to measure the loss."""


class _RowBuilder:
    """Turns dialogues into rows.

    Attributes:
        too_long: Number of turns skipped because they exceed the model's context.
    """

    def __init__(self, reader: SampleReader, pictures: Pictures, limit: int, device: str) -> None:
        self.too_long = 0
        self._reader = reader
        self._pictures = pictures
        self._limit = limit
        self._device = device

    def rows(self, dialogues: Sequence[Sequence[LearntTurn]]) -> list[SharedPrefixRow]:
        """Return one row per dialogue; a dialogue whose turns are all too long gives none."""
        rows = []
        for turns in dialogues:
            samples = [
                self._reader.read_turn(self._pictures.dialogue(turn.case), turn.completion)
                for turn in turns
            ]
            fitting = [s for s in samples if len(s.prompt) + len(s.completion) <= self._limit]
            self.too_long += len(samples) - len(fitting)
            if fitting:
                rows.append(shared_prefix_row(fitting).to(self._device))
        return rows


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train to `config.steps`, or continue a run; Ctrl-C saves first; a dry run counts turns."""
    check_base(config.base)
    dialogues = read_dialogues(config.records, "train")
    held_out = read_dialogues(config.records, "valid")[: config.validation_dialogues]
    _log.info("%d turns of %d dialogues to learn", sum(map(len, dialogues)), len(dialogues))
    if not dialogues:
        files = ", ".join(map(str, config.records))
        raise ConfigError(f"{files}: no turn of the train split to learn")
    if dry_run:
        return
    model = load_model(config.base, torch.float32)
    reader = SampleReader(config.base, model)
    directory = open_run(config.output, config, resume)
    torch.nn.Module.to(model, config.device)
    language = model.model.language_model
    language.set_attn_implementation(ATTENTION)
    vision_lr = None if config.freeze_vision else config.vision_lr
    optimisers = Optimisers.of_model(model, config, vision_lr)
    step = load_checkpoint(directory.path / CHECKPOINT, model, optimisers.all)
    directory.rewind(step)
    if config.compile:
        for layer in language.layers:
            layer.compile(dynamic=True)
    limit: int = language.config.max_position_embeddings
    builder = _RowBuilder(reader, Pictures(None, config.faces), limit, config.device)
    validation = builder.rows(held_out)
    if not validation:
        raise ConfigError(f"{config.base}: no dialogue of the valid split fits into {limit} tokens")
    steps = steps_of(dialogues, config.dialogues_per_step, config.seed, step)

    def learn() -> tuple[float, int]:
        rows = builder.rows(next(steps))
        targets = sum(len(row.targets) for row in rows) or 1  # all turns may be too long
        total = 0.0
        for row in rows:
            with torch.autocast(config.device_type, dtype=torch.bfloat16):
                loss = row_loss(model, row) / targets
            loss.backward()
            total += loss.item()
        return total, sum(row.tokens.shape[1] for row in rows)

    model.train()
    run_steps(
        model,
        optimisers,
        config,
        directory,
        step,
        learn,
        lambda: _validation_loss(model, validation, config.device_type),
    )
    if builder.too_long:
        directory.log("skipped turns of more than %d tokens %d times", limit, builder.too_long)
    model.save_pretrained(directory.path / "model")
    reader.processor.save_pretrained(directory.path / "model")


def _validation_loss(
    model: Qwen2_5_VLForConditionalGeneration, rows: Sequence[SharedPrefixRow], device_type: str
) -> float:
    """Return the mean loss in nats per token."""
    model.eval()
    with torch.no_grad(), torch.autocast(device_type, dtype=torch.bfloat16):
        total = sum(row_loss(model, row).item() for row in rows)
    model.train()
    return total / sum(len(row.targets) for row in rows)
