"""Progress of long work: a bar with rate and time left on a terminal, a line now and then in a log."""

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
    """Yield the items, and show how many there have been, how fast, and how long it will take.

    Args:
        items: What is worked on.
        label: Two or three words that say what is done.
        total: How many items there will be, `done` included; None if nobody knows.
        done: How many were finished by an earlier start.
        unit: What an item is called.
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
    """Return how many lines a file has, for the total of `track`; None if there is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(1 << 20), b"")
        return sum(chunk.count(b"\n") for chunk in chunks)


def _line(done: int, count: int, total: int | None, seconds: float, unit: str) -> str:
    rate = count / seconds if seconds > 0 else 0.0
    reached = done + count
    of = f"{reached} {unit}" if total is None else f"{reached} of {total} {unit}"
    left = f", {_time((total - reached) / rate)} left" if total and rate and total > reached else ""
    return f"{of}, {rate:.1f} per second{left}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
