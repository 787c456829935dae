"""The line in front of a model: who waits, in which place, and who is served.

Gradio's own queue cannot hold a visitor's message while it waits, nor say the place in the
visitor's language, so handlers are let in at once and wait here.

People and programs have places of their own, so neither fills the line for the other. Among equals the
order is that of start-time fair queueing (Goyal, Vin and Cheng 1996): whoever asks again stands
behind those who ask for the first time, and a network has `SHARE` turns in a round however many
visitors it claims to be. So many messages of one sender cost that sender's time, not everybody's.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ui_components.server.visitors import Caller

POLL_SECONDS = 0.25
LONGEST = 64
"""People who wait: with turns of three seconds, the last one waits for three minutes."""
LONGEST_OF_PROGRAMS = 32
OF_VISITOR = 4
"""Places of one visitor: a few tabs."""
OF_NETWORK = 32
"""Places of the people of one network: a class that writes at the same time."""
OF_NETWORKS_PROGRAMS = 8
SHARE = 4
"""Turns of one network in a round. One would make a class wait as long as all others together."""
ROUND = 8
"""Turns after which a round is over at the latest: a second message comes even while ever new
visitors ask for the first time."""
PEOPLE_IN_A_ROW = 3
"""So many people are served before a program that waits beside them."""


class QueueFullError(RuntimeError):
    """As many wait as may wait."""


class PlacesTakenError(QueueFullError):
    """The caller alone has as many places as one may have."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """One place in a line; compared by identity."""

    caller: Caller
    begins: float
    """The round in which it is to be served."""


class AdmissionQueue:
    """Serves ``slots`` at a time."""

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
        """How many wait; those being served do not."""
        with self._moved:
            return len(self._waiting)

    @contextmanager
    def place(self, caller: Caller) -> Iterator[Ticket]:
        """Hold a place until the block ends.

        Raises:
            QueueFullError: The line is as long as it may be, for all or for the caller's network.
            PlacesTakenError: The caller has as many places as one may have.
        """
        with self._moved:
            self._check_room(caller)
            ticket = Ticket(caller, self._rounds[caller.is_program].enter(caller))
            self._waiting.append(ticket)
            self._serve()
        try:
            yield ticket
        finally:
            with self._moved:
                (self._served if ticket in self._served else self._waiting).remove(ticket)
                self._serve()
                if not self._served:
                    self._rounds = {False: _Rounds(), True: _Rounds()}  # nobody was kept waiting

    @contextmanager
    def admitted(
        self,
        caller: Caller,
        stop: threading.Event,
        on_wait: Callable[[int], None] = lambda _: None,
    ) -> Iterator[bool]:
        """Wait for a turn and hold the slot until the block ends.

        Args:
            caller: Who waits.
            stop: Ends the wait.
            on_wait: Called every `POLL_SECONDS` with the number of those who are served first.

        Yields:
            Whether the turn came; False if ``stop`` was set first.

        Raises:
            QueueFullError: As for `place`.
        """
        with self.place(caller) as ticket:
            while not self.wait(ticket):
                if stop.is_set():
                    yield False
                    return
                on_wait(self.ahead(ticket))
            yield True

    def ahead(self, ticket: Ticket) -> int:
        """How many are served first, as things stand; 0 means that it is its turn."""
        with self._moved:
            return 0 if ticket in self._served else self._in_order().index(ticket) + 1

    def wait(self, ticket: Ticket, seconds: float = POLL_SECONDS) -> bool:
        """Wait for the ticket's turn, at most that long. Return whether it has come."""
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
        """Give free slots to those whose turn it is."""
        while self._waiting and len(self._served) < self._slots:
            ticket = self._in_order()[0]
            self._waiting.remove(ticket)
            self._served.append(ticket)
            self._rounds[ticket.caller.is_program].go_on(ticket.begins)
            programs_wait = any(other.caller.is_program for other in self._waiting)
            is_person = not ticket.caller.is_program
            self._people_in_a_row = self._people_in_a_row + 1 if is_person and programs_wait else 0
            self._moved.notify_all()

    def _in_order(self) -> list[Ticket]:
        """Return who waits, as they will be served if nobody comes or goes."""
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
    """Says in which round a ticket is served. A round is one turn of each who asks."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}
        """When a sender or a network, who had turns, may have the next one."""

    def enter(self, caller: Caller) -> float:
        sender, network = f"sender {_sender(caller)}", f"network {caller.network}"
        of_network = max(self._now, self._next.get(network, 0.0))
        begins = max(of_network, self._next.get(sender, 0.0))
        self._next[sender] = begins + 1
        self._next[network] = of_network + 1 / SHARE
        return begins

    def go_on(self, begins: float) -> None:
        """A ticket of that round is served now."""
        self._now = max(self._now, begins) + 1 / ROUND
        self._next = {name: at for name, at in self._next.items() if at > self._now}


def _sender(caller: Caller) -> str:
    """Who takes turns with others: a visitor, or all programs of a network."""
    return caller.network if caller.is_program else caller.visitor
