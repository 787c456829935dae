"""Rows on disk as JSON lines: what one stage writes and the next one reads."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.row_files import read_rows

Record = TypeVar("Record", bound=FrozenModel)
T = TypeVar("T")


def read_records(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Yield the rows that an earlier stage wrote, all of one kind.

    Raises:
        ConfigError: The file is missing, is not UTF-8, or a line is not such a row.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (an earlier stage writes it)")
    yield from read_rows(path, kind)


def drawn(records: Sequence[T], count: int | None, seed: int) -> list[T]:
    """Draw `count` records without replacement and return them in their order; None returns all."""
    if count is None:
        return list(records)
    order = np.random.default_rng(seed).permutation(len(records))[:count]
    return [records[index] for index in sorted(order.tolist())]
