"""Runs of a stage as tests need them: in processes of their own, and stopped on the way."""

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
    """Run `python -m training` with arguments, in so many processes of one thread each."""
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
def stopped_in_step_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ask whatever trains to stop while it makes its third step, and expect that it does."""
    step = Optimisers.step

    def asked_to_stop(self: Optimisers, number: int) -> float:
        if number == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Optimisers, "step", asked_to_stop)
        with pytest.raises(StoppedEarly, match=r"saved at step 3; go on with --resume"):
            yield
