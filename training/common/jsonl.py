"""JSON-lines files that a run appends to, and whose last line a crash may have truncated."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from compeer_core.row_files import json_lines, parse_json, replacing


def complete_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, except a truncated last line; a missing file has none.

    Raises:
        ConfigError: A complete line is not JSON.
    """
    if not path.exists():
        return
    for where, line in json_lines(path):
        if line.endswith("\n"):
            yield parse_json(where, line)


def filter_rows(path: Path, predicate: Callable[[dict[str, Any]], bool]) -> None:
    """Remove rows that do not satisfy `predicate`, and a truncated last line. Atomic."""
    if not path.exists():
        return
    replace_rows(path, [row for row in complete_rows(path) if predicate(row)])


def replace_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by rows. Atomic."""
    with replacing(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def drop_truncated_line(path: Path) -> None:
    """Remove an unterminated last line, so that appending starts a new line."""
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
