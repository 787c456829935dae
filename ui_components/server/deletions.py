"""What a visitor had deleted stays deleted, whatever was on its way at that moment.

Requests, replies and comparisons that began before a deletion may end after it. Each holds the
`SessionKey` it began with, which says how often the visitor had everything deleted by then, and
nothing is kept under a key of before (`Deletions.is_current`). A request began when it arrived
(`Arrivals`), not when a handler takes it out of gradio's queue.
"""

import threading
from collections import OrderedDict

from starlette.types import ASGIApp, Receive, Scope, Send

from ui_components.shared.session_store import SessionKey

MOST_VISITORS = 100_000
"""Of whom a deletion is remembered; who is forgotten begins anew, as after a restart."""
TOO_LATE = -1
"""The generation of what arrived before a deletion and was looked at after it."""
_ARRIVED = "compeer_arrived"


class Deletions:
    """Who has had everything deleted since the server was started, and in which order."""

    def __init__(self) -> None:
        self._count = 0
        self._last: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many deletions there have been, of all visitors."""
        return self._count

    def add(self, visitor: str) -> None:
        """Let nothing be kept any more that a visitor began before now."""
        with self._lock:
            self._count += 1
            self._last[visitor] = self._count
            self._last.move_to_end(visitor)
            if len(self._last) > MOST_VISITORS:
                self._last.popitem(last=False)

    def generation(self, visitor: str, arrived: int | None = None) -> int:
        """Return which generation of a visitor's data a request belongs to, for its `SessionKey`.

        Args:
            visitor: Who asks.
            arrived: The count when the request arrived; None is now.
        """
        with self._lock:
            last = self._last.get(visitor, 0)
        return last if arrived is None or arrived >= last else TOO_LATE

    def is_current(self, key: SessionKey) -> bool:
        """Whether the visitor has had nothing deleted since the key was made."""
        with self._lock:
            return key.generation == self._last.get(key.visitor, 0)


class Arrivals:
    """Notes on every request how many deletions there had been when it arrived."""

    def __init__(self, app: ASGIApp, deletions: Deletions) -> None:
        self._app = app
        self._deletions = deletions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})[_ARRIVED] = self._deletions.count
        await self._app(scope, receive, send)


def arrived(request: object) -> int | None:
    """Return what `Arrivals` noted on a request, None where it did not see it."""
    count = getattr(getattr(request, "state", None), _ARRIVED, None)
    return count if isinstance(count, int) else None
