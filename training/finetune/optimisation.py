"""Optimisers, checkpoints and the training loop of the stages that do not use trl.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) trains the weight matrices of
the image tower's blocks, AdamW everything else.

The learning rate warms up, stays constant and decays linearly to zero, so a resumed run can be made
longer or shorter without wasting steps.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import Field
from torch import nn

from compeer_core.config import FrozenModel
from training.common.interrupts import StopRequest
from training.common.processes import in_any_process, is_first
from training.common.run_directory import RunDirectory
from training.stages import StoppedEarly

CHECKPOINT = "checkpoint"
"""Folder of the last checkpoint, in the run directory."""


class Schedule(FrozenModel):
    """Optimiser settings, and the intervals of checkpoints and evaluations."""

    steps: int = Field(default=2000, gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    decay_steps: int = Field(default=600, ge=0)
    """Final steps, over which the learning rates decay to zero."""
    adamw_lr: float = 0.003
    """AdamW's learning rate."""
    weight_decay: float = 0.01
    save_every: int = Field(default=100, gt=0)
    evaluate_every: int = Field(default=100, gt=0)
    device: str = "cpu"
    seed: int = 0

    @property
    def resumable_keys(self) -> frozenset[str]:
        """Keys that may change at a resume: they do not affect past steps."""
        return frozenset({"steps", "decay_steps", "save_every", "evaluate_every"})

    @property
    def device_type(self) -> str:
        """The device without its index, as autocast expects it."""
        return self.device.split(":")[0]


def learning_rate_factor(step: int, schedule: Schedule) -> float:
    """Return the factor in [0, 1] of all learning rates at `step` (counted from 0)."""
    warmup = min(1.0, (step + 1) / max(1, schedule.warmup_steps))
    decay = (schedule.steps - step) / max(1, schedule.decay_steps)
    return warmup * min(1.0, max(0.0, decay))


class Optimisers:
    """Muon and AdamW, stepped together."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[tuple[Sequence[nn.Parameter], float]],
        schedule: Schedule,
        muon_lr: float = 0.0,
    ) -> None:
        """Create the optimisers.

        Args:
            matrices: Parameters for Muon; may be empty.
            others: Parameters for AdamW, each group with its learning rate.
            schedule: Learning rates and their schedule.
            muon_lr: Muon's learning rate.
        """
        groups = [{"params": list(weights), "lr": rate} for weights, rate in others]
        self._schedule = schedule
        adamw = torch.optim.AdamW(groups, lr=schedule.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.all: Sequence[torch.optim.Optimizer] = (adamw,)
        if matrices:
            muon = torch.optim.Muon(matrices, lr=muon_lr, weight_decay=schedule.weight_decay)
            self.all = (muon, adamw)
        param_groups = [optimizer.param_groups for optimizer in self.all]
        self._rates = [[group["lr"] for group in groups] for groups in param_groups]
        self._trained = [p for groups in param_groups for group in groups for p in group["params"]]

    def step(self, step: int) -> float:
        """Clip the gradient norm to 1, update the weights and clear the gradients.

        Args:
            step: Number of the step, counted from 0.

        Returns:
            The factor of the learning rates.
        """
        factor = learning_rate_factor(step, self._schedule)
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        for optimizer, rates in zip(self.all, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return factor


def split_for_muon(
    model: nn.Module, layers: nn.Module
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of the layers, for Muon, and all other parameters of the model."""
    matrices = [weight for weight in layers.parameters() if weight.ndim == 2]
    matrix_ids = {id(weight) for weight in matrices}
    return matrices, [weight for weight in model.parameters() if id(weight) not in matrix_ids]


def save_checkpoint(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int
) -> None:
    """Write a checkpoint and swap it with the previous one. Only rank 0 writes.

    At any time `folder` or `folder.old` is complete; `load_checkpoint` reads either.
    """
    if not is_first():
        return
    new, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "step": step,
        },
        new / "state.pt",
    )
    if folder.exists():  # otherwise a run was killed here, and only `old` is complete
        shutil.rmtree(old, ignore_errors=True)
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> int:
    """Load the last complete checkpoint; return its step, or 0 if there is none."""
    candidates = (folder / "state.pt", folder.with_suffix(".old") / "state.pt")
    file = next((candidate for candidate in candidates if candidate.exists()), None)
    if file is None:
        return 0
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return int(state["step"])


def open_run(output: Path, schedule: Schedule, resume: Path | None) -> RunDirectory:
    """Start a run in `output`, or resume the run in `resume`.

    Args:
        output: Directory of a new run.
        schedule: The complete config of the stage.
        resume: Directory of the run to resume; None starts a new one.

    Raises:
        ConfigError: `output` already contains a run, `resume` contains none, or the config differs.
    """
    directory = RunDirectory.open(
        resume or output,
        schedule,
        resume=resume is not None,
        may_change=schedule.resumable_keys,
    )
    # An earlier run without metrics may have left checkpoints made with another config.
    if resume is None and is_first():
        checkpoint = directory.path / CHECKPOINT
        for folder in (checkpoint, checkpoint.with_suffix(".old")):
            shutil.rmtree(folder, ignore_errors=True)
    return directory


def run_steps(
    model: nn.Module,
    optimisers: Optimisers,
    schedule: Schedule,
    directory: RunDirectory,
    step: int,
    learn: Callable[[], tuple[float, int]],
    validate: Callable[[], float | Mapping[str, float]],
) -> int:
    """Run the remaining steps, writing metrics and checkpoints; return the total number of steps.

    Args:
        model: Model to train.
        optimisers: Optimisers of its weights.
        schedule: Number of steps, and the intervals of checkpoints and evaluations.
        directory: The run's directory.
        step: Number of steps already done.
        learn: Computes the gradients of a step and returns its loss in nats per token and the number
            of tokens, both over all processes.
        validate: Returns the loss on held-out data in nats per token, or several named measures.

    Raises:
        StoppedEarly: Ctrl-C or SIGTERM; the current step is finished and a checkpoint is saved.
    """
    checkpoint = directory.path / CHECKPOINT
    started, total_tokens = time.monotonic(), 0
    with StopRequest() as stop:
        while step < schedule.steps and not in_any_process(stop.requested):
            loss, tokens = learn()
            metrics = {"loss": loss, "lr_factor": optimisers.step(step)}
            step += 1
            if step % schedule.evaluate_every == 0 or step == schedule.steps:
                measured = validate()
                metrics |= (
                    measured if isinstance(measured, Mapping) else {"validation_loss": measured}
                )
            total_tokens += tokens
            metrics["tokens_per_second"] = total_tokens / (time.monotonic() - started)
            directory.metrics(step=step, **metrics)
            if step % schedule.save_every == 0 or step == schedule.steps:
                save_checkpoint(checkpoint, model, optimisers.all, step)
        if in_any_process(stop.requested):
            save_checkpoint(checkpoint, model, optimisers.all, step)
            raise StoppedEarly(f"saved at step {step}; resume with --resume {directory.path}")
    return step
