"""The line in front of a model: who waits, in which place, and who is served.

Gradio's own queue cannot hold a visitor's message while it waits, nor say the place in the
visitor's language, so handlers are let in at once and wait here.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

POLL_SECONDS = 0.25


class LineFullError(RuntimeError):
    """As many wait as may wait."""


class Ticket:
    """One place in a line; compared by identity."""


class Line:
    """First come, first served; ``slots`` at a time."""

    def __init__(self, slots: int = 1, longest: int = 32) -> None:
        self._slots = slots
        self._longest = longest
        self._tickets: deque[Ticket] = deque()
        self._moved = threading.Condition()

    def __len__(self) -> int:
        """How many wait; those being served do not."""
        with self._moved:
            return max(0, len(self._tickets) - self._slots)

    @contextmanager
    def place(self) -> Iterator[Ticket]:
        """Hold a place until the block ends.

        Raises:
            LineFullError: The line is as long as it may be.
        """
        ticket = Ticket()
        with self._moved:
            if len(self._tickets) >= self._slots + self._longest:
                raise LineFullError
            self._tickets.append(ticket)
        try:
            yield ticket
        finally:
            with self._moved:
                self._tickets.remove(ticket)
                self._moved.notify_all()

    def ahead(self, ticket: Ticket) -> int:
        """How many have to leave before the ticket is served; 0 means that it is its turn."""
        with self._moved:
            return max(0, self._tickets.index(ticket) - self._slots + 1)

    def wait(self, ticket: Ticket, seconds: float = POLL_SECONDS) -> bool:
        """Wait for the ticket's turn, at most that long. Return whether it has come."""
        with self._moved:
            return self._moved.wait_for(
                lambda: self._tickets.index(ticket) < self._slots, timeout=seconds
            )
