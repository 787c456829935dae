"""Reading files of any size in constant memory: JSON lines, JSON arrays, CSV, packed folders.

Each function yields numbered rows and counts those that cannot be read. A file that is missing,
cut short or not in UTF-8 is a `ConfigError`: it is damaged as a whole, and the cure is a new copy.
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
from training.cer.records import Dropped, Reason, SourceDialogue

_CHUNK = 1 << 18
_LARGEST_RECORD = 1 << 24
"""In characters. A record of an array that is not closed until then is taken for broken."""
_DAMAGED = (OSError, EOFError, UnicodeDecodeError, zlib.error, tarfile.TarError, csv.Error)
_OF_ANOTHER_LAYOUT = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Row:
    """A record of a file, and where it stands: a line or record number, or a packed file."""

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
        raise ConfigError(f"{path}: damaged, fetch it again ({error})") from error


def json_lines(path: Path, dropped: Dropped) -> Iterator[Row]:
    """Yield the objects of a file with one per line; empty lines are no records."""
    with _opened(path) as file:
        # Bytes are split at line feeds only, so U+2028 within a string does no harm.
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
    """Yield the objects of a file that is one array, without holding more than one."""
    decoder = json.JSONDecoder()
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        held = text.read(_CHUNK).lstrip()
        if not held.startswith("["):
            raise ConfigError(f"{path}: not a JSON array")
        at = 1
        number = 0
        while True:
            at = _after_space(held, at)
            if at < len(held):
                if held[at] == "]":
                    return
                try:
                    value, at = decoder.raw_decode(held, at)
                except RecursionError:
                    dropped.add(Reason.NOT_JSON, path, f"record {number}")
                    return
                except ValueError:
                    pass  # not whole yet, or broken: more text will tell
                else:
                    yield Row(value, number)
                    number += 1
                    continue
            # Twice as much each time, so that a long record is not decoded from its start often.
            more = text.read(max(_CHUNK, len(held) - at))
            if not more or len(held) - at > _LARGEST_RECORD:
                dropped.add(Reason.NOT_JSON, path, f"record {number}")
                return
            held, at = held[at:] + more, 0


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def csv_rows(path: Path, dropped: Dropped, columns: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of a CSV with a header, which must have these columns; others are kept too."""
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        csv.field_size_limit(_LARGEST_RECORD)  # pictures within HTML exceed the default
        reader = csv.DictReader(text, strict=True)
        missing = set(columns) - set(reader.fieldnames or ())
        if missing:
            raise ConfigError(f"{path}: no column {', '.join(sorted(missing))}")
        for row in reader:
            if None in row or None in row.values():
                dropped.add(Reason.ANOTHER_LAYOUT, path, reader.line_num, "number of fields")
                continue
            yield Row(row, reader.line_num)


def bare_csv_rows(path: Path, dropped: Dropped, width: int) -> Iterator[Row]:
    """Yield the rows of a CSV that has no header."""
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        for row in reader:
            if len(row) != width:
                dropped.add(Reason.ANOTHER_LAYOUT, path, reader.line_num, "number of fields")
                continue
            yield Row(row, reader.line_num)


def text_lines(path: Path) -> Iterator[Row]:
    """Yield the lines of a text; only line feeds end one."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            yield Row(line.decode("utf-8-sig").rstrip("\r\n"), number)


def packed_files(path: Path, suffix: str) -> Iterator[Row]:
    """Yield the bytes of the files with a suffix, in a folder (sorted) or in a tar archive."""
    if path.is_dir():
        for inner in sorted(path.rglob(f"*{suffix}")):
            yield Row(inner.read_bytes(), inner.relative_to(path).as_posix())
        return
    # mode r| never seeks and is told to forget each member, so the archive's size does not matter
    with _opened(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.name.endswith(suffix) else None
            if content is not None:
                yield Row(content.read(), member.name)
            archive.members.clear()  # type: ignore[attr-defined]  # else it keeps every header


def converted(
    rows: Iterable[Row],
    convert: Callable[[Row], SourceDialogue | None],
    path: Path,
    dropped: Dropped,
) -> Iterator[SourceDialogue]:
    """Yield what `convert` makes of each row; one that is of another layout is counted.

    `convert` returns None for what it has counted itself.
    """
    for row in rows:
        try:
            dialogue = convert(row)
        except _OF_ANOTHER_LAYOUT as error:
            dropped.add(Reason.ANOTHER_LAYOUT, path, row.where, type(error).__name__)
            continue
        if dialogue is not None:
            yield dialogue


_SENTENCE_END = re.compile(r"[.?!…\n。！？]+")
_NOT_A_LETTER = re.compile(r"[\W_]+")


def opening_key(texts: Iterable[str], letters: int = 60) -> str:
    """Return a name for a dialogue by how it opens, the same in all layouts of one corpus.

    Layouts differ in how they join turns, in spaces around punctuation, in case, and MultiESC drops
    sentences that are said again; so only letters and digits count, and each sentence once. Of
    ESConv's 1,261 public dialogues no two have the same key.

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


def text_key(text: str) -> str:
    """Return a short name for a text that says nothing of it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def plain(value: object) -> str:
    """Return a label as text: no space around it, nothing where there is none."""
    return "" if value is None else str(value).strip()


def labels_of(values: Mapping[str, object], names: Iterable[str]) -> dict[str, str]:
    """Return those labels that are there and not empty."""
    return {name: text for name in names if (text := plain(values.get(name)))}
