"""A thin wrapper of trl's SFTTrainer, for SFT of the policy and of the judge.

Rows are conversations with images in place. Rows with `prompt` and `completion` train the
completion; rows with `messages` train every assistant turn (the judge's verdicts). Trains a full
model or a LoRA adapter (`base_model`), in one or several processes (`processes`).
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from pydantic import Field
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from compeer_core.backends.protocol import Message
from training.common.interrupts import StopRequest
from training.common.processes import process_count
from training.common.run_directory import RunDirectory
from training.finetune.base_model import freeze_image_encoder, load_base, lora_config
from training.finetune.trl_common import (
    MetricsToRunDirectory,
    SaveAndStop,
    WeightTraining,
    checkpoint_to_resume,
    keep_adapter_in_fp32,
    logits_at_labels_only,
    open_processor,
    save_trained,
    step_of,
    trainer_arguments,
)
from training.stages import StoppedEarly


class FineTuning(WeightTraining):
    """Settings of one fine-tuning run."""

    epochs: float = 1.0
    max_steps: int = -1
    """Optimiser steps; -1 uses `epochs`."""
    batch_size: int = Field(default=8, gt=0)
    """Rows per forward pass and process."""
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimiser step. The total batch is batch_size x accumulation x processes
    rows; paper, reward model: "a batch size of 64"."""
    lr: float = 1e-5
    """Paper, reward model: "a learning rate of 1 x 10^-5"."""
    warmup_share: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps used for warm-up."""


Row = dict[str, Any]

_BLOCK = {"type": Value("string"), "text": Value("string")}
_MESSAGES = List({"role": Value("string"), "content": List(_BLOCK)})


def message_rows(messages: Iterable[Message]) -> tuple[list[Row], list[Row]]:
    """Return messages and images as trl's columns: placeholder blocks, and the images in order."""
    rows: list[Row] = []
    images: list[Row] = []
    for message in messages:
        blocks: list[Row] = []
        for block in message.content:
            if isinstance(block, str):
                blocks.append({"type": "text", "text": block})
            else:
                blocks.append({"type": "image", "text": None})
                images.append({"bytes": block.data, "path": None})
        rows.append({"role": message.role, "content": blocks})
    return rows, images


def build_dataset(rows: Sequence[Row]) -> Dataset:
    """Return a dataset of rows with `images`, `length` and either kind of conversation."""
    conversation = (
        {"messages": _MESSAGES}
        if "messages" in rows[0]
        else {"prompt": _MESSAGES, "completion": _MESSAGES}
    )
    features = Features({**conversation, "images": List(Image()), "length": Value("int64")})
    return Dataset.from_list(list(rows), features=features)


def row_order(lengths: Sequence[int], batch: int, passes: float, seed: int) -> list[int]:
    """Return row indices in training order.

    Batches contain rows of similar length, to reduce padding; the batches of an epoch are shuffled.
    The order is fixed here because transformers' length-grouping sampler draws a new one at a
    resume, which would repeat some rows of the epoch and skip others.

    Args:
        lengths: Length of each row, in any unit.
        batch: Rows per optimiser step, over all processes.
        passes: Number of epochs; a fractional last epoch has that share of the rows.
        seed: Seed of the order.
    """
    count = len(lengths)
    rng = np.random.default_rng(seed)
    shuffled = np.concatenate([rng.permutation(count) for _ in range(math.ceil(passes))])
    shuffled = shuffled[: math.ceil(passes * count)]
    # Sort within windows small enough to keep the order random and the epochs nearly separate.
    window = batch * max(1, min(50, count // (4 * batch)))
    rows = np.concatenate(
        [
            part[np.argsort([lengths[i] for i in part], kind="stable")]
            for part in np.split(shuffled, range(window, len(shuffled), window))
        ]
    )
    *batches, last = np.split(rows, range(batch, len(rows), batch))  # `last` may be smaller
    per_epoch = max(1, count // batch)
    for start in range(0, len(batches), per_epoch):
        epoch = batches[start : start + per_epoch]
        batches[start : start + per_epoch] = [epoch[i] for i in rng.permutation(len(epoch))]
    return [int(index) for index in np.concatenate([*batches, last])]


def fine_tune(
    base: Path | str,
    rows: Sequence[Row],
    settings: FineTuning,
    directory: RunDirectory,
    *,
    training_template: str | None = None,
    resume: bool = False,
) -> Path:
    """Train, and return the folder of the checkpoint, or of the adapter if `lora` is set.

    Args:
        base: Checkpoint folder or Hub ID to start from.
        rows: Rows for `build_dataset`.
        settings: Training settings.
        directory: The run's directory.
        training_template: The base's chat template with `{% generation %}` markers, for `messages`
            rows.
        resume: Resume from the last checkpoint in the directory, if there is one.

    Raises:
        CheckpointError: `base` cannot be loaded, or has no chat template.
        ConfigError: The settings do not fit the base.
        StoppedEarly: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    checkpoints = directory.path / "checkpoints"
    last = checkpoint_to_resume(checkpoints, resume=resume)
    directory.rewind(step_of(last))
    batch = settings.batch_size * settings.accumulation * process_count()
    directory.log(
        "%d rows per step: batch %d x accumulation %d x processes %d",
        *(batch, settings.batch_size, settings.accumulation, process_count()),
    )
    arguments = _arguments(settings, checkpoints, on_messages="messages" in rows[0])
    processor = open_processor(base)
    if training_template is not None:
        processor.chat_template = training_template
    lora = settings.lora
    # The trainer restores optimiser, schedule and adapter from its checkpoint. It cannot restore full
    # weights: transformers 5 renames them on disk, so the trainer would warn about missing keys and
    # continue with the base's weights.
    start = last if last and lora is None else base
    # Loaded after the arguments are created, because these decide about sharding.
    model = load_base(
        start, settings.weights, settings.precision, settings.quantize, arguments.device
    )
    adapter = None
    if lora is not None:
        adapter = lora_config(model, lora, freeze_vision=settings.freeze_vision)
    elif settings.freeze_vision:
        freeze_image_encoder(model)
    passes = max(settings.epochs, settings.max_steps * batch / len(rows))
    order = row_order([row["length"] for row in rows], batch, passes, settings.seed)
    stop = StopRequest()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=build_dataset(rows).select(order),
        processing_class=processor,
        peft_config=adapter,
        callbacks=[MetricsToRunDirectory(directory, passes), SaveAndStop(stop)],
    )
    if settings.quantize:
        keep_adapter_in_fp32(trainer.model)
    with stop, logits_at_labels_only():
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    if stop.requested:
        raise StoppedEarly(f"saved; resume with --resume {directory.path}")
    return save_trained(trainer, directory.path, base, is_adapter=lora is not None)


def _arguments(settings: FineTuning, checkpoints: Path, *, on_messages: bool) -> SFTConfig:
    return trainer_arguments(
        SFTConfig,
        settings,
        checkpoints,
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_share,
        max_length=None,  # truncation could split an image
        assistant_only_loss=on_messages,
        train_sampling_strategy="sequential",
    )
