"""What is put before annotators, out of files: `python -m compeer_core.votes items FILE`.

Two kinds of files can be read. **Rows of CER** (`compeer_core.cer`), for example exported votes: each
row with a complete turn becomes an item, and its labels, if it has any, are left behind. **Items**
(`compeer_core.annotation.annotations.AnnotationItem`), as the pipeline lays them out; with the key that it
wrote beside them their answers become rows of CER here, and without it they are exported for the
pipeline, which has the key.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from compeer_core.annotation.annotations import AnnotationItem, ItemKey
from compeer_core.annotation.desk import Desk
from compeer_core.cer import CerRecord
from compeer_core.config import FrozenModel
from compeer_core.errors import CompletionError, ConfigError, ImageError
from compeer_core.images import Image, read_image
from compeer_core.reasoning import read

NO_TURN = "no complete reasoning to judge"
KNOWN = "already there"

Row = TypeVar("Row", bound=FrozenModel)
DeskItem = tuple[AnnotationItem, CerRecord | None]


@dataclass
class ItemFile:
    """A file of items, and what of it is left out as it is read.

    Attributes:
        path: A .jsonl file of either kind.
        key: The file that belongs to items, if there is one.
        left_out: How many rows gave no item, by reason.
    """

    path: Path
    key: Path | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[DeskItem]:
        """Yield the items.

        Raises:
            ConfigError: A file cannot be read, or one of its rows is none: the sentence names it.
        """
        if self._has_cases():
            if self.key is not None:
                raise ConfigError(f"{self.path}: rows of CER need no key")
            yield from self._from_records()
        else:
            yield from self._from_items()

    def _has_cases(self) -> bool:
        for where, line in _lines(self.path):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where}: is no JSON: {error}") from error
            return isinstance(row, dict) and "case" in row
        raise ConfigError(f"{self.path}: is empty")

    def _from_records(self) -> Iterator[DeskItem]:
        for where, line in _lines(self.path):
            record = _parsed(CerRecord, where, line)
            found = _item_of(record)
            if found is None:
                self.left_out[NO_TURN] += 1
            else:
                yield found

    def _from_items(self) -> Iterator[DeskItem]:
        keys = {}
        if self.key is not None:
            for where, line in _lines(self.key):
                key = _parsed(ItemKey, where, line)
                keys[key.item_id] = (where, key)
        for where, line in _lines(self.path):
            item = _parsed(AnnotationItem, where, line)
            record = None
            if keys:
                if item.id not in keys:
                    raise ConfigError(f"{where}: the key has no item {item.id}")
                at, key = keys[item.id]
                record = _record_of(at, key, item)
            yield item, record


@dataclass(frozen=True)
class Added:
    """What came of putting a file before annotators."""

    items: int
    left_out: dict[str, int]


def add_items(
    desk: Desk, path: Path, *, key: Path | None = None, pictures: Path | None = None
) -> Added:
    """Put the items of a file at the end of the desk's queue, all or none.

    Args:
        desk: Where they go. Items that it has already are passed over.
        path: See `ItemFile`.
        key: See `ItemFile`.
        pictures: The folder below which the pictures of the histories lie; None is the file's own.

    Raises:
        ConfigError: A file or a picture cannot be read: the sentence names it.
        StoreError: The database failed.
    """
    file = ItemFile(path, key)
    seen = 0

    def counted() -> Iterator[DeskItem]:
        nonlocal seen
        for each in file:
            seen += 1
            yield each

    items = desk.add_items(counted(), _opener(pictures or path.parent))
    if seen > items:
        file.left_out[KNOWN] += seen - items
    return Added(items, dict(sorted(file.left_out.items())))


def _item_of(record: CerRecord) -> DeskItem | None:
    judged = next((each for each in record.candidates if each.turn is not None), None)
    if judged is None or judged.turn is None:
        return None
    try:
        turn = read(judged.turn).turn
    except CompletionError:
        return None
    bare = {"steps": None, "steps_by": None, "reason": ""}
    first = record.first.model_copy(update=bare)
    second = None if record.second is None else record.second.model_copy(update=bare)
    unlabelled = record.model_copy(
        update={"first": first, "second": second, "preference": None, "preference_by": None}
    )
    # An id of a row may tell who wrote what.
    item_id = hashlib.sha256(f"item {record.id}".encode()).hexdigest()[:32]
    replies = None if second is None else (first.reply, second.reply)
    return AnnotationItem.of(item_id, record.case, turn, replies), unlabelled


def _record_of(where: str, key: ItemKey, item: AnnotationItem) -> CerRecord:
    try:
        record = key.record()
    except CompletionError as error:
        raise ConfigError(f"{where}: {error}") from error
    replies = None if record.second is None else (record.first.reply, record.second.reply)
    if replies != item.replies:
        raise ConfigError(f"{where}: the key belongs to other replies than item {item.id} has")
    return record


def _opener(folder: Path) -> Callable[[str], Image]:
    root = folder.resolve()

    def opened(name: str) -> Image:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ConfigError(f"{name}: is no picture below {folder}")
        try:
            return read_image(path)
        except ImageError as error:
            raise ConfigError(
                f"{path}: {error}; --pictures names the folder that pictures lie in"
            ) from error

    return opened


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8") from error


def _parsed(kind: type[Row], where: str, line: str) -> Row:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise ConfigError(f"{where}: {place + ': ' if place else ''}{detail['msg']}") from error
