"""What the stages on trl's trainers share: settings of the weights, metrics, saving, going on.

`fine_tuning` (SFT of the policy and of the judge) and `training.grpo` are thin callers of trl. How
weights are held and trained, how a run is logged, stopped, saved and resumed is the same for both and
stands here.
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
    """Settings of the weights, and of what is kept of a run."""

    weight_decay: float = 0.0
    lora: LoraShape | None = None
    """None trains the whole language model."""
    freeze_vision: bool = True
    """Paper, reward model: "the visual encoder is frozen, while the language model and adapter
    modules are fully trainable". Without LoRA the adapter (Qwen2.5-VL's `visual.merger`) is trained;
    with LoRA it is where `lora.target_modules` names it."""
    gradient_checkpointing: bool = False
    """Less memory for about a third more time; for 7B models."""
    precision: Weights = "bf16"
    """What is computed in: bf16 (autocast) or fp32."""
    weights: Weights = "fp32"
    """How weights are held; LoRA's own are fp32 in any case. `bf16` halves the memory of a base under
    LoRA. Without LoRA it loses steps: near a weight of 0.02 neighbouring bf16 numbers are 1e-4
    apart, and a step of AdamW at lr 1e-5 is rounded away."""
    quantize: Literal["4bit"] | None = None
    """QLoRA: the base is held in 4 bits (NF4, double quantisation); only with `lora`."""
    save_steps: int = Field(default=200, gt=0)
    log_steps: int = Field(default=20, gt=0)
    seed: int = 0

    @property
    def trains_adapter(self) -> bool:
        """Whether a LoRA adapter is trained, and the weights below it stay."""
        return self.lora is not None

    @model_validator(mode="after")
    def _four_bits_are_not_trained(self) -> Self:
        if self.quantize and not self.trains_adapter:
            raise ValueError(
                "quantize = '4bit' needs a [training.lora] table: weights of 4 bits cannot be "
                "trained themselves, an adapter on them can"
            )
        return self


class MetricsToRunDirectory(TrainerCallback):
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


class SaveAndStop(TrainerCallback):
    """Ends the training once a person has asked for it, after a step from which one can go on."""

    def __init__(self, stopping: StopRequest, every: int = 1) -> None:
        """Take the request.

        Args:
            stopping: Whether a person has asked.
            every: A run can go on from steps that are a multiple of this.
        """
        self._stopping = stopping
        self._every = every

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A signal may reach one process a step later than another.
        if state.global_step % self._every == 0 and in_any_process(self._stopping.requested):
            self._stopping.requested = True
            control.should_save = True
            control.should_training_stop = True


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest whole checkpoint: a run that was killed may have left half of one."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=step_of, default=None)


def step_of(checkpoint: Path | None) -> int:
    """Return the step after which a checkpoint was saved; 0 for none."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def open_processor(base: Path | str) -> Any:
    """Return the processor of a base, which has a chat template.

    Raises:
        CheckpointError: It cannot be loaded, or there is no usable chat template.
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
        kind: Of trl's trainer.
        settings: Those that all trainers share.
        checkpoints: Folder that they are saved in.
        others: Arguments of this trainer.
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
    """Undo what trl does to an adapter on a quantised base.

    trl casts it to bf16, where the steps of a low learning rate are rounded away. The rest of
    peft's `prepare_model_for_kbit_training` is not called for: peft freezes the base, trl and the
    trainer see to checkpointing, and norms compute in fp32 by themselves.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def save_weights(trainer: Trainer, output: Path) -> None:
    """Write the model or the adapter; weights that are split among processes are gathered first."""
    split = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) if split else None
    if is_first():
        trained: Any = trainer.accelerator.unwrap_model(trainer.model)
        trained.save_pretrained(output, state_dict=gathered)


def drop_halves(folder: Path) -> None:
    """Remove checkpoints that were begun and not finished: they take room and are of no use."""
    for path in folder.glob("checkpoint-*"):
        if path.is_dir() and not (path / "trainer_state.json").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def logits_where_labels_are() -> Iterator[None]:
    """Have trl compute logits where there is a label, and nowhere else.

    By itself it does so only where Triton runs. On a processor it would score the whole vocabulary
    at every position: of a judge, which has some ten labels in five hundred tokens, that is more
    than a third of a training step. The loss is the same up to rounding.
    """
    parts: Any = trl_utils
    asked = parts._use_triton
    parts._use_triton = lambda device: True  # it is asked nothing else in that module
    try:
        yield
    finally:
        parts._use_triton = asked
