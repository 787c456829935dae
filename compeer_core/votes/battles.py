"""A battle: two replies to one history, by two models, before one person.

What is compared is fixed on the server before anything is written: which models, on which sides, with
which seeds (`BattlePlan`). Both sides answer the same history, once. A longer comparison is several
battles, and one of three or four models is a battle for each pair that somebody is asked about.

The words of a battle are kept only where the person agreed; what is needed to count the vote is kept
always. A vote that gives reason for doubt is kept too, with the reasons beside it (`Flag`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from compeer_core.cer import StepLabels
from compeer_core.dialogue import Dialogue, Speaker
from compeer_core.judgement import Reward
from compeer_core.taxonomy import Preference
from compeer_core.turn import SEEDS, TurnRecord


class SideStatus(StrEnum):
    """How far the reply of a side has come."""

    WRITING = "writing"
    FINISHED = "finished"
    STOPPED = "stopped"
    """The person ended it; what was written by then is compared."""
    FAILED = "failed"


class Flag(StrEnum):
    """A reason to doubt a vote."""

    LEAKED = "leaked"
    """A reply says who wrote it."""
    TOO_FAST = "too_fast"
    NOT_BOTH_SEEN = "not_both_seen"
    """One of the replies was not wholly on the screen."""
    RATE_LIMITED = "rate_limited"
    """The person, or the person's address, had voted very often just before."""
    AFTER_REVEAL = "after_reveal"
    """The person knew the names when this revision was made."""
    STOPPED = "stopped"
    """A reply was ended before its end."""
    CLOSED = "closed"
    """The battle was taken back after the vote."""
    IMPORTED = "imported"
    """It comes from a file."""


class Tag(StrEnum):
    """A reason that a person may give."""

    EMPATHY = "empathy"
    STRATEGY = "strategy"
    HUMAN = "human"
    GENERIC = "generic"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Limits:
    """From where on a vote is doubtful, or not taken any more."""

    min_dwell_ms: int = 1500
    """A vote sooner after the end of both replies is flagged."""
    votes_per_minute: int = 20
    """Of one person; what goes beyond it is flagged."""
    votes_per_minute_and_address: int = 120
    """Many people may share an address."""
    undo_seconds: float = 10
    battle_seconds: float = 24 * 3600
    """So long after its opening a battle takes votes."""
    note_characters: int = 10_000


@dataclass(frozen=True)
class SidePlan:
    """Who writes on a side, and with which seed."""

    model: str
    seed: int


@dataclass(frozen=True)
class BattlePlan:
    """What is fixed before anything is written.

    Raises:
        ValueError: There are not two sides, or the history does not end with the seeker.
    """

    voter: str
    """Whose battle it is: the id in the signed cookie."""
    dialogue: Dialogue
    """The history that both sides answer; battles of one conversation share its id."""
    sides: tuple[SidePlan, SidePlan]
    """In the order in which they are shown; see `draw_sides`."""
    seed: int
    """What the order was drawn with."""
    blind: bool = True
    """The names are hidden until the person has voted; other votes do not enter the board."""
    with_reasoning: bool = False
    """The reasoning of both sides is shown before the vote."""
    keep_words: bool = False
    """The person agreed that history, pictures and replies are kept, and used for research."""
    language: str = "und"
    topic: str = ""

    def __post_init__(self) -> None:
        if len(self.sides) != 2:
            raise ValueError(f"a battle has two sides, got {len(self.sides)}")
        said = self.dialogue.utterances
        if not said or said[-1].speaker is not Speaker.SEEKER:
            raise ValueError("the history of a battle ends with the seeker")


def draw_sides(models: Sequence[str], seed: int) -> tuple[SidePlan, ...]:
    """Return the models in an order drawn by the seed, each with a seed of its own.

    Example:
        >>> [side.model for side in draw_sides(["a", "b"], seed=0)]
        ['b', 'a']
    """
    drawn = random.Random(seed)
    order = drawn.sample(list(models), len(models))
    return tuple(SidePlan(model, drawn.randrange(SEEDS)) for model in order)


@dataclass(frozen=True)
class SideResult:
    """How a side ended."""

    status: SideStatus
    turn: str = ""
    """The whole turn as it was written."""
    reply: str = ""
    """What the person saw as the reply."""
    reward: Reward | None = None
    seconds: float | None = None
    tokens: int | None = None
    leaked: bool | None = None
    """Whether the reply says who wrote it; None where nobody checked."""
    error: str | None = None

    @classmethod
    def of(cls, record: TurnRecord, leaked: bool | None = None) -> "SideResult":
        """Return what a battle keeps of a turn; text without any tag is the reply as it stands."""
        reading = record.reading
        reply = reading.reply
        if reply is None and reading.history is None and reading.strategy is None:
            reply = record.raw
        return cls(
            status=SideStatus(record.status),
            turn=record.raw,
            reply=(reply or "").strip(),
            reward=None if record.judgement is None else record.judgement.reward(),
            seconds=record.seconds,
            tokens=record.tokens,
            leaked=leaked,
            error=record.error,
        )


@dataclass(frozen=True)
class Battle:
    """What is known of a battle while it is on. The names are for the server, not for the page."""

    id: str
    voter: str
    sides: tuple[SidePlan, SidePlan]
    statuses: tuple[SideStatus, SideStatus]
    blind: bool
    with_reasoning: bool
    opened_at: datetime
    expires_at: datetime
    closed: str | None = None
    """Why it takes no votes any more."""


@dataclass(frozen=True)
class VoteReceipt:
    """What was written down. It is on the disk when this is returned."""

    battle_id: str
    number: int
    """Of the revision, from 1."""
    preference: Preference | None
    """None where the vote was taken back."""
    at: datetime
    flags: tuple[Flag, ...]
    counted: bool
    """Whether the board takes it: it stands, was blind, and nothing speaks against it."""


@dataclass(frozen=True)
class Reveal:
    """What a person sees after voting."""

    models: tuple[str, str]
    rewards: tuple[Reward | None, Reward | None]
    preference: Preference
    verdict: Preference | None
    """The judge's; None where there is none."""

    @property
    def agrees(self) -> bool | None:
        """Whether person and judge say the same."""
        return None if self.verdict is None else self.verdict is self.preference


@dataclass(frozen=True)
class Deletion:
    """What was deleted."""

    battles: int
    votes: int


@dataclass(frozen=True)
class Counts:
    """How many there are."""

    voters: int
    battles: int
    votes: int
    """That stand."""
    counted: int
    """Of these, on the board."""
    flags: Mapping[str, int]
    """Standing votes with each flag; one may have several."""
    unchecked: Mapping[str, int]
    """Standing votes for which a check could not be made."""
    deleted: int
    """Votes deleted at their owners' wish, ever."""


Steps = tuple[StepLabels | None, StepLabels | None]
"""For each side, whether its steps are right; None where nothing was said about it."""
