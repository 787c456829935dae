"""Progress of long loops: a progress bar on a terminal, periodic lines in a log."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

LINE_EVERY_SECONDS = 30.0
_log = logging.getLogger(__name__)


def track(
    items: Iterable[T], label: str, *, total: int | None = None, done: int = 0, unit: str = "rows"
) -> Iterator[T]:
    """Yield the items and report the count, the rate and the time left.

    Args:
        items: Items to iterate over.
        label: Short name of the task.
        total: Number of items, `done` included; None if unknown.
        done: Number of items that an earlier run finished.
        unit: Name of an item, in the plural.
    """
    if sys.stderr.isatty():
        yield from tqdm(items, label, total=total, initial=done, unit=f" {unit}", file=sys.stderr)
        return
    started = last = time.monotonic()
    count = 0
    for item in items:
        yield item
        count += 1
        now = time.monotonic()
        if now - last >= LINE_EVERY_SECONDS:
            last = now
            _log.info("%s: %s", label, _line(done, count, total, now - started, unit))
    _log.info("%s: %s", label, _line(done, count, total, time.monotonic() - started, unit))


def count_lines(path: Path) -> int | None:
    """Return the number of lines of a file, for `track`; None if the file does not exist."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(1 << 20), b"")
        return sum(chunk.count(b"\n") for chunk in chunks)


def _line(done: int, count: int, total: int | None, seconds: float, unit: str) -> str:
    rate = count / seconds if seconds > 0 else 0.0
    finished = done + count
    counts = f"{finished} {unit}" if total is None else f"{finished} of {total} {unit}"
    left = (
        f", {tqdm.format_interval(round((total - finished) / rate))} left"
        if total and rate and total > finished
        else ""
    )
    return f"{counts}, {rate:.1f} per second{left}"
