"""How COMPEER-nano's weights are moved, and how a run of its own loops is kept and gone on with.

Matrices of the layers are moved by Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/),
everything else by AdamW: measured on 2 cores, Muon needs less than half of AdamW's tokens for the
same loss in pre-training.

The learning rate warms up, stays, and falls linearly to zero (warm-up, stable, decay), so a run can
be prolonged or cut short at a resume without having wasted anything.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch
from pydantic import Field
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.config import FrozenModel
from training.common.interrupts import StopRequest
from training.common.processes import in_any_process, is_first
from training.common.run_directory import RunDirectory
from training.stages import StoppedEarly

CHECKPOINT = "checkpoint"
"""Folder of a run's last checkpoint, in its directory."""


class Schedule(FrozenModel):
    """Settings of the optimisers, and of how often a run is saved and looked at."""

    steps: int = Field(default=2000, gt=0)
    warmup_steps: int = Field(default=50, ge=0)
    decay_steps: int = Field(default=600, ge=0)
    """The last steps, over which the learning rates fall to zero."""
    muon_lr: float = 0.02
    """Of the matrices of the language model's layers."""
    adamw_lr: float = 0.003
    """Of the rest of the language model."""
    weight_decay: float = 0.01
    save_every: int = Field(default=100, gt=0)
    evaluate_every: int = Field(default=100, gt=0)
    compile: bool = False
    """Compile the forward pass: 1.2 to 1.4 times as fast on a CPU; needs a C++ compiler."""
    device: str = "cpu"
    seed: int = 0

    @property
    def resumable_keys(self) -> frozenset[str]:
        """Keys that a resumed run may change: they do not alter the steps already made."""
        return frozenset({"steps", "decay_steps", "save_every", "evaluate_every", "compile"})

    @property
    def device_type(self) -> str:
        """The device without its number, as autocast wants it."""
        return self.device.split(":")[0]


def learning_rate_factor(step: int, schedule: Schedule) -> float:
    """Return the factor in [0, 1] on all learning rates at `step` (counted from 0)."""
    warm = min(1.0, (step + 1) / max(1, schedule.warmup_steps))
    left = (schedule.steps - step) / max(1, schedule.decay_steps)
    return warm * min(1.0, max(0.0, left))


class Optimisers:
    """Muon and AdamW, moved together."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[tuple[Sequence[nn.Parameter], float]],
        schedule: Schedule,
    ) -> None:
        """Take what is to be moved.

        Args:
            matrices: Moved by Muon; may be none.
            others: Moved by AdamW; weights with their learning rate.
            schedule: How far.
        """
        groups = [{"params": list(weights), "lr": rate} for weights, rate in others]
        self._schedule = schedule
        adamw = torch.optim.AdamW(groups, lr=schedule.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.all: Sequence[torch.optim.Optimizer] = (adamw,)
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=schedule.muon_lr, weight_decay=schedule.weight_decay
            )
            self.all = (muon, adamw)
        self._rates = [[group["lr"] for group in one.param_groups] for one in self.all]
        self._moved = [p for one in self.all for group in one.param_groups for p in group["params"]]

    @classmethod
    def of_model(
        cls,
        model: Qwen2_5_VLForConditionalGeneration,
        schedule: Schedule,
        vision_lr: float | None = None,
    ) -> Self:
        """Take the language model, and the image tower where `vision_lr` is given.

        Args:
            model: Whose weights are moved.
            schedule: How far.
            vision_lr: Learning rate of the image tower, by AdamW; None leaves the tower.
        """
        tower = [] if vision_lr is None else [(list(model.model.visual.parameters()), vision_lr)]
        language = model.model.language_model
        matrices, rest = parted(language, language.layers)
        return cls(matrices, [(rest, schedule.adamw_lr), *tower], schedule)

    def step(self, step: int) -> float:
        """Clip the gradients to norm 1, move the weights, forget the gradients.

        Args:
            step: Number of the step, counted from 0.

        Returns:
            The factor on the learning rates.
        """
        factor = learning_rate_factor(step, self._schedule)
        nn.utils.clip_grad_norm_(self._moved, 1.0)
        for optimizer, rates in zip(self.all, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return factor


def parted(model: nn.Module, layers: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of the layers, which Muon moves, and all other weights of a model."""
    matrices = [weight for weight in layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    return matrices, [weight for weight in model.parameters() if id(weight) not in chosen]


def save_checkpoint(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int
) -> None:
    """Write a checkpoint beside the last one and swap them.

    At any moment `folder`, or else its `.old`, is whole: that is where `load_checkpoint` looks. Of several
    processes, which all have the same, the first writes.
    """
    if not is_first():
        return
    fresh, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [one.state_dict() for one in optimizers],
            "step": step,
        },
        fresh / "state.pt",
    )
    if folder.exists():  # if not, a run was killed at this point and `old` is all there is
        shutil.rmtree(old, ignore_errors=True)
        Path(folder).replace(old)
    Path(fresh).replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> int:
    """Take weights and optimisers from the last whole checkpoint; return its step, 0 for none."""
    whole = next(
        (f for f in (folder, folder.with_suffix(".old")) if (f / "state.pt").exists()), None
    )
    if whole is None:
        return 0
    state = torch.load(whole / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def open_run(output: Path, schedule: Schedule, resume: Path | None) -> RunDirectory:
    """Return the directory of a run that begins in `output`, or goes on where it was.

    Args:
        output: Where it begins.
        schedule: The stage's whole config.
        resume: Directory of the run that goes on.

    Raises:
        ConfigError: There is a run in `output`, none in `resume`, or one with another config.
    """
    directory = RunDirectory.open(
        resume or output,
        schedule,
        resume=resume is not None,
        may_change=schedule.resumable_keys,
    )
    # A start that made no step may have left some, under another config.
    if resume is None and is_first():
        checkpoint = directory.path / CHECKPOINT
        for one in (checkpoint, checkpoint.with_suffix(".old")):
            shutil.rmtree(one, ignore_errors=True)
    return directory


def run_steps(
    model: nn.Module,
    optimisers: Optimisers,
    schedule: Schedule,
    directory: RunDirectory,
    step: int,
    learn: Callable[[], tuple[float, int]],
    validate: Callable[[], float],
) -> int:
    """Make the steps that are left, with metrics and checkpoints; return how many are made in all.

    Args:
        model: What is saved.
        optimisers: They move it.
        schedule: How many steps, and how often the rest.
        directory: Of the run; checkpoints lie in its `CHECKPOINT`.
        step: How many steps are made already.
        learn: Computes the gradients of a step; returns its loss in nats per token, and the tokens read. Of several
            processes, which take the same steps, all return those of all.
        validate: Returns the loss on held-out data, in nats per token.

    Raises:
        StoppedEarly: Ctrl-C or SIGTERM; the step at hand was ended and a checkpoint was saved.
    """
    checkpoint = directory.path / CHECKPOINT
    started, seen = time.monotonic(), 0
    with StopRequest() as stopping:
        while step < schedule.steps and not in_any_process(stopping.asked):
            loss, tokens = learn()
            metrics = {"loss": loss, "lr_factor": optimisers.step(step)}
            step += 1
            if step % schedule.evaluate_every == 0 or step == schedule.steps:
                metrics["validation_loss"] = validate()
            seen += tokens
            metrics["tokens_per_second"] = seen / (time.monotonic() - started)
            directory.metrics(step=step, **metrics)
            if step % schedule.save_every == 0 or step == schedule.steps:
                save_checkpoint(checkpoint, model, optimisers.all, step)
        if in_any_process(stopping.asked):
            save_checkpoint(checkpoint, model, optimisers.all, step)
            raise StoppedEarly(f"saved at step {step}; go on with --resume {directory.path}")
    return step
