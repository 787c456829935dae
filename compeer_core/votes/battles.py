"""A battle: two replies to one history, by two models, shown to one person.

The server fixes what is compared before anything is generated: the models, their sides and their seeds
(`BattlePlan`). If the gate draws a side again, the seed of its last draw replaces the planned one. Both sides
answer the same history once. A longer comparison is several battles; one of three or four models has a battle
for each pair that the person votes on.

The words of a battle are stored only with the person's consent; the data needed to count the vote always. A
doubtful vote is stored with the reasons (`Flag`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from compeer_core.cer import StepLabels
from compeer_core.dialogue import Dialogue, Speaker
from compeer_core.judgement import Reward
from compeer_core.taxonomy import Preference
from compeer_core.turn import SEEDS, TurnRecord


class SideStatus(StrEnum):
    """State of the reply of a side."""

    WRITING = "writing"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Ended by the person; the reply up to then is compared."""
    FAILED = "failed"


class Flag(StrEnum):
    """A reason to doubt a vote."""

    LEAKED = "leaked"
    """A reply reveals its model."""
    TOO_FAST = "too_fast"
    NOT_BOTH_SEEN = "not_both_seen"
    """One of the replies was not fully visible."""
    RATE_LIMITED = "rate_limited"
    """Too many recent votes by the person, or from their address."""
    AFTER_REVEAL = "after_reveal"
    """The person knew the names at the time of this revision."""
    STOPPED = "stopped"
    """A reply was stopped early."""
    CLOSED = "closed"
    """The battle was closed after the vote."""
    IMPORTED = "imported"
    """Imported from a file."""


class Tag(StrEnum):
    """A reason for a vote."""

    EMPATHY = "empathy"
    STRATEGY = "strategy"
    HUMAN = "human"
    GENERIC = "generic"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a vote is flagged or refused."""

    min_dwell_ms: int = 1500
    """A faster vote after the end of both replies is flagged."""
    votes_per_minute: int = 20
    """Of one person; more are flagged."""
    votes_per_minute_and_address: int = 120
    """Higher, since many people may share an address."""
    undo_seconds: float = 10
    battle_seconds: float = 24 * 3600
    """How long a battle accepts votes after its opening."""
    note_characters: int = 10_000


@dataclass(frozen=True)
class SidePlan:
    """Model and seed of a side."""

    model: str
    seed: int


@dataclass(frozen=True)
class BattlePlan:
    """A battle as it is fixed before anything is generated.

    Raises:
        ValueError: There are not two sides, or the history does not end with the seeker.
    """

    voter: str
    """Id of the person, from the signed cookie."""
    dialogue: Dialogue
    """The history; battles of one conversation share its id."""
    sides: tuple[SidePlan, SidePlan]
    """In the order shown; see `draw_sides`."""
    seed: int
    """Seed of the order."""
    blind: bool = True
    """Names are hidden until the vote; other votes do not count on the board."""
    with_reasoning: bool = False
    """The reasoning of both sides is shown before the vote."""
    keep_words: bool = False
    """The person agreed that history, pictures and replies are stored and used for research."""
    language: str = "und"
    topic: str = ""

    def __post_init__(self) -> None:
        if len(self.sides) != 2:
            raise ValueError(f"a battle has two sides, got {len(self.sides)}")
        utterances = self.dialogue.utterances
        if not utterances or utterances[-1].speaker is not Speaker.SEEKER:
            raise ValueError("the history of a battle must end with the seeker")


def draw_sides(models: Sequence[str], seed: int) -> tuple[SidePlan, ...]:
    """Return the models in random order, each with a seed of its own.

    Example:
        >>> [side.model for side in draw_sides(["a", "b"], seed=0)]
        ['b', 'a']
    """
    rng = random.Random(seed)
    order = rng.sample(list(models), len(models))
    return tuple(SidePlan(model, rng.randrange(SEEDS)) for model in order)


@dataclass(frozen=True)
class SideResult:
    """How a side ended."""

    status: SideStatus
    turn: str = ""
    """The raw turn."""
    reply: str = ""
    """The reply as it was shown."""
    reward: Reward | None = None
    seconds: float | None = None
    tokens: int | None = None
    leaked: bool | None = None
    """Whether the reply reveals its model; None if unchecked."""
    error: str | None = None
    seed: int | None = None
    """The seed of `turn`; None if nothing was generated."""

    @classmethod
    def of(cls, record: TurnRecord, leaked: bool | None = None) -> "SideResult":
        """Return the result of a turn; text without any tag is the reply, unless the gate is on."""
        reading = record.reading
        reply = reading.reply
        if (
            reply is None
            and not record.withheld
            and reading.history is None
            and reading.strategy is None
        ):
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
            seed=record.seed,
        )


@dataclass(frozen=True)
class Battle:
    """A running battle. The models are for the server, not for the page."""

    id: str
    voter: str
    sides: tuple[SidePlan, SidePlan]
    statuses: tuple[SideStatus, SideStatus]
    blind: bool
    with_reasoning: bool
    opened_at: datetime
    expires_at: datetime
    closed: str | None = None
    """Why it accepts no more votes, or None."""


@dataclass(frozen=True)
class VoteReceipt:
    """A durably stored vote."""

    battle_id: str
    number: int
    """Number of the revision, from 1."""
    preference: Preference | None
    """None if the vote was withdrawn."""
    at: datetime
    flags: tuple[Flag, ...]
    counted: bool
    """Whether it counts on the board: it stands, was blind, and has no flags."""


@dataclass(frozen=True)
class Reveal:
    """What a person sees after voting."""

    models: tuple[str, str]
    rewards: tuple[Reward | None, Reward | None]
    preference: Preference
    verdict: Preference | None
    """Preference of the judge, or None."""


@dataclass(frozen=True)
class Agreement:
    """How often a person and the judge gave the same of the four answers."""

    agreed: int
    compared: int
    """Standing blind votes after which the person saw the verdict."""


@dataclass(frozen=True)
class Deletion:
    """What was deleted."""

    battles: int
    votes: int


Steps = tuple[StepLabels | None, StepLabels | None]
"""For each side, whether its steps are right; None if not rated."""
