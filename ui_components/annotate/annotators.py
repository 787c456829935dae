"""Who annotates: known by a cookie that scripts cannot read, got for a token.

The cookie holds a pass (`Desk.new_pass`), which ends when its browser leaves or after `PASS_SECONDS`.
Whoever guesses tokens is slowed down and, after a few, told to wait (`Guesses`); the right token lets
its owner in all the same, since anybody can guess wrongly in somebody else's network.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from compeer_core.annotation.desk import Annotator, Desk

ANNOTATOR_COOKIE = "compeer_annotator"


def read_annotator(desk: Desk, cookies: Mapping[str, str]) -> Annotator | None:
    """Return who it is; None where the cookie is none, made up, old, or of a revoked token.

    Raises:
        StoreError: The database failed.
    """
    given = cookies.get(ANNOTATOR_COOKIE)
    return desk.let_in(given) if given else None


class Guesses:
    """How often somebody gave a wrong token: a few times in a few minutes, then too often.

    Nothing is written down, and what is old is forgotten.
    """

    WINDOW_SECONDS = 600.0
    MOST_KEYS = 10_000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def count(self, limits: Mapping[str, int]) -> float:
        """Count a wrong token, and return 0, or for how many seconds it has been one too many.

        Args:
            limits: Who gave it, in every way in which they are known, and how often each may.
        """
        now = self._clock()
        with self._lock:
            self._forget_old(now)
            waits = [
                wrong[-limit] + self.WINDOW_SECONDS - now
                for who, limit in limits.items()
                if len(wrong := self._wrong.get(who, deque())) >= limit
            ]
            if waits:
                return max(waits)
            for who in limits:
                self._wrong.setdefault(who, deque()).append(now)
        return 0.0

    def _forget_old(self, now: float) -> None:
        for who in list(self._wrong):
            wrong = self._wrong[who]
            while wrong and wrong[0] <= now - self.WINDOW_SECONDS:
                wrong.popleft()
            if not wrong:
                del self._wrong[who]
        while len(self._wrong) > self.MOST_KEYS:
            del self._wrong[next(iter(self._wrong))]
