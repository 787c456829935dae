"""The queue in front of a model.

Gradio's own queue can neither hold a visitor's message while it waits nor show its place in the
visitor's language, so gradio admits handlers at once and they wait here.

People and programs have separate places, so neither can fill the queue for the other. The order is
start-time fair queueing (Goyal, Vin and Cheng 1996): a repeated request waits behind first
requests, and a network has `SHARE` turns per round however many visitors it claims to be. So a
flood of messages delays its own sender, not everybody.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ui_components.server.visitors import Caller

POLL_SECONDS = 0.25
LONGEST = 64
"""Waiting people: with turns of three seconds, the last one waits three minutes."""
LONGEST_OF_PROGRAMS = 32
OF_VISITOR = 4
"""Places per visitor: a few tabs."""
OF_NETWORK = 32
"""Places for the people of one network: a class that writes at the same time."""
OF_NETWORKS_PROGRAMS = 8
SHARE = 4
"""Turns of one network per round. With one, a class would wait as long as all others together."""
ROUND = 8
"""The most turns in a round: a second message is served even if new visitors keep arriving."""
PEOPLE_IN_A_ROW = 3
"""The most people served in a row while a program waits."""


class QueueFullError(RuntimeError):
    """The queue is full."""


class PlacesTakenError(QueueFullError):
    """The caller has the maximum number of places."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A place in the queue; compared by identity."""

    caller: Caller
    begins: float
    """The round in which it is served."""
    size: int = 1
    """Slots that it needs."""


class AdmissionQueue:
    """Serves as many tickets at a time as ``slots`` allow. A ticket of more slots than there are has all of them."""

    def __init__(
        self, slots: int = 1, longest: int = LONGEST, longest_of_programs: int = LONGEST_OF_PROGRAMS
    ) -> None:
        self._slots = slots
        self._longest = {False: longest, True: longest_of_programs}
        self._rounds = {False: _Rounds(), True: _Rounds()}
        self._served: list[Ticket] = []
        self._waiting: list[Ticket] = []
        self._people_in_a_row = 0
        self._moved = threading.Condition()

    def __len__(self) -> int:
        """How many wait, not counting those being served."""
        with self._moved:
            return len(self._waiting)

    @contextmanager
    def place(self, caller: Caller, size: int = 1) -> Iterator[Ticket]:
        """Hold a place for ``size`` slots until the block ends.

        Raises:
            QueueFullError: The queue is full, for all or for the caller's network.
            PlacesTakenError: The caller has the maximum number of places.
        """
        with self._moved:
            self._check_room(caller)
            begins = self._rounds[caller.is_program].enter(caller)
            ticket = Ticket(caller, begins, min(size, self._slots))
            self._waiting.append(ticket)
            self._serve()
        try:
            yield ticket
        finally:
            with self._moved:
                (self._served if ticket in self._served else self._waiting).remove(ticket)
                self._serve()
                if not self._served:
                    self._rounds = {False: _Rounds(), True: _Rounds()}  # idle: start afresh

    @contextmanager
    def admitted(
        self,
        caller: Caller,
        stop: threading.Event,
        on_wait: Callable[[int], None] = lambda _: None,
        size: int = 1,
    ) -> Iterator[bool]:
        """Wait for a turn and hold its slots until the block ends.

        Args:
            caller: Who waits.
            stop: Ends the wait.
            on_wait: Called every `POLL_SECONDS` with the number of tickets ahead.
            size: Slots that are needed: one per reply.

        Yields:
            Whether the turn came; False if ``stop`` was set first.

        Raises:
            QueueFullError: As for `place`.
        """
        with self.place(caller, size) as ticket:
            while not self.wait(ticket):
                if stop.is_set():
                    yield False
                    return
                on_wait(self.ahead(ticket))
            yield True

    def ahead(self, ticket: Ticket) -> int:
        """How many tickets are ahead; 0 if it is being served."""
        with self._moved:
            return 0 if ticket in self._served else self._in_order().index(ticket) + 1

    def wait(self, ticket: Ticket, seconds: float = POLL_SECONDS) -> bool:
        """Wait at most that long for the ticket's turn. Return whether it has come."""
        with self._moved:
            return self._moved.wait_for(lambda: ticket in self._served, timeout=seconds)

    # --- with the lock held ----------------------------------------------------------------------

    def _check_room(self, caller: Caller) -> None:
        alike = [
            ticket.caller
            for ticket in (*self._served, *self._waiting)
            if ticket.caller.is_program == caller.is_program
        ]
        of_network = sum(other.network == caller.network for other in alike)
        of_sender = sum(_sender(other) == _sender(caller) for other in alike)
        if of_sender >= (OF_NETWORKS_PROGRAMS if caller.is_program else OF_VISITOR):
            raise PlacesTakenError
        waiting = sum(ticket.caller.is_program == caller.is_program for ticket in self._waiting)
        if of_network >= OF_NETWORK or waiting >= self._longest[caller.is_program]:
            raise QueueFullError

    def _serve(self) -> None:
        """Give free slots to the next tickets. A large one waits for its slots, and all behind it with it."""
        while self._waiting:
            ticket = self._in_order()[0]
            if sum(served.size for served in self._served) + ticket.size > self._slots:
                return
            self._waiting.remove(ticket)
            self._served.append(ticket)
            self._rounds[ticket.caller.is_program].go_on(ticket.begins)
            programs_wait = any(other.caller.is_program for other in self._waiting)
            is_person = not ticket.caller.is_program
            self._people_in_a_row = self._people_in_a_row + 1 if is_person and programs_wait else 0
            self._moved.notify_all()

    def _in_order(self) -> list[Ticket]:
        """Return the waiting tickets in the order of service, if nobody joins or leaves."""
        by_round = sorted(
            self._waiting, key=lambda ticket: ticket.begins
        )  # first come, first served
        people = [ticket for ticket in by_round if not ticket.caller.is_program]
        programs = [ticket for ticket in by_round if ticket.caller.is_program]
        order: list[Ticket] = []
        in_a_row = self._people_in_a_row
        while people and programs:
            if in_a_row < PEOPLE_IN_A_ROW:
                order.append(people.pop(0))
                in_a_row += 1
            else:
                order.append(programs.pop(0))
                in_a_row = 0
        return order + people + programs


class _Rounds:
    """Assigns rounds to tickets. In a round each sender has one turn."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}
        """The earliest next round of a recent sender or network."""

    def enter(self, caller: Caller) -> float:
        sender, network = f"sender {_sender(caller)}", f"network {caller.network}"
        of_network = max(self._now, self._next.get(network, 0.0))
        begins = max(of_network, self._next.get(sender, 0.0))
        self._next[sender] = begins + 1
        self._next[network] = of_network + 1 / SHARE
        return begins

    def go_on(self, begins: float) -> None:
        """Advance the clock: a ticket of that round is served now."""
        self._now = max(self._now, begins) + 1 / ROUND
        self._next = {name: at for name, at in self._next.items() if at > self._now}


def _sender(caller: Caller) -> str:
    """The unit of fairness: a visitor, or all programs of a network."""
    return caller.network if caller.is_program else caller.visitor
