"""Import items for annotation from files: `python -m compeer_core.votes items FILE`.

Two kinds of files are accepted. **Rows of CER** (`compeer_core.cer`), for example exported votes: each row
with a complete turn becomes an item, without its labels. **Items**
(`compeer_core.annotation.annotations.AnnotationItem`), as the pipeline writes them: with the key file of the
pipeline their answers become rows of CER here; without it they are exported for the pipeline.

With the answers of a language model that has read the items, those become the batch in which people check it
(`compeer_core.annotation.readings`).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from compeer_core.annotation.annotations import AnnotationItem, ItemKey
from compeer_core.annotation.desk import Desk
from compeer_core.annotation.readings import Reading, check_readings, draw, read_readings
from compeer_core.cer import CerRecord
from compeer_core.errors import CompletionError, ConfigError, ImageError
from compeer_core.images import Image, read_image
from compeer_core.reasoning import read
from compeer_core.row_files import json_lines, parse_json, parse_row, read_rows

NO_TURN = "no complete reasoning to judge"
KNOWN = "already there"
NOT_READ = "the reader has not answered"
NOT_DRAWN = "not in the random share"
SAMPLES = "samples"
"""The batch of the items that ship, for practice."""
CHECK = "check the reader"
"""The default batch of items with a reader's answers."""

DeskItem = tuple[AnnotationItem, CerRecord | None]


@dataclass
class ItemFile:
    """A file of items, and a count of the rows that are left out.

    Attributes:
        path: A .jsonl file of either kind.
        key: The key file of the items, if there is one.
        left_out: Number of rows without an item, by reason.
    """

    path: Path
    key: Path | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[DeskItem]:
        """Yield the items.

        Raises:
            ConfigError: A file cannot be read, or a row is invalid: the sentence names it.
        """
        if self._has_cases():
            if self.key is not None:
                raise ConfigError(f"{self.path}: rows of CER need no key")
            yield from self._from_records()
        else:
            yield from self._from_items()

    def _has_cases(self) -> bool:
        for where, line in json_lines(self.path):
            row = parse_json(where, line)
            return isinstance(row, dict) and "case" in row
        raise ConfigError(f"{self.path}: is empty")

    def _from_records(self) -> Iterator[DeskItem]:
        for record in read_rows(self.path, CerRecord):
            item = _item_of(record)
            if item is None:
                self.left_out[NO_TURN] += 1
            else:
                yield item

    def _from_items(self) -> Iterator[DeskItem]:
        keys = {}
        if self.key is not None:
            for where, line in json_lines(self.key):
                key = parse_row(ItemKey, where, line)
                keys[key.item_id] = (where, key)
        for where, line in json_lines(self.path):
            item = parse_row(AnnotationItem, where, line)
            record = None
            if keys:
                if item.id not in keys:
                    raise ConfigError(f"{where}: the key has no item {item.id}")
                record = _record_of(*keys[item.id], item)
            yield item, record


@dataclass(frozen=True)
class Added:
    """The result of adding a file of items."""

    items: int
    left_out: dict[str, int]


def add_items(
    desk: Desk,
    path: Path,
    *,
    key: Path | None = None,
    pictures: Path | None = None,
    batch: str = "",
    read_by: Path | None = None,
    share: float = 1.0,
    seed: int = 0,
) -> Added:
    """Add the items of a file at the end of the desk's queue, all or none.

    Args:
        desk: The desk. Items that it already has are skipped.
        path: See `ItemFile`.
        key: See `ItemFile`.
        pictures: The folder with the pictures of the histories; None shows none.
        batch: The name of their batch; by default `CHECK` with `read_by`, else none.
        read_by: A file of readers' answers (`read_readings`); items without one are left out.
        share: A random share of the items, in (0, 1]; the rest is left out.
        seed: Of the share.

    Raises:
        ConfigError: A file or a picture cannot be read, or a value is invalid: the sentence names it.
        StoreError: The database failed.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share of the items must be above 0 and at most 1, got {share}")
    file = ItemFile(path, key)
    items = list(file)
    readings: dict[str, list[Reading]] = {}
    if read_by is not None:
        readings = read_readings(read_by)
        check_readings(readings, (item for item, _ in items), path)
        file.left_out[NOT_READ] += sum(item.id not in readings for item, _ in items)
        items = [each for each in items if each[0].id in readings]
    drawn = draw(items, [item.id for item, _ in items], share, seed) if items else []
    file.left_out[NOT_DRAWN] += len(items) - len(drawn)
    count = desk.add_items(
        drawn,
        None if pictures is None else _opener(pictures),
        batch=batch or (CHECK if read_by is not None else ""),
        readings={
            item: [each.annotation for each in of_item] for item, of_item in readings.items()
        },
    )
    file.left_out[KNOWN] += len(drawn) - count
    return Added(count, {why: number for why, number in sorted(file.left_out.items()) if number})


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
    # The id of the row may reveal the authors.
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
        raise ConfigError(f"{where}: the key and item {item.id} have different replies")
    return record


def _opener(folder: Path) -> Callable[[str], Image]:
    root = folder.resolve()

    def opened(name: str) -> Image:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ConfigError(f"{name}: is not a picture below {folder}")
        try:
            return read_image(path)
        except ImageError as error:
            raise ConfigError(
                f"{path}: {error}; --pictures names the folder of the pictures"
            ) from error

    return opened
