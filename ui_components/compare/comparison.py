"""A visitor's comparison in memory: rounds, their sides, and the votes.

A round is one message and the replies of two to four models. Each pair of sides that the visitor is
asked about is a battle of `compeer_core.votes`, which stores the vote; this is what the screen
draws. As with `ui_components.shared.session`, nothing is written to disk or to a log, and it can be
reached only by cookie and conversation id.
"""

import random
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.images import Image
from compeer_core.reasoning import STEPS, Part
from compeer_core.safety import RiskKind
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import Reveal, SidePlan, Steps, VoteReceipt
from ui_components.shared.progress import Progress

LETTERS = "ABCD"
"""The names of the sides; their number is the most that can be compared at once."""


@dataclass(frozen=True)
class Side:
    """One reply of a round."""

    plan: SidePlan
    progress: Progress = field(repr=False)
    reply: str = field(default="", repr=False)
    """The reply that is compared, once the side has ended; as stored in the battle."""
    leaked: bool | None = None

    @property
    def is_over(self) -> bool:
        """Whether generation has ended."""
        return self.progress.outcome != "running"

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a reply to compare."""
        return self.is_over and (self.progress.outcome == "failed" or not self.reply.strip())

    @property
    def words(self) -> str:
        """The reply so far."""
        return self.reply or self.progress.reply

    def texts(self, with_reasoning: bool) -> dict[Part, str]:
        """The texts so far that a round shows, in the order in which they are generated."""
        steps = STEPS if with_reasoning else ()
        return {part: self.progress.parts[part].text for part in steps} | {Part.REPLY: self.words}


@dataclass(frozen=True)
class Ballot:
    """The visitor's vote on a pair."""

    receipt: VoteReceipt | None = None
    """None without a vote, or after Undo."""
    revision: int = 0
    """The number of revisions, Undo included."""
    tags: tuple[str, ...] = ()
    note: str = field(default="", repr=False)
    steps: Steps = (None, None)
    """What the visitor says about the steps of each side."""
    undo_until: float = 0.0
    """On the store's clock."""
    reveal: Reveal | None = field(default=None, repr=False)
    seen_names: bool = False
    """The names were shown, which undoing the vote does not change."""


@dataclass(frozen=True)
class Pair:
    """Two sides that the visitor is asked to compare."""

    battle: str
    sides: tuple[int, int]
    verdict: Preference | None = None
    chances: Mapping[Preference, float] | None = None
    """The judge's probability of each answer."""
    judged: bool = False
    """The judge has finished, possibly without a verdict."""
    ballot: Ballot = Ballot()


@dataclass(frozen=True)
class Round:
    """One message and its replies."""

    message: Utterance = field(repr=False)
    sides: tuple[Side, ...]
    pairs: tuple[Pair, ...]
    blind: bool
    with_reasoning: bool
    keep_words: bool
    seed: int
    language: str = "und"
    judge: str = ""
    ended_at: float | None = None
    """When the last side ended, on the store's clock."""
    chosen: int | None = None
    """The side that the visitor chose to continue from; None follows the votes."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    """Names the round in the URLs of its images; unguessable."""

    @property
    def is_over(self) -> bool:
        """Whether every side has ended."""
        return all(side.is_over for side in self.sides)

    @property
    def has_vote(self) -> bool:
        """Whether there is a valid vote."""
        return any(pair.ballot.receipt is not None for pair in self.pairs)

    @property
    def active(self) -> Pair | None:
        """The current pair: not voted on yet, or its names not revealed yet."""
        for pair in self.pairs:
            if pair.ballot.reveal is None and not any(self.sides[n].has_failed for n in pair.sides):
                return pair
        return None

    @property
    def goes_on(self) -> int | None:
        """The side whose reply continues the conversation, None before a vote.

        The one that won most often; the round's seed breaks ties.
        """
        if not self.has_vote:
            return None
        if self.chosen is not None:
            return self.chosen
        return random.Random(self.seed).choice(self._most_wins)

    @property
    def _most_wins(self) -> list[int]:
        """The sides that won most often, of those that did not fail."""
        wins = [0] * len(self.sides)
        for pair in self.pairs:
            preference = pair.ballot.receipt and pair.ballot.receipt.preference
            if preference is Preference.FIRST:
                wins[pair.sides[0]] += 1
            elif preference is Preference.SECOND:
                wins[pair.sides[1]] += 1
        able = [n for n, side in enumerate(self.sides) if not side.has_failed]
        return [n for n in able if wins[n] == max(wins[each] for each in able)]

    @property
    def answers(self) -> set[Preference]:
        """The answers of the votes that stand."""
        receipts = (pair.ballot.receipt for pair in self.pairs)
        return {receipt.preference for receipt in receipts if receipt and receipt.preference}

    @property
    def favourites(self) -> frozenset[int]:
        """The sides that the visitor preferred most often, or else those found good; empty before a vote."""
        if self.answers & {Preference.FIRST, Preference.SECOND}:
            return frozenset(self._most_wins)
        return frozenset(
            number
            for pair in self.pairs
            if pair.ballot.receipt and pair.ballot.receipt.preference is Preference.BOTH
            for number in pair.sides
        )

    def is_held(self, number: int) -> bool:
        """Whether a side has ended but is shown as running, since its speed could reveal its model."""
        side = self.sides[number]
        return side.progress.outcome == "finished" and self._hides_speed

    def visible(self, number: int) -> dict[Part, str]:
        """The texts of a side that may be shown.

        In a blind round all sides grow at the speed of the slowest, unless one was stopped or failed.
        """
        side = self.sides[number]
        texts = side.texts(self.with_reasoning)
        if not self._hides_speed or side.progress.outcome == "stopped":
            return texts
        left = min(
            sum(map(len, running.texts(self.with_reasoning).values()))
            for running in self.sides
            if not running.is_over
        )
        for part, text in texts.items():
            texts[part] = text[: max(left, 0)]
            left -= len(text)
        return texts

    @property
    def _hides_speed(self) -> bool:
        has_failed = any(side.has_failed for side in self.sides)
        return self.blind and not self.is_over and not has_failed

    def with_side(self, number: int, side: Side) -> "Round":
        """Return the round with one side replaced."""
        return replace(self, sides=(*self.sides[:number], side, *self.sides[number + 1 :]))

    def names_of(self, number: int) -> bool:
        """Whether the visitor may know the model of that side."""
        return not self.blind or any(
            number in pair.sides and pair.ballot.reveal is not None for pair in self.pairs
        )


@dataclass(frozen=True)
class Comparison:
    """One conversation with several models. Immutable; the store holds the newest version."""

    rounds: tuple[Round, ...] = field(default=(), repr=False)
    risk: RiskKind | None = None
    """The kind of danger for which the last message got no replies; then there are no rounds."""
    risk_is_earlier: bool = False
    """The sign is in an earlier message."""
    unanswered: str = field(default="", repr=False)
    """The text of that message."""
    id: str = field(default_factory=lambda: f"c{secrets.token_hex(12)}", compare=False)
    """An id shared by the conversation's battles; it does not identify the visitor."""

    @property
    def last(self) -> Round | None:
        """The newest round."""
        return self.rounds[-1] if self.rounds else None

    def dialogue(self, message: Utterance) -> Dialogue:
        """The dialogue so far, with the replies that continued it, and ``message``."""
        utterances: list[Utterance] = []
        for earlier in self.rounds:
            utterances.append(earlier.message)
            number = earlier.goes_on
            if number is not None:
                utterances.append(Utterance(Speaker.SUPPORTER, earlier.sides[number].reply))
        return Dialogue((*utterances, message), id=self.id)

    def with_round(self, changed: Round) -> "Comparison":
        """Return the comparison with the round of the same key replaced."""
        rounds = tuple(changed if round_.key == changed.key else round_ for round_ in self.rounds)
        return replace(self, rounds=rounds)

    def with_pair(self, changed: Pair) -> "Comparison":
        """Return the comparison with the pair of the same battle replaced."""

        def within(round_: Round) -> Round:
            pairs = (changed if pair.battle == changed.battle else pair for pair in round_.pairs)
            return replace(round_, pairs=tuple(pairs))

        return replace(self, rounds=tuple(map(within, self.rounds)))

    def locate(self, battle: str) -> "tuple[Round, Pair] | None":
        """Return a battle's round and pair, None if there is none."""
        for round_ in self.rounds:
            for pair in round_.pairs:
                if pair.battle == battle:
                    return round_, pair
        return None

    @property
    def is_empty(self) -> bool:
        """Whether there are no rounds and no risk sign."""
        return not self.rounds and self.risk is None

    def aged(self, now: float) -> "Comparison":
        """Return it unchanged: no part expires before the whole."""
        return self

    def picture(self, key: str, index: int) -> Image | None:
        """Return an image of a round's message."""
        for round_ in self.rounds:
            if round_.key == key and 0 <= index < len(round_.message.images):
                return round_.message.images[index]
        return None

    def pictures(self) -> Iterator[Image]:
        """Every image it holds."""
        for round_ in self.rounds:
            yield from round_.message.images
