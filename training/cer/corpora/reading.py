"""Read files of any size in constant memory: JSON lines, JSON arrays, CSV, archives.

Each function yields numbered rows and counts unreadable ones. A file that is missing, truncated or not
in UTF-8 raises `ConfigError`: it has to be fetched again.

A hub data set (`training.cer.corpora.hub`) can replace a file; its rows replace the records. A column
that is null in a row counts as absent, because all rows of a data set have the same columns.
"""

import csv
import gzip
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compeer_core.errors import ConfigError
from training.cer.corpora.hub import hub_rows, is_hub_name
from training.cer.records import Dropped, Reason, SourceDialogue

_CHUNK = 1 << 18
_LARGEST_RECORD = 1 << 24
"""In characters. A longer record of an array counts as broken."""
_DAMAGED = (OSError, EOFError, UnicodeDecodeError, zlib.error, tarfile.TarError, csv.Error)
_OF_ANOTHER_LAYOUT = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Row:
    """A record of a file, with its line or record number or the name of the packed file."""

    value: Any
    where: int | str


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]  # GzipFile reads as IO[bytes] does
    except _DAMAGED as error:
        raise ConfigError(f"{path}: damaged ({error}); fetch it again") from error


def json_lines(path: Path, dropped: Dropped) -> Iterator[Row]:
    """Yield the objects of a JSON lines file; empty lines are skipped."""
    if is_hub_name(path):
        yield from _hub_objects(path, dropped)
        return
    with _opened(path) as file:
        # Bytes are split at line feeds only, so U+2028 within a string is safe.
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                dropped.add(Reason.NOT_JSON, path, number, type(error).__name__)
                continue
            yield Row(value, number)


def json_array(path: Path, dropped: Dropped) -> Iterator[Row]:
    """Yield the objects of a JSON array, one in memory at a time."""
    if is_hub_name(path):
        yield from _hub_objects(path, dropped)
        return
    decoder = json.JSONDecoder()
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        buffer = text.read(_CHUNK).lstrip()
        if not buffer.startswith("["):
            raise ConfigError(f"{path}: not a JSON array")
        at = 1
        number = 0
        while True:
            at = _after_space(buffer, at)
            if at < len(buffer):
                if buffer[at] == "]":
                    return
                try:
                    value, at = decoder.raw_decode(buffer, at)
                except RecursionError:
                    dropped.add(Reason.NOT_JSON, path, f"record {number}")
                    return
                except ValueError:
                    pass  # incomplete or broken: read more text
                else:
                    yield Row(value, number)
                    number += 1
                    continue
            # Twice as much each time, so that a long record is not decoded many times.
            more = text.read(max(_CHUNK, len(buffer) - at))
            if not more or len(buffer) - at > _LARGEST_RECORD:
                dropped.add(Reason.NOT_JSON, path, f"record {number}")
                return
            buffer, at = buffer[at:] + more, 0


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _hub_objects(path: Path, dropped: Dropped) -> Iterator[Row]:
    """Yield the objects of a data set; one of text files has a single column `text` of lines."""
    for number, row in enumerate(hub_rows(path), start=1):
        if row.keys() != {"text"}:
            yield Row(_without_nulls(row), number)
        elif row["text"].strip():
            try:
                yield Row(json.loads(row["text"]), number)
            except (ValueError, RecursionError) as error:
                dropped.add(Reason.NOT_JSON, path, number, type(error).__name__)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def csv_rows(
    path: Path, dropped: Dropped, columns: Iterable[str], *, quoted: bool = True
) -> Iterator[Row]:
    """Yield the rows of a CSV with a header that includes these columns.

    In a file that is not `quoted`, quotation marks are literal, and fields beyond the header are
    ignored.
    """
    if is_hub_name(path):
        yield from _hub_table(path, columns)
        return
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        csv.field_size_limit(_LARGEST_RECORD)  # pictures in HTML exceed the default
        reader = csv.DictReader(
            text, strict=True, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
        )
        _check_columns(path, columns, reader.fieldnames or ())
        for row in reader:
            if not quoted:
                row.pop(None, None)
            if None in row or None in row.values():
                dropped.add(Reason.ANOTHER_LAYOUT, path, reader.line_num, "number of fields")
                continue
            yield Row(row, reader.line_num)


def _hub_table(path: Path, columns: Iterable[str]) -> Iterator[Row]:
    for number, row in enumerate(hub_rows(path), start=1):
        if number == 1:
            _check_columns(path, columns, row)
        yield Row({column: _as_field(value) for column, value in row.items()}, number)


def _as_field(value: object) -> str:
    """Return a value as in the CSV: a column of integers with gaps is read as floats."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def _check_columns(path: Path, required: Iterable[str], columns: Iterable[str]) -> None:
    missing = set(required) - set(columns)
    if missing:
        raise ConfigError(f"{path}: missing column {', '.join(sorted(missing))}")


def bare_csv_rows(path: Path, dropped: Dropped, width: int) -> Iterator[Row]:
    """Yield the rows of a CSV without a header."""
    _refuse_hub_name(path)
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        for row in reader:
            if len(row) != width:
                dropped.add(Reason.ANOTHER_LAYOUT, path, reader.line_num, "number of fields")
                continue
            yield Row(row, reader.line_num)


def text_lines(path: Path) -> Iterator[Row]:
    """Yield the lines of a text, split at line feeds only."""
    _refuse_hub_name(path)
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            yield Row(line.decode("utf-8-sig").rstrip("\r\n"), number)


def packed_files(path: Path, suffix: str) -> Iterator[Row]:
    """Yield the bytes of the files with a suffix, from a folder (sorted) or a tar archive."""
    _refuse_hub_name(path)
    if path.is_dir():
        for inner in sorted(path.rglob(f"*{suffix}")):
            yield Row(inner.read_bytes(), inner.relative_to(path).as_posix())
        return
    # mode r| never seeks, and members are forgotten, so that memory stays constant
    with _opened(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(suffix) else None
            if content is not None:
                yield Row(content.read(), member.name)
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header


def _refuse_hub_name(path: Path) -> None:
    if is_hub_name(path):
        raise ConfigError(
            f"{path}: this corpus is read from its own files, not from a hub data set; download"
            " them (hf download --repo-type dataset) and use their path"
        )


def converted(
    rows: Iterable[Row],
    convert: Callable[[Row], SourceDialogue | None],
    path: Path,
    dropped: Dropped,
) -> Iterator[SourceDialogue]:
    """Yield the converted rows; count those in another layout.

    `convert` returns None for a row that it has counted itself.

    Raises:
        ConfigError: All rows of a hub data set have another layout.
    """
    fitting = misfits = 0
    for row in rows:
        try:
            dialogue = convert(row)
        except _OF_ANOTHER_LAYOUT as error:
            dropped.add(Reason.ANOTHER_LAYOUT, path, row.where, type(error).__name__)
            misfits += 1
            continue
        fitting += 1
        if dialogue is not None:
            yield dialogue
    if misfits and not fitting and is_hub_name(path):
        raise ConfigError(
            f"{path}: its rows do not have the layout of this loader; download the corpus's own files"
            " and use their path, or choose another loader"
        )


_SENTENCE_END = re.compile(r"[.?!…\n。！？]+")
_NOT_A_LETTER = re.compile(r"[\W_]+")


def opening_key(texts: Iterable[str], letters: int = 60) -> str:
    """Return a key of a dialogue from its opening, the same in all layouts of a corpus.

    Layouts differ in joined turns, spacing and case, and MultiESC drops repeated sentences; so only
    letters and digits count, and each sentence once. ESConv's 1,261 public dialogues have distinct
    keys.

    Example:
        >>> opening_key(["Hi there.", "I can't sleep"]) == opening_key(["hi there . i can ' t sleep ."])
        True
    """
    seen: dict[str, None] = {}
    length = 0
    for text in texts:
        for sentence in _SENTENCE_END.split(text.lower()):
            letters_only = _NOT_A_LETTER.sub("", sentence)
            if letters_only and letters_only not in seen:
                seen[letters_only] = None
                length += len(letters_only)
        if length >= letters:
            break
    return text_key("".join(seen)[:letters])


def letters_of(text: str) -> str:
    """Return letters and digits only: layouts differ in case and in the spacing of punctuation."""
    return "".join(filter(str.isalnum, text.lower()))


def text_key(text: str) -> str:
    """Return a short hash of a text, which does not reveal it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def plain(value: object) -> str:
    """Return a label as stripped text, "" if it is None."""
    return "" if value is None else str(value).strip()


def labels_of(values: Mapping[str, object], names: Iterable[str]) -> dict[str, str]:
    """Return the labels that exist and are not empty."""
    return {name: text for name in names if (text := plain(values.get(name)))}
