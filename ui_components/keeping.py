"""What visitors have written, kept in memory and nowhere else.

It is found again only by the two things its visitor holds: the opaque id in the browser's storage and
the signed cookie that scripts cannot read. What is kept is bounded in number, size and time. Nothing
here is written to disk or to a log.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from compeer_core.images import Image

KEEP_SECONDS = 6 * 3600.0
MAX_SESSIONS = 2000
MAX_IMAGE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class SessionKey:
    """Whose conversation it is. ``visitor`` is empty where the browser refuses cookies."""

    visitor: str
    conversation: str
    generation: int = 0
    """Which of the visitor's deletions it comes after (`ui_components.deletions`); 0 before all."""

    def __repr__(self) -> str:
        """Tell nothing, so that no log line can give a conversation away."""
        return "SessionKey(...)"


class Keepable(Protocol):
    """A record that never changes; a newer one takes its place."""

    @property
    def is_empty(self) -> bool:
        """Nothing is in it that would have to be kept."""

    @property
    def length(self) -> int:
        """How many messages it holds; where it grows, there may be too much in all."""

    def pictures(self) -> Iterator[Image]:
        """Every picture that is held."""

    def picture(self, key: str, index: int) -> Image | None:
        """Return a picture of a message, None where there is none."""

    def aged(self, now: float) -> Self:
        """Return what is still good at this time of the keeper's clock."""


Value = TypeVar("Value", bound=Keepable)


@dataclass
class _Kept(Generic[Value]):
    value: Value
    used: float


class Keeper(Generic[Value]):
    """The records of everybody who is here, until they expire."""

    def __init__(
        self,
        empty: Value,
        *,
        keep_seconds: float = KEEP_SECONDS,
        max_sessions: int = MAX_SESSIONS,
        max_image_bytes: int = MAX_IMAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        is_current: Callable[[SessionKey], bool] = lambda _: True,
    ) -> None:
        self.is_current = is_current
        self.keep_seconds = keep_seconds
        self._empty = empty
        self._max_sessions = max_sessions
        self._max_image_bytes = max_image_bytes
        self._clock = clock
        self._kept: OrderedDict[SessionKey, _Kept[Value]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def now(self) -> float:
        """The keeper's clock, for whatever expires."""
        return self._clock()

    def get(self, key: SessionKey) -> Value:
        """Return the record, an empty one if there is none."""
        with self._lock:
            kept = self._fresh(key)
            return kept.value if kept else self._empty

    def update(self, key: SessionKey, change: Callable[[Value], Value]) -> Value:
        """Replace the record by ``change`` of it, which nobody else can interrupt.

        Nothing is kept, and an empty record returned, where the visitor had everything deleted since
        the key was made.
        """
        with self._lock:
            if not self.is_current(key):
                return self._empty
            kept = self._fresh(key)
            before = kept.value if kept else self._empty
            value = change(before)
            if value.is_empty:
                self._kept.pop(key, None)
                return value
            self._kept[key] = _Kept(value, self._clock())
            self._kept.move_to_end(key)
            if kept is None or value.length != before.length:
                self._shrink()
            return value

    def picture(self, visitor: str, message_key: str, index: int) -> Image | None:
        """Return a picture of a visitor's own, None for anything else."""
        with self._lock:
            for key, kept in self._kept.items():
                if key.visitor == visitor:
                    found = kept.value.picture(message_key, index)
                    if found is not None:
                        return found
        return None

    def keys_of(self, visitor: str) -> list[SessionKey]:
        """What is kept of a visitor, nothing for somebody without a cookie."""
        with self._lock:
            return [key for key in self._kept if visitor and key.visitor == visitor]

    def forget(self, visitor: str) -> None:
        """Delete all that is kept of a visitor."""
        with self._lock:
            for key in self.keys_of(visitor):
                del self._kept[key]

    def sweep(self) -> None:
        """Forget what has expired."""
        with self._lock:
            now = self._clock()
            for key, kept in list(self._kept.items()):
                kept.value = kept.value.aged(now)
                if now - kept.used > self.keep_seconds or kept.value.is_empty:
                    del self._kept[key]

    def _fresh(self, key: SessionKey) -> _Kept[Value] | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        if self._clock() - kept.used > self.keep_seconds:
            del self._kept[key]
            return None
        kept.used = self._clock()
        self._kept.move_to_end(key)
        return kept

    def _shrink(self) -> None:
        """Drop those who were away longest while there are too many, or too many pictures."""
        sizes = {
            key: sum(len(image.data) for image in kept.value.pictures())
            for key, kept in self._kept.items()
        }
        held = sum(sizes.values())
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_sessions or held > self._max_image_bytes
        ):
            oldest, _ = self._kept.popitem(last=False)
            held -= sizes[oldest]
