"""Visitors' conversations, in memory only.

A record can be reached only with the two things its visitor holds: the opaque id in the browser's
storage and the signed cookie that scripts cannot read. The store is bounded in number, size and
time. Nothing in it is written to disk or to a log.

Eviction hits those who use most. Each visitor has a share; beyond it they lose their own oldest
record. If the whole store is full, the network that holds most gives way, and within it the visitor
who holds most. Visitors without a cookie, and those beyond `visitors.NEW_VISITORS`, share one share
per network, so new cookies bring no more room.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from compeer_core.errors import InputError
from compeer_core.images import Image
from ui_components.server.visitors import Caller

KEEP_SECONDS = 6 * 3600.0
MEGABYTE = 2**20


@dataclass(frozen=True)
class Room:
    """A limit on records and on the bytes of their images."""

    sessions: int
    image_bytes: int


IN_ALL = Room(2000, 512 * MEGABYTE)
OF_VISITOR = Room(16, 64 * MEGABYTE)
"""Images are stored with at most 1024 pixels a side, so these are some hundred photos."""
OF_CROWD = Room(128, 128 * MEGABYTE)
"""For all callers of a network who share one share."""


@dataclass(frozen=True)
class SessionKey:
    """The key of a conversation. ``visitor`` is empty if the browser rejects cookies."""

    visitor: str
    conversation: str
    generation: int = 0
    """The visitor's deletions before it (`ui_components.server.deletions`)."""
    network: str = field(default="", compare=False, kw_only=True)
    """The visitor's current network; see `Visitors.network`."""

    @property
    def caller(self) -> Caller:
        """The caller of its requests. A browser without cookies looks like a program."""
        return Caller(self.network, self.visitor, is_program=not self.visitor)

    def __repr__(self) -> str:
        """Hide the fields, so that no log line can reveal a conversation."""
        return "SessionKey(...)"


class SessionRecord(Protocol):
    """An immutable record; updates replace it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing worth storing."""

    def pictures(self) -> Iterator[Image]:
        """Every image it holds."""

    def picture(self, key: str, index: int) -> Image | None:
        """Return an image of a message, None if there is none."""

    def aged(self, now: float) -> Self:
        """Return the record without what has expired on the store's clock."""


Value = TypeVar("Value", bound=SessionRecord)


@dataclass
class _Entry(Generic[Value]):
    value: Value
    used: float
    image_bytes: int
    holder: str
    network: str


class SessionStore(Generic[Value]):
    """All records, until they expire."""

    def __init__(
        self,
        empty: Value,
        *,
        keep_seconds: float = KEEP_SECONDS,
        in_all: Room = IN_ALL,
        of_visitor: Room = OF_VISITOR,
        of_crowd: Room = OF_CROWD,
        clock: Callable[[], float] = time.monotonic,
        is_current: Callable[[SessionKey], bool] = lambda _: True,
    ) -> None:
        self.is_current = is_current
        self.keep_seconds = keep_seconds
        self._empty = empty
        self._in_all = in_all
        self._of_visitor = of_visitor
        self._of_crowd = of_crowd
        self._clock = clock
        self._entries: OrderedDict[SessionKey, _Entry[Value]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def now(self) -> float:
        """The store's clock, for whatever expires."""
        return self._clock()

    def get(self, key: SessionKey) -> Value:
        """Return the record, or an empty one."""
        with self._lock:
            entry = self._fresh(key)
            return entry.value if entry else self._empty

    def update(self, key: SessionKey, change: Callable[[Value], Value]) -> Value:
        """Replace the record by ``change`` of it, atomically.

        If the visitor deleted their data since the key was made, nothing is stored and an empty
        record returned.

        Raises:
            InputError: It would hold more images than one visitor may store
                (``too_many_pictures``); nothing changed.
        """
        with self._lock:
            if not self.is_current(key):
                return self._empty
            entry = self._fresh(key)
            before = entry.value if entry else self._empty
            value = change(before)
            if value.is_empty:
                self._entries.pop(key, None)
                return value
            image_bytes = _image_bytes(value)
            has_grown = entry is None or image_bytes > entry.image_bytes
            if has_grown and image_bytes > self._of_visitor.image_bytes:
                limit = self._of_visitor.image_bytes // MEGABYTE
                raise InputError("too many", code="too_many_pictures", values={"limit": limit})
            holder = key.caller.holder
            self._entries[key] = _Entry(value, self._clock(), image_bytes, holder, key.network)
            self._entries.move_to_end(key)
            if has_grown:
                self._make_room(key)
            return value

    def picture(self, visitor: str, message_key: str, index: int) -> Image | None:
        """Return one of a visitor's own images, None for anything else."""
        with self._lock:
            for key, entry in self._entries.items():
                if key.visitor == visitor:
                    image = entry.value.picture(message_key, index)
                    if image is not None:
                        return image
        return None

    def holds(self, visitor: str) -> bool:
        """Whether a visitor has any record."""
        with self._lock:
            return bool(visitor) and any(key.visitor == visitor for key in reversed(self._entries))

    def records_of(self, visitor: str) -> dict[SessionKey, Value]:
        """A visitor's records, least recently used first; reading them does not count as use."""
        with self._lock:
            now = self._clock()
            return {
                key: self._entries[key].value.aged(now)
                for key in self.keys_of(visitor)
                if now - self._entries[key].used <= self.keep_seconds
            }

    def has_room(self, key: SessionKey) -> bool:
        """Whether a record can be stored without evicting another one of its visitor."""
        with self._lock:
            if key in self._entries or key.caller.is_of_the_crowd:
                return True
            return len(self.keys_of(key.visitor)) < self._of_visitor.sessions

    def keys_of(self, visitor: str) -> list[SessionKey]:
        """The keys of a visitor's records; none without a cookie."""
        with self._lock:
            return [key for key in self._entries if visitor and key.visitor == visitor]

    def forget(self, visitor: str) -> None:
        """Delete all records of a visitor."""
        with self._lock:
            for key in self.keys_of(visitor):
                del self._entries[key]

    def sweep(self) -> None:
        """Delete expired records."""
        with self._lock:
            now = self._clock()
            for key, entry in list(self._entries.items()):
                entry.value = entry.value.aged(now)
                entry.image_bytes = _image_bytes(entry.value)
                if now - entry.used > self.keep_seconds or entry.value.is_empty:
                    del self._entries[key]

    def _fresh(self, key: SessionKey) -> _Entry[Value] | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._clock() - entry.used > self.keep_seconds:
            del self._entries[key]
            return None
        entry.used = self._clock()
        self._entries.move_to_end(key)
        return entry

    def _make_room(self, newest: SessionKey) -> None:
        """Evict records, never the newest, until all limits hold."""
        caller = newest.caller
        share = self._of_crowd if caller.is_of_the_crowd else self._of_visitor
        holder = caller.holder
        own = {key: entry for key, entry in self._entries.items() if entry.holder == holder}
        self._shrink(own, share, newest)
        self._shrink(self._entries, self._in_all, newest)

    def _shrink(
        self, among: dict[SessionKey, _Entry[Value]], room: Room, newest: SessionKey
    ) -> None:
        """Evict some of these records, which are ordered by last use."""
        while len(among) > room.sessions:
            self._drop(among, newest, lambda entry: 1)
        while sum(entry.image_bytes for entry in among.values()) > room.image_bytes:
            self._drop(among, newest, lambda entry: entry.image_bytes)

    def _drop(
        self,
        among: dict[SessionKey, _Entry[Value]],
        newest: SessionKey,
        size: Callable[[_Entry[Value]], int],
    ) -> None:
        """Evict the least recently used record of the caller who holds most."""
        of_network: Counter[str] = Counter()
        of_holder: Counter[str] = Counter()
        for entry in among.values():
            of_network[entry.network] += size(entry)
            of_holder[entry.holder] += size(entry)
        # On ties `max` takes the first, which is the oldest. No record alone fills the store.
        dropped = max(
            (key for key, entry in among.items() if key != newest and size(entry)),
            key=lambda key: (of_network[among[key].network], of_holder[among[key].holder]),
        )
        among.pop(dropped)
        self._entries.pop(dropped, None)


def _image_bytes(value: SessionRecord) -> int:
    """Return the bytes of all images, each counted once."""
    return sum({id(image): len(image.data) for image in value.pictures()}.values())
