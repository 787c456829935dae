"""What SFT of the policy and SFT of the judge have in common: one thin caller of trl's SFTTrainer.

Rows are conversations with images at their own turns. `prompt` + `completion` rows train the
completion; `messages` rows train every assistant turn (the judge's verdicts). A whole checkpoint or
a LoRA adapter is trained (`base_model`), by one process or by several (`processes`).
"""

import math
import shutil
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
from training.common.processes import is_first, process_count
from training.common.run_directory import RunDirectory
from training.finetune.base_model import freeze_image_encoder, load_base, lora_config
from training.finetune.trl_common import (
    MetricsToRunDirectory,
    SaveAndStop,
    WeightTraining,
    keep_adapter_in_fp32,
    last_checkpoint,
    logits_where_labels_are,
    open_processor,
    save_weights,
    step_of,
    trainer_arguments,
)
from training.stages import StoppedEarly


class FineTuning(WeightTraining):
    """Settings of one fine-tuning run."""

    epochs: float = 1.0
    max_steps: int = -1
    """Optimiser steps; -1 leaves it to `epochs`."""
    batch_size: int = Field(default=8, gt=0)
    """Rows per forward pass and process."""
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimiser step. A step takes batch_size x accumulation x processes rows;
    paper, reward model: "a batch size of 64"."""
    lr: float = 1e-5
    """Paper, reward model: "a learning rate of 1 x 10^-5"."""
    warmup_share: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""


Row = dict[str, Any]

_BLOCK = {"type": Value("string"), "text": Value("string")}
_MESSAGES = List({"role": Value("string"), "content": List(_BLOCK)})


def message_rows(messages: Iterable[Message]) -> tuple[list[Row], list[Row]]:
    """Return messages and their images in the columns that trl reads.

    Images are named by a placeholder block at their place and listed apart, in order.
    """
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
    """Return rows as a data set; each has `images`, `length` and either kind of conversation."""
    conversation = (
        {"messages": _MESSAGES}
        if "messages" in rows[0]
        else {"prompt": _MESSAGES, "completion": _MESSAGES}
    )
    features = Features({**conversation, "images": List(Image()), "length": Value("int64")})
    return Dataset.from_list(list(rows), features=features)


def row_order(lengths: Sequence[int], batch: int, passes: float, seed: int) -> list[int]:
    """Return the numbers of the rows in the order in which they are trained on.

    Rows of like length come together, which spares padding; the batches of a pass are shuffled. The
    order is drawn here because the library's own sampler draws anew at a resume: of the pass at
    hand some rows would come twice and others not at all.

    Args:
        lengths: The length of each row, in any unit.
        batch: Rows per optimiser step, of all processes.
        passes: How often each row comes; of 2.5 passes the last holds half of the rows.
        seed: Draws the order.
    """
    count = len(lengths)
    rng = np.random.default_rng(seed)
    drawn = np.concatenate([rng.permutation(count) for _ in range(math.ceil(passes))])
    drawn = drawn[: math.ceil(passes * count)]
    # Windows to sort in: small enough to leave chance some room, and passes nearly apart.
    window = batch * max(1, min(50, count // (4 * batch)))
    rows = np.concatenate(
        [
            part[np.argsort([lengths[i] for i in part], kind="stable")]
            for part in np.split(drawn, range(window, len(drawn), window))
        ]
    )
    batches = np.split(rows, range(batch, len(rows), batch))
    *whole, last = batches  # the last one may be smaller, and must stay where it is
    a_pass = max(1, count // batch)
    for start in range(0, len(whole), a_pass):
        part = whole[start : start + a_pass]
        whole[start : start + a_pass] = [part[i] for i in rng.permutation(len(part))]
    return [int(number) for number in np.concatenate([*whole, last])]


def fine_tune(
    base: Path | str,
    rows: Sequence[Row],
    settings: FineTuning,
    directory: RunDirectory,
    *,
    training_template: str | None = None,
    resume: bool = False,
) -> Path:
    """Train and return the folder with the checkpoint, or with the adapter where `lora` is set.

    Args:
        base: Checkpoint folder, or hub name, to start from.
        rows: As `build_dataset` takes them.
        settings: How to train.
        directory: Where metrics and checkpoints go.
        training_template: The base's chat template with `{% generation %}` marks, for `messages`
            rows.
        resume: Go on from the last checkpoint of the directory, if there is one.

    Raises:
        CheckpointError: `base` cannot be loaded, or has no chat template.
        ConfigError: The settings do not fit the base.
        StoppedEarly: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    checkpoints = directory.path / "checkpoints"
    # A start that logged no step may have left some, under another config.
    if not resume and is_first():
        shutil.rmtree(checkpoints, ignore_errors=True)
    last = last_checkpoint(checkpoints) if resume else None
    directory.rewind(step_of(last))
    batch = settings.batch_size * settings.accumulation * process_count()
    directory.log(
        "%d rows a step: %d at once, %d times, in %d processes",
        *(batch, settings.batch_size, settings.accumulation, process_count()),
    )
    arguments = _arguments(settings, checkpoints, on_messages="messages" in rows[0])
    processor = open_processor(base)
    if training_template is not None:
        processor.chat_template = training_template
    lora = settings.lora
    # The trainer reads optimiser, schedule and adapter from its checkpoint. Whole weights it reads
    # by their names in memory, which transformers 5 has changed on the way to disk: it would warn
    # of missing keys and go on with the base's.
    begin = last if last and lora is None else base
    # Behind the arguments: where they split the weights among processes, loading has to know.
    model = load_base(
        begin, settings.weights, settings.precision, settings.quantize, arguments.device
    )
    adapter = None
    if lora is not None:
        adapter = lora_config(model, lora, freeze_vision=settings.freeze_vision)
    elif settings.freeze_vision:
        freeze_image_encoder(model)
    passes = max(settings.epochs, settings.max_steps * batch / len(rows))
    order = row_order([row["length"] for row in rows], batch, passes, settings.seed)
    stopping = StopRequest()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=build_dataset(rows).select(order),
        processing_class=processor,
        peft_config=adapter,
        callbacks=[MetricsToRunDirectory(directory, passes), SaveAndStop(stopping)],
    )
    if settings.quantize:
        keep_adapter_in_fp32(trainer.model)
    with stopping, logits_where_labels_are():
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    if stopping.requested:
        raise StoppedEarly(f"saved; go on with --resume {directory.path}")
    output = directory.path / ("adapter" if lora else "model")
    save_weights(trainer, output)
    if lora is None and is_first():
        open_processor(base).save_pretrained(output)
    return output


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
        max_length=None,  # cutting a row could cut an image in two
        assistant_only_loss=on_messages,
        train_sampling_strategy="sequential",
    )
