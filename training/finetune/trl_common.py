"""Shared by the wrappers of trl's trainers (`sft_trainer`, `training.grpo`).

Settings of the weights, and how runs are logged, interrupted, saved and resumed.
"""

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl.trainer import utils as trl_utils

from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError
from compeer_core.processing import load_processor
from training.common.interrupts import StopRequest
from training.common.processes import in_any_process, is_first
from training.common.run_directory import RunDirectory
from training.finetune.base_model import LoraShape, Weights, check_base

Arguments = TypeVar("Arguments", bound=TrainingArguments)


class WeightTraining(FrozenModel):
    """Settings of the trained weights and of a run's checkpoints and logs."""

    weight_decay: float = 0.0
    lora: LoraShape | None = None
    """None trains all weights of the language model."""
    freeze_vision: bool = True
    """Paper, reward model: "the visual encoder is frozen, while the language model and adapter
    modules are fully trainable". Without LoRA the adapter (Qwen2.5-VL's `visual.merger`) is trained;
    with LoRA it is where `lora.target_modules` names it."""
    gradient_checkpointing: bool = False
    """Saves memory and costs about a third more time; for 7B models."""
    precision: Weights = "bf16"
    """Precision of computations: bf16 (autocast) or fp32."""
    weights: Weights = "fp32"
    """Precision of the base's weights in memory; LoRA's own are always fp32. `bf16` halves the memory
    of a base under LoRA. Without LoRA it loses updates: near a weight of 0.02 neighbouring bf16
    numbers are 1e-4 apart, so an AdamW step at lr 1e-5 is rounded away."""
    quantize: Literal["4bit"] | None = None
    """QLoRA: 4-bit weights of the base (NF4, double quantisation); requires `lora`."""
    save_steps: int = Field(default=200, gt=0)
    log_steps: int = Field(default=20, gt=0)
    seed: int = 0

    @property
    def trains_adapter(self) -> bool:
        """Whether only a LoRA adapter is trained."""
        return self.lora is not None

    @model_validator(mode="after")
    def _quantized_needs_adapter(self) -> Self:
        if self.quantize and not self.trains_adapter:
            raise ValueError(
                "quantize = '4bit' needs a [training.lora] table: 4-bit weights cannot be trained, "
                "only an adapter on them"
            )
        return self


class MetricsToRunDirectory(TrainerCallback):
    """Copies the trainer's log to metrics.jsonl."""

    def __init__(self, directory: RunDirectory, passes: float) -> None:
        self._directory = directory
        self._passes = passes

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        row = {k: v for k, v in kwargs.get("logs", {}).items() if isinstance(v, float | int)}
        if "epoch" in row:
            row["epoch"] *= self._passes  # the trainer treats all epochs as one
        if state.is_world_process_zero:
            self._directory.metrics(step=state.global_step, **row)


class SaveAndStop(TrainerCallback):
    """Saves a checkpoint and stops the training after an interrupt."""

    def __init__(self, stop: StopRequest, every: int = 1) -> None:
        """Create the callback.

        A run can only be resumed at steps that are multiples of `every`.
        """
        self._stop = stop
        self._every = every

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A signal may reach one process a step later than another.
        if state.global_step % self._every == 0 and in_any_process(self._stop.requested):
            self._stop.requested = True
            control.should_save = True
            control.should_training_stop = True


def checkpoint_to_resume(folder: Path, *, resume: bool) -> Path | None:
    """Return the last checkpoint of a run that is resumed.

    A new run deletes those of an earlier one that stopped before its first step, under another config.
    """
    if not resume and is_first():
        shutil.rmtree(folder, ignore_errors=True)
    return last_checkpoint(folder) if resume else None


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest complete checkpoint: a killed run may have left an incomplete one."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: Path | None) -> int:
    """Return the step at which a checkpoint was saved; 0 for None."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def open_processor(base: Path | str) -> Any:
    """Return the processor of a base.

    Raises:
        CheckpointError: It cannot be loaded, or has no usable chat template.
    """
    check_base(base)
    try:
        processor = load_processor(base)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{base}: cannot be loaded: {error}") from error
    ChatTemplate(str(base), processor)
    return processor


def trainer_arguments(
    kind: type[Arguments], settings: WeightTraining, checkpoints: Path, **others: Any
) -> Arguments:
    """Return the arguments of a trainer.

    Args:
        kind: The trainer's class of arguments.
        settings: Settings shared by all trainers.
        checkpoints: Folder of the checkpoints.
        others: Further arguments of this trainer.
    """
    # transformers 5.23 renamed the argument; trl's default for the old name is True.
    names = {field.name for field in dataclasses.fields(kind)}
    new_name = "activation_checkpointing"
    checkpointing: dict[str, Any] = {
        new_name if new_name in names else "gradient_checkpointing": settings.gradient_checkpointing
    }
    shared: dict[str, Any] = {
        "output_dir": str(checkpoints),
        "num_train_epochs": 1,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": 1.0,
        "bf16": settings.precision == "bf16",
        "use_cpu": not torch.cuda.is_available(),
        "remove_unused_columns": False,
        "logging_steps": settings.log_steps,
        "save_steps": settings.save_steps,
        "save_total_limit": 1,
        "seed": settings.seed,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return kind(**{**shared, **checkpointing, **others})


def keep_adapter_in_fp32(model: Any) -> None:
    """Cast an adapter on a quantised base back to fp32.

    trl casts it to bf16, which rounds away the updates of a low learning rate. The rest of peft's
    `prepare_model_for_kbit_training` is not needed: peft freezes the base, trl handles gradient
    checkpointing, and norms compute in fp32 anyway.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save_trained(trainer: Trainer, run: Path, base: Path | str, *, is_adapter: bool) -> Path:
    """Write the model, with its processor, or the adapter into a run, and return the folder."""
    output = run / ("adapter" if is_adapter else "model")
    save_weights(trainer, output)
    if not is_adapter and is_first():
        open_processor(base).save_pretrained(output)
    return output


def save_weights(trainer: Trainer, output: Path) -> None:
    """Write the model or the adapter, after gathering weights that are sharded over processes."""
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded else None
    if is_first():
        model: Any = trainer.accelerator.unwrap_model(trainer.model)
        model.save_pretrained(output, state_dict=gathered)


def remove_incomplete_checkpoints(folder: Path) -> None:
    """Delete checkpoints whose writing was interrupted, to free their disk space."""
    for path in folder.glob("checkpoint-*"):
        if path.is_dir() and not (path / "trainer_state.json").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def logits_at_labels_only() -> Iterator[None]:
    """Make trl compute logits only at positions that have a label.

    trl does so only where Triton is available. On a CPU it computes logits at every position: for a
    judge, with some ten labels in five hundred tokens, more than a third of a training step. The loss
    is the same up to rounding.
    """
    utils: Any = trl_utils
    use_triton = utils._use_triton
    utils._use_triton = lambda device: True  # that module uses it for nothing else
    try:
        yield
    finally:
        utils._use_triton = use_triton
