"""A sample of what a policy wrote while it was trained: `rollouts.jsonl` in the run directory.

One row for each completion of the groups that are kept: what it said, what every part of it earned,
and the advantage that was learnt from. It holds what people said in the corpora, as the corpora do.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.common.jsonl import filter_rows
from training.common.processes import is_first
from training.data.histories import History
from training.grpo.reward import Scored

ROLLOUTS_FILE = "rollouts.jsonl"


class RolloutLog:
    """Appends groups to the file; only the first process writes."""

    def __init__(self, folder: Path, groups: int, group_size: int) -> None:
        self._path = folder / ROLLOUTS_FILE
        self._most = groups * group_size

    def write(
        self,
        step: int,
        scored: Sequence[Scored],
        advantages: Sequence[float],
        histories: Sequence[History],
    ) -> None:
        """Append the first groups of a generation.

        Args:
            step: The optimiser step that learns from them.
            scored: The completions, groups one behind the other.
            advantages: One for each.
            histories: What their prompts were made of.
        """
        if not is_first() or not self._most:
            return
        rows = [
            {"step": step, "history": histories[one.row].id, **_told(one), "advantage": advantage}
            for one, advantage in list(zip(scored, advantages, strict=True))[: self._most]
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`: a run that goes on from there makes them again."""
        if is_first():
            filter_rows(self._path, lambda row: row["step"] <= step)


def _told(one: Scored) -> dict[str, Any]:
    values = {
        "reply": one.parts.response,
        "format": one.parts.format,
        "total": one.total,
        "s_in": one.s_in,
        "s_hi": one.s_hi,
        "tau": one.tau,
        "weighted": one.weighted,
    }
    # NaN is no JSON
    known = {n: None if v is None or math.isnan(v) else v for n, v in values.items()}
    return {"text": one.text, "steps": one.parts.steps, **known, "unscorable": one.reason}
