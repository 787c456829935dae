"""Ctrl-C and SIGTERM: the first requests a stop, the second acts, then handlers are restored."""

import signal
import threading

import pytest

from training.common.interrupts import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_recorded_and_second_reaches_the_old_handler(number):
    received: list[int] = []
    before = signal.signal(number, lambda number, frame: received.append(number))
    try:
        with StopRequest() as stop:
            assert not stop.requested
            signal.raise_signal(number)
            assert stop.requested
            assert received == []
            signal.raise_signal(number)
            assert received == [number]
    finally:
        signal.signal(number, before)


def test_handlers_are_restored_after_an_error():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_ignore_signals():
    states: list[bool] = []

    def work() -> None:
        with StopRequest() as stop:
            states.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert states == [False]
