r"""A stage that several processes run together, as `torchrun` and `accelerate launch` start it.

```text
torchrun --nproc-per-node 8 -m training reward training/configs/qwen/reward_lora.toml \
    --set training.accumulation=4
```

Each process has a part of every batch; the first of them all writes the run directory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


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
