"""Files of rows: JSON lines, CSV cells that no spreadsheet runs, and times in UTC."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ValidationError

from compeer_core.errors import ConfigError

Row = TypeVar("Row", bound=BaseModel)

_ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_CELL_BREAKS = ("\t", "\r", "\n")


def _iso_time(value: object) -> object:
    # pydantic would read a bare number, such as a spreadsheet's date, as seconds since 1970.
    if isinstance(value, datetime) or (isinstance(value, str) and _ISO_TIME.match(value)):
        return value
    raise ValueError("not a date with time and zone")


def _in_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("too far from the years 1 to 9999") from error


UtcDatetime = Annotated[AwareDatetime, BeforeValidator(_iso_time), AfterValidator(_in_utc)]
"""A time with a zone, given as ISO 8601 and converted to UTC."""


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 file for reading, with or without a byte order mark.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (save it as 'CSV UTF-8')") from error


@contextmanager
def replacing(path: Path, encoding: str = "utf-8") -> Iterator[IO[str]]:
    """Write a file under a temporary name, and rename it when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("w", encoding=encoding, newline="") as file:
        yield file
    temporary.replace(path)


def write_rows(path: Path, rows: Iterable[BaseModel]) -> int:
    """Replace a file by JSON lines, one row each; return the number of rows."""
    with replacing(path) as file:
        return write_lines(file, rows)


def write_lines(file: IO[str], rows: Iterable[BaseModel]) -> int:
    """Write JSON lines into an open file; return the number of rows."""
    count = 0
    for row in rows:
        file.write(row.model_dump_json() + "\n")
        count += 1
    return count


def json_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not empty, each after the place that errors name.

    Raises:
        ConfigError: The file cannot be read.
    """
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", line


def parse_row(kind: type[Row], where: str, line: str) -> Row:
    """Return the row of a line of JSON.

    Raises:
        ConfigError: The line is no such row: the sentence names the place and the first problem.
    """
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(map(str, detail["loc"]))
        raise ConfigError(f"{where}: {field + ': ' if field else ''}{detail['msg']}") from error


def read_rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines; empty lines are skipped.

    Raises:
        ConfigError: See `json_lines` and `parse_row`.
    """
    for where, line in json_lines(path):
        yield parse_row(kind, where, line)


def guarded(text: str) -> str:
    """Return the text of a CSV cell, after an apostrophe where a spreadsheet might run it.

    Example:
        >>> guarded("=1+1"), guarded("plain")
        ("'=1+1", 'plain')
    """
    return f"'{text}" if _is_formula(text) else text


def unguarded(text: str) -> str:
    """Undo `guarded`."""
    return text[1:] if text.startswith("'") and _is_formula(text) else text


def _is_formula(text: str) -> bool:
    """Whether a spreadsheet may run a text, or could after its leading apostrophes are removed."""
    bare = text.lstrip("'")
    return bare.lstrip().startswith(_FORMULA) or bare.startswith(_CELL_BREAKS)
