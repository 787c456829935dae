"""Ctrl-C and SIGTERM: the first is a wish, the second an order, and neither is kept afterwards."""

import signal
import threading

import pytest

from training.common.interrupts import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_acts_as_before(number):
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with StopRequest() as stopping:
            assert not stopping.requested
            signal.raise_signal(number)
            assert stopping.requested
            assert heard == []
            signal.raise_signal(number)
            assert heard == [number]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back_also_after_an_error():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_can_work_without_hearing_signals():
    asked: list[bool] = []

    def work() -> None:
        with StopRequest() as stopping:
            asked.append(stopping.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert asked == [False]
