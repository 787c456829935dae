"""Who annotates: known by a signed cookie that scripts cannot read, got for a token.

The cookie holds what stands for the token, and is good for `PASS_SECONDS`. Whoever guesses tokens is
slowed down and, after a few, not answered for a while (`Guesses`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from itsdangerous import BadSignature, TimestampSigner

from compeer_core.votes.desk import Annotator, Desk

ANNOTATOR_COOKIE = "compeer_annotator"
PASS_SECONDS = 7 * 24 * 3600
WRONG_DELAY_SECONDS = 1.0
"""How long the answer to a wrong token takes."""


@dataclass(frozen=True)
class Annotators:
    """Makes and reads the cookie."""

    desk: Desk
    secret: bytes = field(repr=False)

    def new_cookie(self, annotator: Annotator) -> str:
        """Return the cookie of somebody who came in with a token."""
        return self._signer.sign(self.desk.pass_of(annotator)).decode("ascii")

    def read(self, cookies: Mapping[str, str]) -> Annotator | None:
        """Return who it is; None where the cookie is none, forged, old, or of a revoked token."""
        given = cookies.get(ANNOTATOR_COOKIE)
        if not given:
            return None
        try:
            return self.desk.let_in(self._signer.unsign(given, max_age=PASS_SECONDS).decode())
        except (BadSignature, UnicodeError):
            return None

    @property
    def _signer(self) -> TimestampSigner:
        return TimestampSigner(self.secret, salt="annotator")


class Guesses:
    """How often somebody may try a token: a few times in a few minutes, then not for a while.

    Nothing is written down, and what is old is forgotten.
    """

    WINDOW_SECONDS = 600.0
    MOST_KEYS = 10_000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def begin(self, limits: Mapping[str, int]) -> float:
        """Count a try, and return 0, or in how many seconds the next one is let through.

        Args:
            limits: Who tries, in every way in which they are known, and how often each may.
        """
        now = self._clock()
        with self._lock:
            self._forget_old(now)
            waits = [
                tries[-limit] + self.WINDOW_SECONDS - now
                for who, limit in limits.items()
                if len(tries := self._tries.get(who, deque())) >= limit
            ]
            if waits:
                return max(waits)
            for who in limits:
                self._tries.setdefault(who, deque()).append(now)
        return 0.0

    def succeeded(self, limits: Mapping[str, int]) -> None:
        """Take the try back: the token was right."""
        with self._lock:
            for who in limits:
                if self._tries.get(who):
                    self._tries[who].pop()

    def _forget_old(self, now: float) -> None:
        for who in list(self._tries):
            tries = self._tries[who]
            while tries and tries[0] <= now - self.WINDOW_SECONDS:
                tries.popleft()
            if not tries:
                del self._tries[who]
        while len(self._tries) > self.MOST_KEYS:
            del self._tries[next(iter(self._tries))]
