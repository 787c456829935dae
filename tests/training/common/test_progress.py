"""Progress: a bar on a terminal, periodic lines in a log, items passed through unchanged."""

import io
import logging

import pytest

from training.common import progress
from training.common.progress import count_lines, track


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def slowly(count: int, clock: Clock, seconds: float):
    for number in range(count):
        clock.now += seconds
        yield number


def test_items_pass_through_lazily_and_in_order():
    produced = []

    def items():
        for number in range(3):
            produced.append(number)
            yield number

    tracked = track(items(), "counting")

    assert next(tracked) == 0
    assert produced == [0]
    assert list(tracked) == [1, 2]


def test_log_gets_periodic_lines_with_rate_and_time_left(clock, caplog):
    caplog.set_level(logging.INFO)

    # an item takes 10 s, so each third one ends a period of 30 s: 0.1 per second
    list(track(slowly(7, clock, 10.0), "turns", total=400, done=3))

    assert [record.message for record in caplog.records] == [
        "turns: 6 of 400 rows, 0.1 per second, 1:05:40 left",
        "turns: 9 of 400 rows, 0.1 per second, 1:05:10 left",
        "turns: 10 of 400 rows, 0.1 per second, 1:05:00 left",
    ]


def test_no_time_left_without_a_total(clock, caplog):
    caplog.set_level(logging.INFO)

    list(track(slowly(4, clock, 0.5), "dialogues", unit="dialogues"))

    assert [record.message for record in caplog.records] == [
        "dialogues: 4 dialogues, 2.0 per second"
    ]


def test_empty_iterable_is_reported(clock, caplog):
    caplog.set_level(logging.INFO)

    assert list(track([], "turns", total=0)) == []

    assert [record.message for record in caplog.records] == ["turns: 0 of 0 rows, 0.0 per second"]


def test_terminal_gets_a_progress_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)

    assert list(track(range(5), "turns", total=8, done=3, unit="turns")) == [0, 1, 2, 3, 4]

    shown = terminal.getvalue()
    assert "turns: 100%" in shown
    assert "8/8" in shown
    assert "turns/s" in shown


def test_count_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert count_lines(path) is None

    path.write_bytes(b"")
    assert count_lines(path) == 0
    path.write_bytes("{}\n{\u2028}\n".encode() * 100_000)
    assert count_lines(path) == 200_000
