"""Files of corpora, and what a loader reads from them."""

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from training.cer.corpora import LOADERS
from training.cer.records import Dropped, SourceDialogue


def load(
    name: str, path: str | Path, split: str | None = None
) -> tuple[list[SourceDialogue], Dropped]:
    dropped = Dropped()
    return list(LOADERS[name](Path(path), dropped, split)), dropped


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def write_json(path: Path, value: object) -> Path:
    return write(path, json.dumps(value, ensure_ascii=False, indent=2))


def write_csv(path: Path, *rows: Sequence[object]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path
