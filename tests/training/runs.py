"""Helpers for tests that run a stage in new processes, or interrupt it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from training.finetune.optimisation import Optimisers
from training.stages import StoppedEarly


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
