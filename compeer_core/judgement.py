"""What a judge has to say about a turn, and what it is worth (COMPEER, "RL with UnifiReward").

The reward: +1 or -1 for each step, for the reply (+1 if it equals or beats the reference) and for the
format. A turn that is not complete earns -1 everywhere.

Three outcomes are kept apart: a verdict, a question that does not apply (there is no reference),
and a question that could not be answered (`Unscorable`), which never becomes a number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compeer_core.taxonomy import Preference

Form = Literal["hard", "soft"]


@dataclass(frozen=True)
class StepVerdict:
    """Is a step of the reasoning right?"""

    correct: bool
    probability_correct: float


@dataclass(frozen=True)
class ResponseVerdict:
    """How the reply compares with the reference; the reply is the first of the two.

    The judge is asked in both orders and the probabilities are averaged, so that a liking for
    whatever comes first cancels out.
    """

    preference: Preference
    probabilities: Mapping[Preference, float]

    @property
    def at_least_as_good(self) -> bool:
        """The reply equals or beats the reference, the paper's condition for +1."""
        return self.preference in {Preference.FIRST, Preference.BOTH}


@dataclass(frozen=True)
class Unscorable:
    """The judge was asked, or should have been, and there is no answer to rely on."""

    reason: str


@dataclass(frozen=True)
class NotApplicable:
    """There is nothing to ask the judge."""

    reason: str


StepOutcome = StepVerdict | Unscorable
ReplyOutcome = ResponseVerdict | Unscorable | NotApplicable

NO_REFERENCE = NotApplicable("no reference to compare the reply with")
NOT_COMPLETE = NotApplicable("the turn is not complete, so the judge was not asked")


@dataclass(frozen=True)
class Reward:
    """What a judgement is worth. None stands for "not part of it" or "not known"."""

    steps: tuple[float | None, ...] | None
    """One value for each step, None where it is unscorable; None for a bare reply."""
    response: float | None
    format: float | None
    """+1 complete, -1 not; None for a bare reply."""
    total: float | None
    """The sum of all parts; None as soon as one of them is unscorable, or where there is none."""
    maximum: int
    """What the total could be at best: the number of parts."""
    unscorable: int
    """How many parts could not be scored."""


@dataclass(frozen=True)
class Judgement:
    """All that the judge has to say about one turn."""

    steps: tuple[StepOutcome, ...] | None
    """Three outcomes; None for a bare reply, and for a turn that is not complete."""
    response: ReplyOutcome
    is_complete: bool | None
    """Are all four parts there? None for a bare reply, which was never meant to have them."""
    has_reference: bool = False
    """Only asked of a turn that is not complete: does it lose the point for the reply as well?"""

    @classmethod
    def of_incomplete(cls, *, has_reference: bool) -> "Judgement":
        """The judgement by rule of a turn that lacks a part."""
        return cls(None, NOT_COMPLETE, is_complete=False, has_reference=has_reference)

    def reward(self, form: Form = "hard") -> Reward:
        """Turn verdicts into numbers.

        Args:
            form: "hard" is the paper's +1 and -1. "soft" is 2p - 1, where p is the probability that
                a step is correct, or that the reply is first or both.

        Example:
            >>> right, unsure = StepVerdict(True, 0.9), StepVerdict(False, 0.4)
            >>> judged = Judgement((right, right, unsure), NO_REFERENCE, is_complete=True)
            >>> judged.reward().total, round(judged.reward("soft").total, 2)
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
        asked = [outcome for outcome in outcomes if not isinstance(outcome, NotApplicable)]
        values = [_value(outcome, form) for outcome in asked]
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
        case ResponseVerdict(probabilities=probabilities):
            if form == "hard":
                return _signed(outcome.at_least_as_good)
            good = probabilities[Preference.FIRST] + probabilities[Preference.BOTH]
            return 2 * good - 1
        case _:
            return None


def _signed(good: bool) -> float:
    return 1.0 if good else -1.0
