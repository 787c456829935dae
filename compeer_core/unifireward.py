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

from compeer_core.backends.protocol import (
    Answers,
    Interview,
    InterviewScorer,
    LabelScorer,
    Question,
    ScoringSession,
)
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
        pairs = list(zip(turns, references, strict=True))
        if isinstance(self.scorer, InterviewScorer) and len(dialogue):
            return self._judge_at_once(self.scorer, dialogue, pairs)
        return [self._judge_one(dialogue, turn, reference) for turn, reference in pairs]

    def _judge_at_once(
        self,
        scorer: InterviewScorer,
        dialogue: Dialogue,
        pairs: Sequence[tuple[Turn, str | None]],
    ) -> list[Judgement]:
        """Judge by interviews; what is not asked in one is judged one by one."""
        interviews: dict[int, Interview] = {}
        for number, (turn, reference) in enumerate(pairs):
            interview = self._interview(turn, reference)
            if interview is not None:
                interviews[number] = interview
        messages = judge_messages(dialogue, self.language, scorer.reserved)
        try:
            answers = scorer.interview(messages, list(interviews.values()))
        except FAILURES:
            logger.warning("judge %s failed on %d at once", self.name, len(pairs), exc_info=True)
            answers = []
        answered = dict(zip(interviews, answers, strict=False))
        judgements = []
        for number, (turn, reference) in enumerate(pairs):
            answer = answered.get(number)
            if isinstance(answer, Answers):
                judgements.append(_judgement(answer, _is_bare(turn)))
            else:  # also a dialogue that is too long: a session knows what to leave out
                judgements.append(self._judge_one(dialogue, turn, reference))
        return judgements

    def _interview(self, turn: Turn, reference: str | None) -> Interview | None:
        """Return what is asked about a turn; None where there is nothing to ask."""
        chain: list[Question] = []
        if _is_bare(turn):
            assert isinstance(turn, str)
            reply = turn
        else:
            reading = self._reading(turn)
            if not reading.is_complete:
                return None
            reply = reading.turn.reply
            chain = [self.step_question(step) for step in reading.turn.reasoning]
        ends = () if reference is None else self.reply_questions(reply, reference)
        return Interview(tuple(chain), ends) if chain or ends else None

    def step_question(self, step: Step) -> Question:
        """Return the question whether a step is right."""
        text = step_question(part_of(step), self._quoted(render_step(step)), self.language)
        return Question(text, VERDICTS)

    def reply_questions(self, reply: str, reference: str) -> tuple[Question, Question]:
        """Return the question which of two replies is better, the reply first and then second."""
        candidate, other = self._quoted(reply), self._quoted(reference)
        return (
            Question(reply_question(candidate, other, self.language), PREFERENCES),
            Question(reply_question(other, candidate, self.language), PREFERENCES),
        )

    def _quoted(self, text: str) -> str:
        return neutralise(text, self.scorer.reserved)

    def _reading(self, turn: Turn) -> Reading:
        if isinstance(turn, Reading):
            return turn
        return read(turn if isinstance(turn, str) else render(turn), self.vocabulary)

    def _judge_one(self, dialogue: Dialogue, turn: Turn, reference: str | None) -> Judgement:
        if _is_bare(turn):
            assert isinstance(turn, str)
            if reference is None:
                return Judgement(None, NO_REFERENCE, is_complete=None)
            with self.open(dialogue) as session:
                return Judgement(None, session.reply(turn, reference), is_complete=None)
        reading = self._reading(turn)
        if not reading.is_complete:
            return Judgement.of_incomplete(has_reference=reference is not None)
        complete = reading.turn
        with self.open(dialogue) as session:
            steps = tuple(session.step(part_of(step), step) for step in complete.reasoning)
            return Judgement(steps, session.reply(complete.reply, reference), is_complete=True)


def _is_bare(turn: Turn) -> bool:
    """Whether a turn is a text without any tag of the grammar: a reply alone."""
    tags = (tag for part in Part for tag in (part.opening, part.closing))
    return isinstance(turn, str) and not any(tag in turn for tag in tags)


def _judgement(answers: Answers, is_bare: bool) -> Judgement:
    """Return the judgement that an interview amounts to, as a session would have made it."""
    steps: list[StepOutcome] = []
    broken: Unscorable | None = None
    for given in answers.chain:
        outcome = broken or _step_outcome(given)
        broken = outcome if isinstance(outcome, Unscorable) else None
        steps.append(outcome)
    response: ReplyOutcome = NO_REFERENCE
    if answers.ends:
        response = broken or _reply_outcome(*answers.ends)
    if is_bare:
        return Judgement(None, response, is_complete=None)
    return Judgement(tuple(steps), response, is_complete=True)


def _step_outcome(given: Sequence[float]) -> StepOutcome:
    probabilities = _checked(given, VERDICTS)
    if isinstance(probabilities, Unscorable):
        return probabilities
    return StepVerdict(_likeliest(probabilities) == 0, probabilities[0])


def _reply_outcome(as_first: Sequence[float], as_second: Sequence[float]) -> ReplyOutcome:
    """Average both orders; `as_second` has the candidate behind the reference."""
    orders = [_checked(given, PREFERENCES) for given in (as_first, as_second)]
    for order in orders:
        if isinstance(order, Unscorable):
            return order
    one_order, other_order = (
        dict(zip(Preference, order, strict=True))
        for order in orders
        if not isinstance(order, Unscorable)
    )
    averaged = {
        preference: (one_order[preference] + other_order[preference.swapped()]) / 2
        for preference in Preference
    }
    return ResponseVerdict(max(averaged, key=lambda one: averaged[one]), averaged)


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
        self._said: list[tuple[Question, str]] = []  # with its answer
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
        question = self._judge.step_question(step)
        given = self._ask(question)
        outcome = given if isinstance(given, Unscorable) else _step_outcome(given)
        if isinstance(outcome, Unscorable):
            self._broken = outcome
            return outcome
        failure = self._commit(question, VERDICTS[0 if outcome.correct else 1])
        self._answered.append(part)
        if failure is not None:
            # This verdict stands, since it was read before; those that would build on it do not.
            self._broken = failure
        return outcome

    def reply(self, text: str, reference: str | None) -> ReplyOutcome:
        """Compare the reply with a reference, in both orders, after all steps or none at all."""
        if reference is None:
            return NO_REFERENCE
        if len(self._answered) not in {0, len(STEPS)} and self._broken is None:
            return Unscorable("the reply was asked about before all steps were judged")
        orders: list[Sequence[float]] = []
        for question in self._judge.reply_questions(text, reference):
            given = self._ask(question)
            if isinstance(given, Unscorable):
                return given
            orders.append(given)
        return _reply_outcome(*orders)

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

    def _ask(self, question: Question) -> Sequence[float] | Unscorable:
        if self._broken is not None:
            return self._broken
        while True:
            try:
                if self._session is None:
                    self._session = self._opened()
                return self._session.ask(question.text, question.labels)
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
        for question, label in self._said:
            session.ask(question.text, question.labels)
            session.answer(label)
        return session

    def _forget_half(self) -> None:
        """A dialogue that is too long for the judge is judged by its later half."""
        self._release()
        utterances = self._dialogue.utterances
        kept = utterances[-(len(utterances) // 2) :]
        self._dialogue = replace(self._dialogue, utterances=kept)
        logger.info("judge %s: reads the last %d utterances", self._judge.name, len(kept))

    def _commit(self, question: Question, label: str) -> Unscorable | None:
        assert self._session is not None
        self._said.append((question, label))
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
