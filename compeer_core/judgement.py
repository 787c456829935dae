"""A judge's verdicts on a turn, and the reward (COMPEER, "RL with UnifiReward").

The reward: +1 or -1 for each step, for the reply (+1 if it equals or beats the reference) and for the
format. A turn that is not complete earns -1 everywhere.

There are three outcomes: a verdict, a question that does not apply (there is no reference), and a
question that could not be answered (`Unscorable`), which never becomes a number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compeer_core.taxonomy import Preference

Form = Literal["hard", "soft"]


UNSURE = (0.35, 0.65)
"""Between these probabilities a verdict is shown as "unsure". Those of the shipped judge are calibrated on validation turns
(`temperatures` in models.toml); their error on test turns is not measured."""


@dataclass(frozen=True)
class StepVerdict:
    """Whether a step of the reasoning is right."""

    correct: bool
    probability_correct: float

    @property
    def is_unsure(self) -> bool:
        """Whether the probability lies in the band `UNSURE`, ends included."""
        return UNSURE[0] <= self.probability_correct <= UNSURE[1]


@dataclass(frozen=True)
class ResponseVerdict:
    """Comparison of the reply (first) with the reference (second).

    The judge is asked in both orders and the probabilities are averaged, which cancels position
    bias.
    """

    preference: Preference
    probabilities: Mapping[Preference, float]

    @property
    def at_least_as_good(self) -> bool:
        """Whether the reply equals or beats the reference, the paper's condition for +1."""
        return self.preference in {Preference.FIRST, Preference.BOTH}

    @property
    def probability_at_least_as_good(self) -> float:
        """The probability that the reply equals or beats the reference."""
        return self.probabilities[Preference.FIRST] + self.probabilities[Preference.BOTH]

    @property
    def is_unsure(self) -> bool:
        """Whether that probability lies in the band `UNSURE`, ends included, or contradicts the preference.

        The likeliest of four preferences can be on the less likely side.
        """
        probability = self.probability_at_least_as_good
        return probability <= UNSURE[1] if self.at_least_as_good else probability >= UNSURE[0]


@dataclass(frozen=True)
class Unscorable:
    """The judge gave no valid answer."""

    reason: str


@dataclass(frozen=True)
class NotApplicable:
    """There is no question for the judge."""

    reason: str


StepOutcome = StepVerdict | Unscorable
ReplyOutcome = ResponseVerdict | Unscorable | NotApplicable

NO_REFERENCE = NotApplicable("no reference to compare the reply with")
NOT_COMPLETE = NotApplicable("the turn is not complete, so the judge was not asked")


@dataclass(frozen=True)
class Reward:
    """The reward of a judgement. None means "not part of it" or "unknown"."""

    steps: tuple[float | None, ...] | None
    """One value per step, None if unscorable; None for a bare reply."""
    response: float | None
    format: float | None
    """+1 complete, -1 not; None for a bare reply."""
    total: float | None
    """The sum of all parts; None if one of them is unscorable, or if there are none."""
    maximum: int
    """The largest possible total: the number of parts."""
    unscorable: int
    """Number of unscorable parts."""


@dataclass(frozen=True)
class Judgement:
    """All verdicts on one turn."""

    steps: tuple[StepOutcome, ...] | None
    """Three outcomes; None for a bare reply and for an incomplete turn."""
    response: ReplyOutcome
    is_complete: bool | None
    """Whether all four parts are there; None for a bare reply."""
    has_reference: bool = False
    """For an incomplete turn: whether it loses the point for the reply, too."""

    @classmethod
    def of_incomplete(cls, *, has_reference: bool) -> "Judgement":
        """Return the judgement of an incomplete turn, by rule."""
        return cls(None, NOT_COMPLETE, is_complete=False, has_reference=has_reference)

    def reward(self, form: Form = "hard") -> Reward:
        """Return the reward.

        Args:
            form: "hard" is the paper's +1 and -1. "soft" is 2p - 1, where p is the probability that
                a step is correct, or that the reply is first or both.

        Example:
            >>> right, unsure = StepVerdict(True, 0.9), StepVerdict(False, 0.4)
            >>> judgement = Judgement((right, right, unsure), NO_REFERENCE, is_complete=True)
            >>> judgement.reward().total, round(judgement.reward("soft").total, 2)
            (2.0, 2.4)
        """
        if self.is_complete is False:
            parts = 5 if self.has_reference else 4
            return Reward(
                steps=(-1.0, -1.0, -1.0),
                response=-1.0 if self.has_reference else None,
                format=-1.0,
                total=-float(parts),
                maximum=parts,
                unscorable=0,
            )
        outcomes = [*(self.steps or ()), self.response]
        applicable = [outcome for outcome in outcomes if not isinstance(outcome, NotApplicable)]
        values = [_value(outcome, form) for outcome in applicable]
        format_value = None if self.is_complete is None else 1.0
        parts_values = values if format_value is None else [*values, format_value]
        known = [value for value in parts_values if value is not None]
        is_known = bool(known) and len(known) == len(parts_values)
        return Reward(
            steps=None if self.steps is None else tuple(_value(step, form) for step in self.steps),
            response=_value(self.response, form),
            format=format_value,
            total=sum(known) if is_known else None,
            maximum=len(parts_values),
            unscorable=sum(isinstance(outcome, Unscorable) for outcome in outcomes),
        )


def _value(outcome: StepOutcome | ReplyOutcome, form: Form) -> float | None:
    match outcome:
        case StepVerdict(correct, probability):
            return _signed(correct) if form == "hard" else 2 * probability - 1
        case ResponseVerdict():
            if form == "hard":
                return _signed(outcome.at_least_as_good)
            return 2 * outcome.probability_at_least_as_good - 1
        case _:
            return None


def _signed(good: bool) -> float:
    return 1.0 if good else -1.0
