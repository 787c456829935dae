"""Answers on disk as they are written, so that an evaluation that was stopped goes on where it was.

Turns that were written together are one line of a file, with a digest of all that they depend on: the
weights, how they are asked, what they are asked, and the versions of the libraries. A line is taken
for what would be written now only where its digest says so; from the first that differs, the file is
written anew. So nobody has to say whether an evaluation begins or goes on.

Once an evaluation has ended its files are gone: what this program does to write an answer is not in the
digest, and a later version must not be given the answers of an earlier one.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from compeer_core.backends.transformers_.batch_generation import Turn
from training.common.jsonl import complete_rows, filter_rows

Turns = Sequence[tuple[Turn, ...]]
"""One tuple for each prompt: a turn from each of its seeds."""

_FOLDER = "answers"


def kept_file(run: Path, name: str) -> Path:
    """Return where a run keeps the answers of one policy that is asked in one way."""
    return run / _FOLDER / f"{name}.jsonl"


def forget(run: Path) -> None:
    """Remove the answers of a run that has ended."""
    shutil.rmtree(run / _FOLDER, ignore_errors=True)


class KeptAnswers:
    """The file of one policy that is asked in one way, read and written in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = list(complete_rows(path))
        self._place = 0
        self._is_written = False

    def take(self, digest: str) -> Turns | None:
        """Return the next turns as they were written before, or None if they are to be written."""
        row = self._known[self._place] if self._place < len(self._known) else None
        if row is None or row["digest"] != digest:
            return None
        self._place += 1
        return [
            tuple(Turn(one["text"], tuple(one["ids"]), one["ended"]) for one in turns)
            for turns in row["turns"]
        ]

    def put(self, digest: str, turns: Turns) -> None:
        """Write the next turns down; what the file held from here on is gone."""
        if not self._is_written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            filter_rows(self._path, lambda row: row["place"] < self._place)
            self._known, self._is_written = [], True
        rows = [[asdict(one) for one in of_prompt] for of_prompt in turns]
        row = {"place": self._place, "digest": digest, "turns": rows}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._place += 1
