"""Files of rows: JSON lines, CSV cells that no spreadsheet executes, and times in UTC."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    TypeAdapter,
    ValidationError,
)

from compeer_core.errors import ConfigError

Row = TypeVar("Row", bound=BaseModel)
Value = TypeVar("Value")

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
    """Open a UTF-8 file for reading, with or without a byte order mark; `.gz` is decompressed.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        open_text = gzip.open if path.suffix == ".gz" else open
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {problem}") from error
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
    """Yield the place, as errors name it, and the text of each line that is not empty.

    Raises:
        ConfigError: The file cannot be read.
    """
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", line


def parse_json(where: str, line: str) -> Any:
    """Return the value of a line of JSON.

    Raises:
        ConfigError: The line is not JSON; the message names the place.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error


def parse_row(kind: type[Row], where: str, line: str) -> Row:
    """Return the row of a line of JSON.

    Raises:
        ConfigError: The line is not such a row; the message names the place and the first problem.
    """
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(map(str, detail["loc"]))
        problem = f"{field + ': ' if field else ''}{detail['msg']}"
        raise ConfigError(f"{where}: {problem} (expected a {kind.__name__})") from error


def read_rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines; empty lines are skipped.

    Raises:
        ConfigError: See `json_lines` and `parse_row`.
    """
    for where, line in json_lines(path):
        yield parse_row(kind, where, line)


def read_json(path: Path, kind: type[Value]) -> Value:
    """Read a JSON file as a type.

    Raises:
        ConfigError: It cannot be read, or contains something else.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(map(str, detail["loc"])) or "the file"
        raise ConfigError(f"{path}: {where}: {detail['msg']}") from error


def guarded(text: str) -> str:
    """Return the text of a CSV cell, with an apostrophe before what a spreadsheet may execute.

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
