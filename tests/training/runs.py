"""Helpers for tests that run a stage in new processes, interrupt it, or compare its weights."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from training.common.run_directory import METRICS_FILE
from training.finetune.optimisation import Optimisers
from training.stages import StoppedEarly

SHORT_SCHEDULE: dict[str, Any] = {
    "warmup_steps": 1,
    "decay_steps": 2,
    "adamw_lr": 0.01,
    "save_every": 2,
    "evaluate_every": 2,
}
"""The schedule of a stage that trains an adapter for a few steps."""


def run_in_processes(repository: Path, count: int, *arguments: str) -> None:
    """Run `python -m training` in `count` single-threaded processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [sys.executable, *(launcher if count > 1 else []), "-m", "training", *arguments],
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@contextmanager
def interrupt_at_step_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send SIGINT during the third step of the training in the block, and expect it to stop."""
    step = Optimisers.step

    def interrupting_step(self: Optimisers, number: int) -> float:
        if number == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Optimisers, "step", interrupting_step)
        with pytest.raises(StoppedEarly, match=r"saved at step 3; resume with --resume"):
            yield


class AtStep(TrainerCallback):
    """Calls a function when a step of transformers' trainer begins."""

    def __init__(self, step: int, happens: Callable[[], object]) -> None:
        self.step = step
        self.happens = happens

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            self.happens()


class PowerCut(BaseException):
    """Not an Exception, so that no handler catches it."""


def cut() -> None:
    raise PowerCut


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint or an adapter."""
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def changed(before: Path, after: Path) -> set[str]:
    """Return the names of the weights that differ."""
    first, second = weights(before), weights(after)
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics, without what depends on the clock."""
    lines = (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    clock = {"time", "tokens_per_second"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]
