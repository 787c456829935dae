r"""A stage that several processes run together, as `torchrun` and `accelerate launch` start it.

```text
torchrun --nproc-per-node 8 -m training reward training/configs/qwen/reward_lora.toml \
    --set training.accumulation=4
```

Each process has a part of every batch; the first of them all writes the run directory.
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
    """Whether this is the first process of all, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def process_count() -> int:
    """How many processes work together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def first_goes_ahead() -> Iterator[None]:
    """Let the first process through a block before the others: they read what it has written."""
    if process_count() == 1:
        yield
        return
    import torch
    from accelerate import PartialState

    with PartialState(cpu=not torch.cuda.is_available()).main_process_first():
        yield


def join_processes(device: str) -> str:
    """Wait until all processes are there; return the device of this one.

    Args:
        device: Where the stage computes; "cuda" is another accelerator for each process.
    """
    if process_count() == 1:
        return device
    from accelerate import PartialState

    return str(PartialState(cpu=device == "cpu").device)


def added_up(values: "Tensor") -> "Tensor":
    """Add up a tensor over all processes, in place; all of them have to ask and get the same bits."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def in_any_process(claim: bool) -> bool:
    """Whether a claim is true in at least one process; all of them have to ask.

    A process that left a loop by itself would leave the others waiting for it.
    """
    import torch

    if not torch.distributed.is_initialized():
        return claim
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(int(claim), device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def process_number() -> int:
    """Which of the processes this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def gathered(values: Sequence[Value]) -> list[list[Value]]:
    """Return the values of each process, in the order of the processes; all of them have to ask.

    Values are pickled: they are for what a run says and judges, not for tensors.
    """
    import torch

    if not torch.distributed.is_initialized():
        return [list(values)]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, list(values))
    return found


@contextmanager
def failing_together() -> Iterator[None]:
    """Let a block that fails in one process fail in all of them.

    The others would wait for it until they lose patience, which takes half an hour.

    Raises:
        BackendError: The block failed in another process.
    """
    try:
        yield
    except Exception as error:
        gathered([f"{type(error).__name__}: {error}"])
        raise
    failures = [told for told in gathered([""]) if told[0]]
    if failures:
        raise BackendError(f"another process failed: {failures[0][0]}")
