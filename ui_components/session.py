"""What visitors have said, kept in memory and nowhere else.

A conversation is found again only by the two things its visitor holds: the opaque id in the
browser's storage and the signed cookie that scripts cannot read. The store is bounded in number,
size and time. Nothing here is written to disk or to a log.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.images import Image
from ui_components.progress import Progress

MAX_TURNS = 100
KEEP_SECONDS = 6 * 3600.0
UNDO_SECONDS = 600.0
MAX_SESSIONS = 2000
MAX_IMAGE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class SessionKey:
    """Whose conversation it is. ``visitor`` is empty where the browser refuses cookies."""

    visitor: str
    conversation: str

    def __repr__(self) -> str:
        """Tell nothing, so that no log line can give a conversation away."""
        return "SessionKey(...)"


@dataclass(frozen=True)
class Turn:
    """One message of the seeker's and what came of it."""

    said: Utterance = field(repr=False)
    progress: Progress | None = field(default=None, repr=False)
    """None until a reply is begun."""
    at_risk: bool = False
    """The message has a phrase that asks for a person, not for a program."""
    language: str = "und"
    key: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    """Names the turn in addresses of its pictures; nobody can guess it."""


@dataclass(frozen=True)
class Undo:
    """What one press of Undo brings back."""

    kind: Literal["cleared", "edited", "retried"]
    turns: tuple[Turn, ...] = field(repr=False)
    number: int
    """The message that was changed, from 1."""
    until: float
    """On the store's clock."""


@dataclass(frozen=True)
class Session:
    """One conversation. It never changes; the store holds the newest."""

    turns: tuple[Turn, ...] = field(default=(), repr=False)
    selected: int | None = None
    """The turn in the inspector; None follows the newest."""
    editing: int | None = None
    """The message that is being changed."""
    draft: str = field(default="", repr=False)
    """What stood in the message box before a message was put there to be changed."""
    undo: Undo | None = None

    @property
    def shown(self) -> int | None:
        """The turn that the inspector shows, None if there is none."""
        if not self.turns:
            return None
        last = len(self.turns) - 1
        return last if self.selected is None else min(self.selected, last)

    def dialogue(self) -> Dialogue:
        """What was said up to and with the last message, as the policy reads it.

        A turn without a reply leaves the seeker's words alone in it.
        """
        utterances: list[Utterance] = []
        for turn in self.turns[:-1]:
            utterances.append(turn.said)
            reply = turn.progress.reply.strip() if turn.progress else ""
            if reply:
                utterances.append(Utterance(Speaker.SUPPORTER, reply))
        utterances += [turn.said for turn in self.turns[-1:]]
        return Dialogue(tuple(utterances))

    def with_turn(self, turn: Turn) -> "Session":
        """Return the session with the turn of the same key replaced, also in what Undo holds."""
        undo = self.undo and replace(self.undo, turns=_replaced(self.undo.turns, turn))
        return replace(self, turns=_replaced(self.turns, turn), undo=undo)

    def pictures(self) -> Iterator[Image]:
        """Every picture that is held."""
        for turn in (*self.turns, *(self.undo.turns if self.undo else ())):
            yield from turn.said.images


def _replaced(turns: tuple[Turn, ...], newer: Turn) -> tuple[Turn, ...]:
    return tuple(newer if turn.key == newer.key else turn for turn in turns)


@dataclass
class _Kept:
    session: Session
    used: float


class SessionStore:
    """The conversations of everybody who is here, until they expire."""

    def __init__(
        self,
        *,
        keep_seconds: float = KEEP_SECONDS,
        max_sessions: int = MAX_SESSIONS,
        max_image_bytes: int = MAX_IMAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keep_seconds = keep_seconds
        self._max_sessions = max_sessions
        self._max_image_bytes = max_image_bytes
        self._clock = clock
        self._kept: OrderedDict[SessionKey, _Kept] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def now(self) -> float:
        """The store's clock, for `Undo.until`."""
        return self._clock()

    def get(self, key: SessionKey) -> Session:
        """Return the conversation, an empty one if there is none."""
        with self._lock:
            kept = self._fresh(key)
            return kept.session if kept else Session()

    def update(self, key: SessionKey, change: Callable[[Session], Session]) -> Session:
        """Replace the conversation by ``change`` of it, which nobody else can interrupt."""
        with self._lock:
            kept = self._fresh(key)
            session = change(kept.session if kept else Session())
            if session == Session():
                self._kept.pop(key, None)
                return session
            self._kept[key] = _Kept(session, self._clock())
            self._kept.move_to_end(key)
            if kept is None or len(session.turns) != len(kept.session.turns):
                self._shrink()
            return session

    def picture(self, visitor: str, turn_key: str, index: int) -> Image | None:
        """Return a picture of a visitor's own, None for anything else."""
        with self._lock:
            for key, kept in self._kept.items():
                if key.visitor != visitor:
                    continue
                undo = kept.session.undo
                for turn in (*kept.session.turns, *(undo.turns if undo else ())):
                    if turn.key == turn_key and 0 <= index < len(turn.said.images):
                        return turn.said.images[index]
        return None

    def keys_of(self, visitor: str) -> list[SessionKey]:
        """The conversations of a visitor, none for somebody without a cookie."""
        with self._lock:
            return [key for key in self._kept if visitor and key.visitor == visitor]

    def forget(self, visitor: str) -> None:
        """Delete every conversation of a visitor."""
        with self._lock:
            for key in self.keys_of(visitor):
                del self._kept[key]

    def sweep(self) -> None:
        """Forget what has expired."""
        with self._lock:
            now = self._clock()
            for key, kept in list(self._kept.items()):
                if now - kept.used > self.keep_seconds:
                    del self._kept[key]
                elif kept.session.undo and now > kept.session.undo.until:
                    kept.session = replace(kept.session, undo=None)
                    if kept.session == Session():
                        del self._kept[key]

    def _fresh(self, key: SessionKey) -> _Kept | None:
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
            key: sum(len(image.data) for image in kept.session.pictures())
            for key, kept in self._kept.items()
        }
        held = sum(sizes.values())
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_sessions or held > self._max_image_bytes
        ):
            oldest, _ = self._kept.popitem(last=False)
            held -= sizes[oldest]
