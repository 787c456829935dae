"""What SFT of the policy and SFT of the judge have in common: one thin caller of trl's SFTTrainer.

Rows are conversations with images at their own turns. `prompt` + `completion` rows train the
completion; `messages` rows train every assistant turn (the judge's verdicts). A whole checkpoint or
a LoRA adapter is trained, with the image tower frozen or not.
"""

import dataclasses
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from pydantic import Field
from transformers import AutoModelForImageTextToText, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from compeer_core.backends.protocol import Message
from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError
from compeer_core.processing import load_processor
from training.run_directory import RunDirectory
from training.stages import StoppedEarly
from training.stopping import StopRequest


class LoraShape(FrozenModel):
    """A LoRA adapter on every linear layer of the language model (Hu et al. 2021)."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    """A regular expression over module names."""


class FineTuning(FrozenModel):
    """Settings of one fine-tuning run."""

    epochs: float = 1.0
    max_steps: int = -1
    """Optimiser steps; -1 leaves it to `epochs`."""
    batch_size: int = 8
    """Rows per forward pass and device."""
    accumulation: int = 1
    """Forward passes per optimiser step."""
    lr: float = 1e-5
    """Paper, reward model: "a learning rate of 1 x 10^-5"."""
    warmup_share: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.0
    lora: LoraShape | None = None
    """None trains the whole language model."""
    freeze_vision: bool = True
    """Paper, reward model: "the visual encoder is frozen"."""
    gradient_checkpointing: bool = False
    """Less memory for about a third more time; for 7B models."""
    precision: str = "bf16"
    """bf16 (autocast) or fp32."""
    save_steps: int = 200
    log_steps: int = 20
    seed: int = 0


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
        batch: Rows per optimiser step and device.
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


class _MetricsToRunDirectory(TrainerCallback):
    """Copies what the trainer logs into the run's metrics.jsonl."""

    def __init__(self, directory: RunDirectory, passes: float) -> None:
        self._directory = directory
        self._passes = passes

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        row = {k: v for k, v in kwargs.get("logs", {}).items() if isinstance(v, float | int)}
        if "epoch" in row:
            row["epoch"] *= self._passes  # the trainer sees all passes as one
        if state.is_world_process_zero:
            self._directory.metrics(step=state.global_step, **row)


class _SaveAndStop(TrainerCallback):
    """Ends the training after the step at hand once a person has asked for it."""

    def __init__(self, stopping: StopRequest) -> None:
        self._stopping = stopping

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stopping.asked:
            control.should_save = True
            control.should_training_stop = True


def _last_checkpoint(folder: Path) -> Path | None:
    """Return the latest whole checkpoint: a run that was killed may have left half of one."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=_step_of, default=None)


def _step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def fine_tune(
    base: Path | str,
    rows: Sequence[Row],
    settings: FineTuning,
    directory: RunDirectory,
    *,
    training_template: Path | None = None,
    resume: bool = False,
) -> Path:
    """Train and return the folder with the checkpoint, or with the adapter where `lora` is set.

    Args:
        base: Checkpoint folder, or hub name, to start from.
        rows: As `build_dataset` takes them.
        settings: How to train.
        directory: Where metrics and checkpoints go.
        training_template: Chat template with `{% generation %}` marks, for `messages` rows.
        resume: Go on from the last checkpoint of the directory, if there is one.

    Raises:
        CheckpointError: `base` cannot be loaded.
        StoppedEarly: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    checkpoints = directory.path / "checkpoints"
    if not resume:  # a start that logged no step may have left some, under another config
        shutil.rmtree(checkpoints, ignore_errors=True)
    last = _last_checkpoint(checkpoints)
    directory.rewind(_step_of(last))
    # The trainer reads optimiser, schedule and adapter from its checkpoint. Whole weights it reads
    # by their names in memory, which transformers 5 has changed on the way to disk: it would warn
    # of missing keys and go on with the base's.
    begin = last if last and settings.lora is None else base
    try:
        processor = load_processor(base)
        model = AutoModelForImageTextToText.from_pretrained(begin, dtype=torch.float32)
    except OSError as error:
        raise CheckpointError(f"{begin}: cannot be loaded: {error}") from error
    if settings.freeze_vision:
        model.model.visual.requires_grad_(False)
    on_messages = "messages" in rows[0]
    stopping = StopRequest()
    batch = settings.batch_size * settings.accumulation
    passes = max(settings.epochs, settings.max_steps * batch / len(rows))
    order = row_order([row["length"] for row in rows], batch, passes, settings.seed)
    # transformers 5.23 renamed the argument; trl's default for the old name is True.
    names = {field.name for field in dataclasses.fields(SFTConfig)}
    new_name = "activation_checkpointing"
    checkpointing: dict[str, Any] = {
        new_name if new_name in names else "gradient_checkpointing": settings.gradient_checkpointing
    }
    arguments = SFTConfig(
        output_dir=str(checkpoints),
        num_train_epochs=1,
        max_steps=settings.max_steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_share,
        weight_decay=settings.weight_decay,
        max_grad_norm=1.0,
        bf16=settings.precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        **checkpointing,
        max_length=None,  # cutting a row could cut an image in two
        assistant_only_loss=on_messages,
        chat_template_path=str(training_template) if training_template else None,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,  # trl's collator wants the images
        logging_steps=settings.log_steps,
        save_steps=settings.save_steps,
        save_total_limit=1,
        seed=settings.seed,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    lora = settings.lora
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=build_dataset(rows).select(order),
        processing_class=processor,
        peft_config=None
        if lora is None
        else LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        ),
        callbacks=[_MetricsToRunDirectory(directory, passes), _SaveAndStop(stopping)],
    )
    with stopping:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    if stopping.asked:
        raise StoppedEarly(f"saved; go on with --resume {directory.path}")
    output = directory.path / ("adapter" if lora else "model")
    trained: Any = trainer.model
    trained.save_pretrained(output)
    if lora is None:
        load_processor(base).save_pretrained(output)
    return output
