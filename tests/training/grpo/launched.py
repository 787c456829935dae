"""What `test_two_processes.py` starts: the stage from its command line, in the small world.

python launched.py CONFIG [--fail-at STEP RANK FILE] [KEY=VALUE ...]
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.training.grpo import world
from training.__main__ import main
from training.common.processes import process_rank
from training.grpo import train


def fails(step: int, rank: int, told: Path) -> type:
    """The reward of the small world, which breaks in one process."""

    class Failing(world.ByLetters):
        calls = 0

        def judged(self, *arguments: Any) -> Any:
            type(self).calls += 1
            if self.calls == step and process_rank() == rank:
                told.write_text(str(time.time()), encoding="utf-8")
                raise MemoryError("this process broke")
            return super().judged(*arguments)

    return Failing


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, *rest = sys.argv[1:]
    world.install(setattr)
    if rest and rest[0] == "--fail-at":
        _, step, rank, told, *rest = rest
        setattr(train, "GroupReward", fails(int(step), int(rank), Path(told)))  # noqa: B010
    changes = [part for change in rest for part in ("--set", change)]
    sys.exit(main(["grpo", path, *changes]))
