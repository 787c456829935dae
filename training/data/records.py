"""Rows on disk as JSON lines: what one stage writes and the next one reads."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError

Record = TypeVar("Record", bound=FrozenModel)
T = TypeVar("T")


def write_records(path: Path, records: Iterable[FrozenModel]) -> int:
    """Write records as JSON lines under a temporary name, then rename; return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    count = 0
    with fresh.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(record.model_dump_json() + "\n")
            count += 1
    fresh.replace(path)
    return count


def read_records(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Yield the records of a file, all of one kind.

    Raises:
        ConfigError: The file is missing, is not UTF-8, or a line is not such a record.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (an earlier stage writes it)")
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                yield _parsed(line, kind, f"{path}, line {number}")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: not UTF-8 text; it must hold {kind.__name__} rows"
            ) from error


def _parsed(line: str, kind: type[Record], where: str) -> Record:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigError(f"{where}: not a {kind.__name__}: {problem}") from error


def drawn(records: Sequence[T], count: int | None, seed: int) -> list[T]:
    """Draw `count` records without replacement and return them in their order; None returns all."""
    if count is None:
        return list(records)
    order = np.random.default_rng(seed).permutation(len(records))[:count]
    return [records[index] for index in sorted(order.tolist())]
