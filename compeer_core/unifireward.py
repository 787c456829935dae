"""UnifiReward: one judge for the three steps of the reasoning and for the reply (COMPEER).

The judge is asked in one conversation. It sees the history, then step after step, and answers each
with one word, True or False; at last it sees the reply beside a reference and says which is better.
Its own answers stay in the conversation, so a later verdict is made in the light of the earlier
ones. An answer is the likeliest of the words it may choose from, read from their probabilities;
that is what greedy decoding would write.

The reward (COMPEER, "RL with UnifiReward"): +1 or -1 for each step, for the reply (+1 if it equals
or beats the reference) and for the format. A turn that is not complete earns -1 everywhere, and the
judge is not asked.

Three outcomes are kept apart: a verdict, a question that does not apply (there is no reference),
and a question that could not be answered (`Unscorable`), which never becomes a number.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compeer_core.backends.protocol import LabelScorer, ScoringSession
from compeer_core.dialogue import Dialogue
from compeer_core.errors import CompeerError, InputError
from compeer_core.prompts import judge_messages, neutralise, reply_question, step_question
from compeer_core.reasoning import (
    STEPS,
    Part,
    Reading,
    Step,
    SupportTurn,
    part_of,
    read,
    render,
    render_step,
)
from compeer_core.taxonomy import ESCONV_STRATEGIES, Preference, StrategyVocabulary

logger = logging.getLogger(__name__)

VERDICTS = ("True", "False")
"""The words for a step: correct, wrong."""
PREFERENCES = ("First", "Second", "Both", "Neither")
"""The words for the reply, in the order of `Preference`."""

Form = Literal["hard", "soft"]
Turn = SupportTurn | Reading | str


# --- verdicts ----------------------------------------------------------------------------------


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


# --- the judge ---------------------------------------------------------------------------------


class Judge:
    """A reward model at work."""

    def __init__(
        self,
        name: str,
        scorer: LabelScorer,
        language: str = "en",
        vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
    ) -> None:
        """Take a model that can score labels.

        Raises:
            ConfigError: A verdict word is more than one token for this model, so that its
                probability could not be read at one place.
        """
        scorer.check_labels(VERDICTS + PREFERENCES)
        self.name = name
        self.scorer = scorer
        self.language = language
        self.vocabulary = vocabulary

    def open(self, dialogue: Dialogue) -> "JudgeSession":
        """Begin to judge one turn, the one that follows `dialogue`. Close the session when done."""
        return JudgeSession(self, dialogue)

    def judge(
        self, dialogue: Dialogue, turns: Sequence[Turn], references: Sequence[str | None]
    ) -> list[Judgement]:
        """Judge candidates for the turn that follows `dialogue`.

        Args:
            dialogue: The history; its last utterance is the seeker's.
            turns: A turn, the reading of a completion, or a text. A text without any tag of the
                grammar is judged as a reply alone.
            references: For each turn the reply to compare with, or None.

        Returns:
            One judgement for each turn. A failure of the model makes the questions of one turn
            unscorable and leaves the others alone.
        """
        pairs = zip(turns, references, strict=True)
        return [self._judge_one(dialogue, turn, reference) for turn, reference in pairs]

    def _judge_one(self, dialogue: Dialogue, turn: Turn, reference: str | None) -> Judgement:
        if isinstance(turn, str) and _is_bare(turn):
            if reference is None:
                return Judgement(None, NO_REFERENCE, is_complete=None)
            with self.open(dialogue) as session:
                return Judgement(None, session.reply(turn, reference), is_complete=None)
        if not isinstance(turn, Reading):
            text = turn if isinstance(turn, str) else render(turn)
            turn = read(text, self.vocabulary)
        if not turn.is_complete:
            return Judgement.of_incomplete(has_reference=reference is not None)
        complete = turn.turn
        with self.open(dialogue) as session:
            steps = tuple(session.step(part_of(step), step) for step in complete.reasoning)
            return Judgement(steps, session.reply(complete.reply, reference), is_complete=True)


def _is_bare(text: str) -> bool:
    return not any(tag in text for part in Part for tag in (part.opening, part.closing))


class JudgeSession:
    """The judge's conversation about one turn: three steps in order, then the reply.

    The model is first touched when the first question is asked. No method raises because of the
    model: what it cannot answer is `Unscorable`, and so is all that would build on that answer.
    """

    def __init__(self, judge: Judge, dialogue: Dialogue) -> None:
        self._judge = judge
        self._dialogue = dialogue
        self._session: ScoringSession | None = None
        self._answered: list[Part] = []
        self._said: list[tuple[str, tuple[str, ...], str]] = []  # question, labels, answer
        self._broken: Unscorable | None = None

    def __enter__(self) -> "JudgeSession":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self, part: Part, step: Step) -> StepOutcome:
        """Judge one step. Steps come in the order of `STEPS`, once each."""
        if self._broken is not None:
            return self._broken
        expected = STEPS[len(self._answered)] if len(self._answered) < len(STEPS) else None
        if part is not expected:
            return Unscorable(f"the {part.value} step is out of order")
        question = step_question(part, self._quoted(render_step(step)), self._judge.language)
        probabilities = self._ask(question, VERDICTS)
        if isinstance(probabilities, Unscorable):
            self._broken = probabilities
            return probabilities
        likeliest = _likeliest(probabilities)
        failure = self._commit(question, VERDICTS[likeliest])
        self._answered.append(part)
        if failure is not None:
            # This verdict stands, since it was read before; those that would build on it do not.
            self._broken = failure
        return StepVerdict(likeliest == 0, probabilities[0])

    def reply(self, text: str, reference: str | None) -> ReplyOutcome:
        """Compare the reply with a reference, in both orders, after all steps or none at all."""
        if reference is None:
            return NO_REFERENCE
        if len(self._answered) not in {0, len(STEPS)} and self._broken is None:
            return Unscorable("the reply was asked about before all steps were judged")
        candidate, other = self._quoted(text), self._quoted(reference)
        as_first = self._ask_which(candidate, other)
        if isinstance(as_first, Unscorable):
            return as_first
        as_second = self._ask_which(other, candidate)
        if isinstance(as_second, Unscorable):
            return as_second
        one_order = dict(zip(Preference, as_first, strict=True))
        other_order = dict(zip(Preference, as_second, strict=True))
        averaged = {
            preference: (one_order[preference] + other_order[preference.swapped()]) / 2
            for preference in Preference
        }
        return ResponseVerdict(max(averaged, key=lambda one: averaged[one]), averaged)

    def close(self) -> None:
        """Let go of the model. No question can be asked afterwards."""
        self._broken = self._broken or Unscorable("the judge's session is closed")
        self._release()

    def _release(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.close()
        except FAILURES:
            logger.warning("judge %s: closing a session failed", self._judge.name, exc_info=True)

    def _quoted(self, text: str) -> str:
        return neutralise(text, self._judge.scorer.reserved)

    def _ask_which(self, first: str, second: str) -> tuple[float, ...] | Unscorable:
        return self._ask(reply_question(first, second, self._judge.language), PREFERENCES)

    def _ask(self, question: str, labels: tuple[str, ...]) -> tuple[float, ...] | Unscorable:
        if self._broken is not None:
            return self._broken
        while True:
            try:
                if self._session is None:
                    self._session = self._opened()
                return _checked(self._session.ask(question, labels), labels)
            except InputError as error:
                if error.code != TOO_LONG or len(self._dialogue) < 2:
                    return self._failed(error)
                self._forget_half()
            except FAILURES as error:
                return self._failed(error)

    def _opened(self) -> ScoringSession:
        """A conversation that stands where this one does."""
        judge = self._judge
        messages = judge_messages(self._dialogue, judge.language, judge.scorer.reserved)
        session = judge.scorer.open(messages)
        for question, labels, label in self._said:
            session.ask(question, labels)
            session.answer(label)
        return session

    def _forget_half(self) -> None:
        """A dialogue that is too long for the judge is judged by its later half."""
        self._release()
        utterances = self._dialogue.utterances
        kept = utterances[-(len(utterances) // 2) :]
        self._dialogue = replace(self._dialogue, utterances=kept)
        logger.info("judge %s: reads the last %d utterances", self._judge.name, len(kept))

    def _commit(self, question: str, label: str) -> Unscorable | None:
        assert self._session is not None
        self._said.append((question, VERDICTS, label))
        try:
            self._session.answer(label)
        except FAILURES as error:
            return self._failed(error)
        return None

    def _failed(self, error: Exception) -> Unscorable:
        logger.warning("judge %s failed", self._judge.name, exc_info=error)
        return Unscorable("the reward model failed")


TOO_LONG = "message_too_long"
"""The code of the `InputError` with which a model says that it cannot read so much."""

FAILURES = (CompeerError, RuntimeError)
"""What a model may fail with: our own errors, and those of torch, which are RuntimeErrors."""

TOLERANCE = 1e-3


def _checked(
    probabilities: Sequence[float], labels: Sequence[str]
) -> tuple[float, ...] | Unscorable:
    """The probabilities, if they are some."""
    values = tuple(float(value) for value in probabilities)
    if len(values) != len(labels):
        return Unscorable(f"the reward model gave {len(values)} numbers for {len(labels)} labels")
    if not all(math.isfinite(value) for value in values):
        return Unscorable("the reward model gave a number that is not finite")
    if min(values) < -TOLERANCE or abs(sum(values) - 1) > TOLERANCE:
        return Unscorable("the reward model gave numbers that are not probabilities")
    return tuple(min(1.0, max(0.0, value)) for value in values)


def _likeliest(probabilities: Sequence[float]) -> int:
    """The place of the largest; of equals the first, as greedy decoding takes it."""
    return max(range(len(probabilities)), key=lambda place: probabilities[place])
