"""Annotators and the desk's owner: identified by a cookie that scripts cannot read, issued for a token.

The cookie holds a pass (`Desk.new_pass`), which ends on sign-out or after `PASS_SECONDS`. Wrong
tokens are answered slowly and, after a few, with a waiting time (`Guesses`); the right token always
works, since anyone can guess wrongly in somebody else's network.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from compeer_core.annotation.desk import Annotator, Desk

ANNOTATOR_COOKIE = "compeer_annotator"


def read_annotator(desk: Desk, cookies: Mapping[str, str]) -> Annotator | None:
    """Return the annotator; None without a valid, current cookie.

    Raises:
        StoreError: The database failed.
    """
    given = cookies.get(ANNOTATOR_COOKIE)
    return desk.let_in(given) if given else None


def is_owner(desk: Desk, cookies: Mapping[str, str]) -> bool:
    """Whether the owner of the desk is signed in.

    Raises:
        StoreError: The database failed.
    """
    given = cookies.get(ANNOTATOR_COOKIE)
    return bool(given) and desk.lets_owner_in(given or "")


class Guesses:
    """Counts wrong tokens in the last minutes.

    In memory only; old entries are dropped.
    """

    WINDOW_SECONDS = 600.0
    MOST_KEYS = 10_000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def count(self, limits: Mapping[str, int]) -> float:
        """Count a wrong token; return 0, or the seconds to wait.

        Args:
            limits: The allowed number by identity of the sender, for all of its identities.
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
