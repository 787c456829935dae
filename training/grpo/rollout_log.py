"""A sample of the completions of a run: `rollouts.jsonl` in the run directory.

One row per completion of the logged groups: its text, every part of its reward, and its advantage.
Completions may quote the corpora, so treat the file as you treat them.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compeer_core.cer import CerRecord
from training.common.jsonl import append_rows, filter_rows
from training.common.processes import is_first
from training.grpo.reward import Scored

ROLLOUTS_FILE = "rollouts.jsonl"


class RolloutLog:
    """Appends groups to the file; only the first process writes."""

    def __init__(self, folder: Path, groups: int, group_size: int) -> None:
        self._path = folder / ROLLOUTS_FILE
        self._limit = groups * group_size

    def write(
        self,
        step: int,
        scored: Sequence[Scored],
        advantages: Sequence[float],
        records: Sequence[CerRecord],
    ) -> None:
        """Append the first groups of a generation.

        Args:
            step: The optimiser step that learns from them.
            scored: The completions, group after group.
            advantages: One per completion.
            records: The rows of the prompts, by number.
        """
        if not is_first() or not self._limit:
            return
        rows = [
            {
                "step": step,
                "history": records[completion.row].id,
                **_values(completion),
                "advantage": advantage,
            }
            for completion, advantage in list(zip(scored, advantages, strict=True))[: self._limit]
        ]
        append_rows(self._path, rows)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`: a run resumed there writes them again."""
        if is_first():
            filter_rows(self._path, lambda row: row["step"] <= step)


def _values(completion: Scored) -> dict[str, Any]:
    values = {
        "reply": completion.parts.response,
        "format": completion.parts.format,
        "total": completion.total,
        "s_in": completion.s_in,
        "s_hi": completion.s_hi,
        "tau": completion.tau,
        "weighted": completion.weighted,
    }
    # JSON has no NaN
    known = {n: None if v is None or math.isnan(v) else v for n, v in values.items()}
    return {
        "text": completion.text,
        "steps": completion.parts.steps,
        **known,
        "unscorable": completion.reason,
    }
