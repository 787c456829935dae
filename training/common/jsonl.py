"""Files with one JSON object per line that a run appends to, and that a crash may have cut short."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; a last line cut short by a crash is left out, as is a missing file."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def keep_rows(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the other rows, and a last line cut short by a crash; a crash now loses nothing."""
    if not path.exists():
        return
    kept = [row for row in whole_rows(path) if is_kept(row)]
    fresh = path.with_suffix(".new")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
