r"""Helpers for a stage that runs in several processes, started by `torchrun` or `accelerate launch`.

```text
torchrun --nproc-per-node 8 -m training reward training/configs/qwen/reward_lora.toml \
    --set training.accumulation=4
```

Each process takes a part of every batch; rank 0 writes the run directory.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from compeer_core.errors import BackendError

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")


def is_first() -> bool:
    """Whether this is rank 0, which is also true of a single process."""
    return process_rank() == 0


def process_rank() -> int:
    """Return the rank of this process, counted from 0."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes(device: str) -> str:
    """Wait for all processes; return the device of this one.

    Args:
        device: Device from the config; "cuda" becomes a different accelerator in each process.
    """
    if process_count() == 1:
        return device
    from accelerate import PartialState

    return str(PartialState(cpu=device == "cpu").device)


def sum_over_processes(values: "Tensor") -> "Tensor":
    """Sum a tensor over all processes, in place. Collective; the result is the same in all, bit for bit."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def in_any_process(condition: bool) -> bool:
    """Whether a condition holds in at least one process. Collective.

    Used for loop exits: a process that left a loop alone would leave the others waiting.
    """
    import torch

    if not torch.distributed.is_initialized():
        return condition
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(int(condition), device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def gather_from_processes(values: Sequence[Value]) -> list[list[Value]]:
    """Return the values of every process, ordered by rank. Collective; values are pickled."""
    import torch

    if not torch.distributed.is_initialized():
        return [list(values)]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, list(values))
    return gathered


@contextmanager
def fail_together() -> Iterator[None]:
    """Make a block that fails in one process fail in all.

    Otherwise the other processes wait until the collective times out, after half an hour.

    Raises:
        BackendError: The block failed in another process.
    """
    try:
        yield
    except Exception as error:
        gather_from_processes([f"{type(error).__name__}: {error}"])
        raise
    failures = [message for [message] in gather_from_processes([""]) if message]
    if failures:
        raise BackendError(f"another process failed: {failures[0]}")
