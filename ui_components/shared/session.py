"""One conversation, as `ui_components.shared.session_store` stores it.

A message may have several replies. One is current and continues the conversation; each of the
others keeps the messages that followed it, so switching back restores them.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from compeer_core.best_of import Ranking
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import InputError
from compeer_core.images import Image
from compeer_core.safety import RiskKind, forbids_reply
from ui_components.shared.progress import Progress

MAX_TURNS = 100
MAX_REPLIES = 24
"""Per message, including alternatives."""
MAX_KEPT = 400
"""Per conversation."""
UNDO_SECONDS = 600.0


@dataclass(frozen=True)
class Branch:
    """An alternative reply."""

    progress: Progress = field(repr=False)
    after: tuple["Turn", ...] = field(default=(), repr=False)
    """The messages that followed it."""


@dataclass(frozen=True)
class BestOf:
    """Replies generated together, to choose from (best of n)."""

    numbers: tuple[int, ...]
    """The replies' numbers, in the order of generation."""
    reference: int = 0
    """The reply that the judge compared them with; 0 for none."""
    by_strategy: bool = False
    """Each has another forced strategy; they are not ranked."""
    ranking: Ranking | None = field(default=None, repr=False)
    """None until all have ended."""


@dataclass(frozen=True)
class Turn:
    """A message of the seeker and its replies."""

    message: Utterance = field(repr=False)
    progress: Progress | None = field(default=None, repr=False)
    """The current reply; None before the first one."""
    aside: tuple[Branch, ...] = field(default=(), repr=False)
    """The alternatives, unordered."""
    best_of: BestOf | None = None
    """The latest group."""
    risk: RiskKind | None = None
    """The kind of danger for which no model may reply (`RiskState.withheld_for`)."""
    risk_is_earlier: bool = False
    """The sign is in an earlier message."""
    hint: RiskKind | None = None
    """What a check that is often wrong found in this message: the reply is folded behind the help lines."""
    language: str = "und"
    key: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    """Names the turn in the URLs of its images; unguessable."""

    @property
    def replies(self) -> tuple[Progress, ...]:
        """All replies, ordered by number."""
        shown = () if self.progress is None else (self.progress,)
        replies = (*shown, *(branch.progress for branch in self.aside))
        return tuple(sorted(replies, key=lambda progress: progress.number))

    @property
    def next_number(self) -> int:
        """The number of the next reply."""
        return max((progress.number for progress in self.replies), default=0) + 1

    def reply(self, number: int) -> Progress | None:
        """Return the reply with that number, None if there is none."""
        return next((reply for reply in self.replies if reply.number == number), None)


@dataclass(frozen=True)
class Undo:
    """What Undo restores."""

    kind: Literal["cleared", "edited", "retried"]
    turns: tuple[Turn, ...] = field(repr=False)
    """All turns as they were, if messages were removed."""
    number: int
    """The changed message, from 1."""
    until: float
    """On the store's clock."""
    back_to: int = 0
    """The earlier current reply, if nothing was removed."""


@dataclass(frozen=True)
class Session:
    """One conversation. Immutable; the store holds the newest version."""

    turns: tuple[Turn, ...] = field(default=(), repr=False)
    selected: int | None = None
    """The turn in the inspector; None follows the newest."""
    editing: int | None = None
    """The message that is being edited."""
    draft: str = field(default="", repr=False)
    """The unsent text in the message box."""
    title: str = field(default="", repr=False)
    """The name that the visitor gave the conversation; empty for none."""
    written: float = 0.0
    """When the last message was sent, on the store's clock."""
    compared: int = 0
    """The reply compared with the current one in the inspector; 0 for none."""
    undo: Undo | None = None

    @property
    def shown(self) -> int | None:
        """The turn in the inspector, None if there is none."""
        if not self.turns:
            return None
        last = len(self.turns) - 1
        return last if self.selected is None else min(self.selected, last)

    def dialogue(self) -> Dialogue:
        """The dialogue up to the last message, as the policy reads it.

        A turn without a reply contributes only the seeker's message.
        """
        return Dialogue(tuple(utterance for _, utterance in self.utterances()))

    def utterances(self) -> Iterator[tuple[int, Utterance]]:
        """Yield the utterances of `dialogue`, each with the index of its turn."""
        last = len(self.turns) - 1
        for index, turn in enumerate(self.turns):
            yield index, turn.message
            reply = turn.progress.reply.strip() if turn.progress else ""
            if reply and index < last:
                yield index, Utterance(Speaker.SUPPORTER, reply)

    @property
    def is_writing(self) -> bool:
        """Whether a reply to the last message is being generated."""
        return bool(self.turns) and any(
            reply.outcome == "running" for reply in self.turns[-1].replies
        )

    def progress(self, key: str) -> Progress | None:
        """Return the reply with that key, current or not."""
        turns = (*self.turns[-1:], *self.held())  # usually in the newest turn
        return next((reply for turn in turns for reply in turn.replies if reply.key == key), None)

    def with_progress(self, progress: Progress) -> "Session":
        """Return the session with the reply of the same key replaced, also in what Undo holds."""
        turns = _with_progress(self.turns, progress)
        undo = self.undo and replace(self.undo, turns=_with_progress(self.undo.turns, progress))
        return replace(self, turns=turns, undo=undo)

    def begun(self, index: int, progress: Progress) -> "Session":
        """Return the session with one more reply to a message, which becomes current.

        What followed the earlier reply stays with that reply.

        Raises:
            InputError: There is no such message (code ``turn_gone``), no model may reply to it
                (``left_to_people``), or the limit of replies is reached (``too_many_replies``).
        """
        turn = self.turn(index)
        self._check_may_reply(turn, 1)
        aside = turn.aside
        if turn.progress is not None and (turn.progress.has_words or self.turns[index + 1 :]):
            aside = (*aside, Branch(turn.progress, self.turns[index + 1 :]))
        turn = replace(turn, progress=None, aside=aside)
        shown = replace(turn, progress=replace(progress, number=turn.next_number))
        return replace(self, turns=(*self.turns[:index], shown), selected=None, compared=0)

    def sampled(self, samples: tuple[Progress, ...]) -> "Session":
        """Return the session with several alternative replies to the last message.

        Without an earlier reply, the first of them becomes current. Raises what `begun` raises.
        """
        turn = self.turn(len(self.turns) - 1)
        self._check_may_reply(turn, len(samples))
        if turn.progress is not None and not turn.progress.has_words:
            turn = replace(turn, progress=None)
        first = turn.next_number
        shown = turn.progress
        reference = shown.number if shown is not None and shown.reply.strip() else 0
        numbered = [
            replace(sample, number=first + place, compared_with=reference)
            for place, sample in enumerate(samples)
        ]
        best_of = BestOf(
            tuple(sample.number for sample in numbered),
            reference,
            by_strategy=all(sample.origin.kind == "strategy" for sample in samples),
        )
        if shown is None:
            shown = numbered.pop(0)
        aside = (*turn.aside, *map(Branch, numbered))
        turn = replace(turn, progress=shown, aside=aside, best_of=best_of)
        return replace(self, turns=(*self.turns[:-1], turn), selected=None, compared=0)

    def ranked(self, turn_key: str, best_of: BestOf) -> "Session":
        """Return the session with a ranked group; its replies without text are removed."""

        def change(turn: Turn) -> Turn:
            group = turn.best_of.numbers if turn.best_of else ()
            aside = tuple(
                branch
                for branch in turn.aside
                if branch.progress.has_words or branch.progress.number not in group
            )
            return replace(turn, aside=aside, best_of=best_of)

        def changed(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
            return tuple(change(turn) if turn.key == turn_key else turn for turn in turns)

        undo = self.undo and replace(self.undo, turns=changed(self.undo.turns))
        return replace(self, turns=changed(self.turns), undo=undo)

    def switched(self, index: int, number: int) -> "Session":
        """Return the session with another reply current, and the messages that followed it.

        Raises:
            InputError: There is no such message or reply (code ``turn_gone``).
        """
        turn = self.turn(index)
        if turn.progress is not None and turn.progress.number == number:
            return self
        wanted = next((branch for branch in turn.aside if branch.progress.number == number), None)
        if wanted is None:
            raise InputError("no such reply", code="turn_gone")
        aside = tuple(branch for branch in turn.aside if branch is not wanted)
        if turn.progress is not None:
            aside = (*aside, Branch(turn.progress, self.turns[index + 1 :]))
        shown = replace(turn, progress=wanted.progress, aside=aside)
        turns = (*self.turns[:index], shown, *wanted.after)
        selected = None if index == len(turns) - 1 else index
        return replace(self, turns=turns, selected=selected, compared=0, editing=None)

    def turn(self, index: int) -> Turn:
        """Return the turn with that index.

        Raises:
            InputError: There is none (code ``turn_gone``).
        """
        if not 0 <= index < len(self.turns):
            raise InputError("no such turn", code="turn_gone")
        return self.turns[index]

    def _check_may_reply(self, turn: Turn, count: int) -> None:
        """Check the limits; `begun` and `sampled` call this before every reply."""
        if forbids_reply(turn.risk):
            raise InputError("no model may reply to this message", code="left_to_people")
        reply_count = sum(len(each.replies) for each in every_turn(self.turns))
        if len(turn.replies) + count > MAX_REPLIES or reply_count + count > MAX_KEPT:
            raise InputError("too many", code="too_many_replies", values={"limit": MAX_REPLIES})

    @property
    def is_empty(self) -> bool:
        """Whether there is no message, sent or unsent, and nothing to undo."""
        return not (self.turns or self.draft or self.undo)

    @property
    def is_deleted(self) -> bool:
        """Whether the visitor deleted it and can still restore it."""
        return not self.turns and self.undo is not None and self.undo.kind == "cleared"

    @property
    def name(self) -> str:
        """Its title, else the beginning of its first message; empty if that is a photo."""
        turns = self.turns or (self.undo.turns if self.undo else ())
        return self.title or (" ".join(turns[0].message.text.split()) if turns else "")

    def aged(self, now: float) -> "Session":
        """Return the session without an expired Undo."""
        return replace(self, undo=None) if self.undo and now > self.undo.until else self

    def picture(self, key: str, index: int) -> Image | None:
        """Return an image of a turn, also of one that is not in the current thread."""
        for turn in self.held():
            if turn.key == key and 0 <= index < len(turn.message.images):
                return turn.message.images[index]
        return None

    def pictures(self) -> Iterator[Image]:
        """Yield every image of the session."""
        for turn in self.held():
            yield from turn.message.images

    def held(self) -> Iterator[Turn]:
        """Yield every turn, including alternatives and what Undo holds."""
        yield from every_turn(self.turns)
        if self.undo:
            yield from every_turn(self.undo.turns)


def way_back(session: Session, index: int, now: float) -> Undo | None:
    """Return an Undo that restores the current reply to a message, None if it has no text."""
    progress = session.turn(index).progress
    if progress is None or not progress.has_words:
        return None
    return Undo("retried", (), index + 1, now + UNDO_SECONDS, back_to=progress.number)


def every_turn(turns: tuple[Turn, ...]) -> Iterator[Turn]:
    """Yield these turns and those after their alternative replies."""
    for turn in turns:
        yield turn
        for branch in turn.aside:
            yield from every_turn(branch.after)


def _with_progress(turns: tuple[Turn, ...], newer: Progress) -> tuple[Turn, ...]:
    """Replace the reply of the same key, searching the newest turn first."""
    for place in range(len(turns) - 1, -1, -1):
        turn = turns[place]
        changed = _turn_with_progress(turn, newer)
        if changed is not turn:
            return (*turns[:place], changed, *turns[place + 1 :])
    return turns


def _turn_with_progress(turn: Turn, newer: Progress) -> Turn:
    if turn.progress is not None and turn.progress.key == newer.key:
        return replace(turn, progress=newer)
    for place, branch in enumerate(turn.aside):
        if branch.progress.key == newer.key:
            changed = replace(branch, progress=newer)
        else:
            after = _with_progress(branch.after, newer)
            if after is branch.after:
                continue
            changed = replace(branch, after=after)
        return replace(turn, aside=(*turn.aside[:place], changed, *turn.aside[place + 1 :]))
    return turn
