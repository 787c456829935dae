"""Keeps deleted data deleted, whatever was running at that moment.

Requests, replies and comparisons that began before a deletion may end after it. Each holds the
`SessionKey` it began with, which counts the visitor's earlier deletions, and nothing is stored
under an outdated key (`Deletions.is_current`). A request begins when it arrives (`Arrivals`), not
when a handler takes it out of gradio's queue.
"""

import threading
from collections import OrderedDict

from starlette.types import ASGIApp, Receive, Scope, Send

from ui_components.shared.session_store import SessionKey

MOST_VISITORS = 100_000
"""How many visitors' deletions are remembered; a forgotten visitor starts afresh, as after a
restart."""
TOO_LATE = -1
"""The generation of requests that arrived before a deletion and were handled after it."""
_ARRIVED = "compeer_arrived"


class Deletions:
    """Deletions since the server started, in order."""

    def __init__(self) -> None:
        self._count = 0
        self._last: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many deletions there have been in total."""
        return self._count

    def add(self, visitor: str) -> None:
        """Invalidate everything that a visitor began before now."""
        with self._lock:
            self._count += 1
            self._last[visitor] = self._count
            self._last.move_to_end(visitor)
            if len(self._last) > MOST_VISITORS:
                self._last.popitem(last=False)

    def generation(self, visitor: str, arrived: int | None = None) -> int:
        """Return the generation of a visitor's data for a request's `SessionKey`.

        Args:
            visitor: The visitor's id.
            arrived: The count of deletions when the request arrived; None is now.
        """
        with self._lock:
            last = self._last.get(visitor, 0)
        return last if arrived is None or arrived >= last else TOO_LATE

    def is_current(self, key: SessionKey) -> bool:
        """Whether the visitor has deleted nothing since the key was made."""
        with self._lock:
            return key.generation == self._last.get(key.visitor, 0)


class Arrivals:
    """Records on every request how many deletions there had been when it arrived."""

    def __init__(self, app: ASGIApp, deletions: Deletions) -> None:
        self._app = app
        self._deletions = deletions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})[_ARRIVED] = self._deletions.count
        await self._app(scope, receive, send)


def arrived(request: object) -> int | None:
    """Return what `Arrivals` recorded on a request, None if it did not see it."""
    count = getattr(getattr(request, "state", None), _ARRIVED, None)
    return count if isinstance(count, int) else None
