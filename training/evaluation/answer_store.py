"""Stores generated answers on disk, so that an interrupted evaluation resumes automatically.

Each batch of turns is a line of a JSONL file, with a digest of everything it depends on: weights, prompts,
sampling and library versions. Lines are reused as long as their digests match; from the first mismatch
on, the file is overwritten.

A finished evaluation deletes its files: the digest does not include this program's own code, so a later
version must not reuse them.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from compeer_core.backends.transformers_.batch_generation import Turn
from training.common.jsonl import append_rows, complete_rows, filter_rows

Turns = Sequence[tuple[Turn, ...]]
"""A tuple per prompt, with a turn per seed."""

_FOLDER = "answers"


def store_path(run: Path, name: str) -> Path:
    """Return the file of a run for one policy and sampling setting."""
    return run / _FOLDER / f"{name}.jsonl"


def clear_stores(run: Path) -> None:
    """Delete the stored answers of a finished run."""
    shutil.rmtree(run / _FOLDER, ignore_errors=True)


class AnswerStore:
    """The stored answers of one policy and sampling setting, read and written in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = list(complete_rows(path))
        self._next = 0
        self._is_written = False

    def take(self, digest: str) -> Turns | None:
        """Return the next batch if it is stored with this digest, else None."""
        row = self._rows[self._next] if self._next < len(self._rows) else None
        if row is None or row["digest"] != digest:
            return None
        self._next += 1
        return [
            tuple(Turn(turn["text"], tuple(turn["ids"]), turn["ended"]) for turn in turns)
            for turns in row["turns"]
        ]

    def put(self, digest: str, turns: Turns) -> None:
        """Store the next batch; the first call discards the old rows from here on."""
        if not self._is_written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            filter_rows(self._path, lambda row: row["place"] < self._next)
            self._rows, self._is_written = [], True
        rows = [[asdict(turn) for turn in of_prompt] for of_prompt in turns]
        row = {"place": self._next, "digest": digest, "turns": rows}
        append_rows(self._path, [row])
        self._next += 1
