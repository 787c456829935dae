"""UnifiReward: one judge for the three steps of the reasoning and for the reply (COMPEER).

The judge works in one conversation. It reads the history, then step after step, and answers each with
one word, True or False; finally it reads the reply and a reference and says which is better. Its
answers stay in the conversation, so later verdicts depend on earlier ones. An answer is the most
probable of the allowed words, the same as greedy decoding would give. `compeer_core.judgement` turns
answers into rewards.

The baselines are a process reward model (PRM), asked about each step independently, and an outcome
reward model (ORM), asked about the reply alone. Together they form a `Judge` with the same methods
(`reply_scorer`).
"""

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compeer_core.backends.protocol import (
    Answers,
    BatchLabelScorer,
    CandidateQuestions,
    LabelScorer,
    Question,
    ScoringSession,
)
from compeer_core.dialogue import Dialogue
from compeer_core.errors import CompeerError, InputError
from compeer_core.findings import StepFindings
from compeer_core.judgement import (
    NO_REFERENCE,
    NOT_COMPLETE,
    Form,
    Judgement,
    NotApplicable,
    ReplyOutcome,
    ResponseVerdict,
    Reward,
    StepOutcome,
    StepVerdict,
    Unscorable,
)
from compeer_core.logs import trace_of
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
"""Verdict words for a step: right, wrong."""
PREFERENCES = ("First", "Second", "Both", "Neither")
"""Verdict words for the reply, in the order of `Preference`."""

Turn = SupportTurn | Reading | str


@dataclass(frozen=True)
class Temperatures:
    """Calibration of a judge: each logarithm of a probability is divided by a temperature.

    See Guo et al. 2017 (arXiv:1706.04599). Values above 1 make a judge less confident. They change no verdict
    on a step. Training writes them to `calibration.json`.
    """

    steps: float = 1.0
    """Of the verdicts on steps (`VERDICTS`); above 0."""
    replies: float = 1.0
    """Of the preferences between two replies (`PREFERENCES`); above 0."""

    def applied(self, labels: Sequence[str], probabilities: Sequence[float]) -> Sequence[float]:
        """Return the calibrated probabilities; invalid ones are returned unchanged.

        Args:
            labels: `VERDICTS` or `PREFERENCES`.
            probabilities: Of the labels.

        Example:
            >>> [round(p, 3) for p in Temperatures(steps=2.0).applied(VERDICTS, (0.9, 0.1))]
            [0.75, 0.25]
        """
        temperature = self.steps if tuple(labels) == VERDICTS else self.replies
        if temperature == 1 or not all(0 <= p <= 1 for p in probabilities):
            return probabilities
        powers = [p ** (1 / temperature) for p in probabilities]
        total = sum(powers)
        return [power / total for power in powers] if total > 0 else probabilities


__all__ = [
    "NOT_COMPLETE",
    "NO_REFERENCE",
    "PREFERENCES",
    "VERDICTS",
    "Form",
    "Judge",
    "JudgeSession",
    "Judgement",
    "NotApplicable",
    "ReplyOutcome",
    "ResponseVerdict",
    "Reward",
    "StepOutcome",
    "StepVerdict",
    "Temperatures",
    "Turn",
    "Unscorable",
    "ask_about_replies",
    "ask_about_step",
]


# --- the questions -----------------------------------------------------------------------------


def ask_about_step(
    step: Step, language: str = "en", reserved: Sequence[str] = (), findings: str = ""
) -> Question:
    """Return the question whether a step is right, answered by one of `VERDICTS`.

    Args:
        step: One step of a turn's reasoning; its text is neutralised here.
        language: Of the question, one of `compeer_core.prompts.LANGUAGES`.
        reserved: The judge's special tokens, see `compeer_core.prompts.neutralise`.
        findings: A line for the judge below the step, see `compeer_core.findings`.
    """
    quoted = neutralise(render_step(step), reserved)
    if findings:
        quoted += f"\n{findings}"
    return Question(step_question(part_of(step), quoted, language), VERDICTS)


def ask_about_replies(
    first: str, second: str, language: str = "en", reserved: Sequence[str] = ()
) -> Question:
    """Return the question which of two replies is better, answered by one of `PREFERENCES`.

    Args:
        first: A reply, verbatim; both replies are neutralised here.
        second: The other reply.
        language: See `ask_about_step`.
        reserved: See `ask_about_step`.
    """
    texts = (neutralise(first, reserved), neutralise(second, reserved))
    return Question(reply_question(*texts, language), PREFERENCES)


# --- the judge ---------------------------------------------------------------------------------


class Judge:
    """One reward model, or a pair of them, in the role of the judge.

    Attributes:
        scorer: Judges the steps and, unless there is a `reply_scorer`, the reply.
        reply_scorer: A separate model for the reply, if any. The steps are then judged
            independently: a PRM and an ORM instead of UnifiReward.
    """

    def __init__(
        self,
        name: str,
        scorer: LabelScorer,
        language: str = "en",
        vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
        reply_scorer: LabelScorer | None = None,
        temperatures: Temperatures = Temperatures(),
        findings: bool = False,
    ) -> None:
        """Use one model for everything, or one for the steps and one for the reply.

        With `findings`, questions about steps contain what a rule finds (`compeer_core.findings`).

        Raises:
            ConfigError: A verdict word is more than one token for a model, so its probability
                cannot be read at one position.
        """
        if reply_scorer is None:
            scorer.check_labels(VERDICTS + PREFERENCES)
        else:
            scorer.check_labels(VERDICTS)
            reply_scorer.check_labels(PREFERENCES)
        self.name = name
        self.scorer = scorer
        self.reply_scorer = reply_scorer
        self.language = language
        self.vocabulary = vocabulary
        self.temperatures = temperatures
        self._findings = findings

    @property
    def is_unified(self) -> bool:
        """Whether one model judges everything, with each verdict depending on the earlier ones."""
        return self.reply_scorer is None

    def close(self) -> None:
        """Free the models. May be called twice."""
        self.scorer.close()
        if self.reply_scorer is not None:
            self.reply_scorer.close()

    def open(self, dialogue: Dialogue, stop: threading.Event | None = None) -> "JudgeSession":
        """Begin to judge one turn, the one that follows `dialogue`. Close the session when done.

        Args:
            dialogue: The history.
            stop: Once set, no further question is asked; the remaining ones are unscorable.
        """
        return JudgeSession(self, dialogue, stop)

    def judge(
        self,
        dialogue: Dialogue,
        turns: Sequence[Turn],
        references: Sequence[str | None],
        stop: threading.Event | None = None,
    ) -> list[Judgement]:
        """Judge candidates for the turn that follows `dialogue`.

        Args:
            dialogue: The history; its last utterance is the seeker's.
            turns: A turn, the reading of a completion, or a text. A text without any tag of the
                grammar is judged as a reply alone.
            references: The reply to compare with, or None, for each turn.
            stop: As for `open`; a batch is not interrupted.

        Returns:
            One judgement for each turn. A failure of the model makes the questions of one turn
            unscorable and does not affect the others.
        """
        pairs = list(zip(turns, references, strict=True))
        scorers = (self.scorer, self.reply_scorer or self.scorer)
        if len(dialogue) and all(isinstance(scorer, BatchLabelScorer) for scorer in scorers):
            return self._judge_at_once(dialogue, pairs, stop)
        return [self._judge_one(dialogue, turn, reference, stop) for turn, reference in pairs]

    def _judge_at_once(
        self,
        dialogue: Dialogue,
        pairs: Sequence[tuple[Turn, str | None]],
        stop: threading.Event | None,
    ) -> list[Judgement]:
        """Judge in batches; turns that a batch leaves unanswered are judged one by one."""
        findings = self.findings(dialogue)
        questions_of = {
            number: questions
            for number, (turn, reference) in enumerate(pairs)
            if (questions := self._questions(turn, reference, findings)) is not None
        }
        if self.reply_scorer is None:
            candidates = {
                n: CandidateQuestions(steps, replies)
                for n, (steps, replies) in questions_of.items()
            }
            answered = self._scored(self.scorer, dialogue, candidates)
        else:
            on_steps = {
                n: CandidateQuestions((), steps) for n, (steps, _) in questions_of.items() if steps
            }
            on_replies = {
                n: CandidateQuestions((), replies)
                for n, (_, replies) in questions_of.items()
                if replies
            }
            step_answers = self._scored(self.scorer, dialogue, on_steps)
            reply_answers = self._scored(self.reply_scorer, dialogue, on_replies)
            none = Answers((), ())
            answered = {
                n: Answers(step_answers.get(n, none).ends, reply_answers.get(n, none).ends)
                for n in questions_of
                if (n in step_answers or n not in on_steps)
                and (n in reply_answers or n not in on_replies)
            }
        return [
            _judgement(answered[number], _is_bare(turn), self.is_unified)
            if number in answered
            else self._judge_one(dialogue, turn, reference, stop)
            for number, (turn, reference) in enumerate(pairs)
        ]

    def _scored(
        self, scorer: LabelScorer, dialogue: Dialogue, candidates: Mapping[int, CandidateQuestions]
    ) -> dict[int, Answers]:
        """Return the answers of the candidates that did not fail.

        A failed candidate is judged again in a session, which reports why, and can shorten a
        dialogue that is too long.
        """
        assert isinstance(scorer, BatchLabelScorer)
        messages = judge_messages(dialogue, self.language, scorer.reserved)
        try:
            answers = scorer.score_candidates(messages, list(candidates.values()))
        except FAILURES as error:
            logger.warning(
                "judge %s failed on %d at once: %s", self.name, len(candidates), trace_of(error)
            )
            return {}
        return {
            number: Answers(
                self._calibrated(candidates[number].chain, answer.chain),
                self._calibrated(candidates[number].ends, answer.ends),
            )
            for number, answer in zip(candidates, answers, strict=True)
            if isinstance(answer, Answers)
        }

    def _calibrated(
        self, questions: Sequence[Question], answers: Sequence[Sequence[float]]
    ) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(self.temperatures.applied(question.labels, given))
            for question, given in zip(questions, answers, strict=True)
        )

    def _questions(
        self, turn: Turn, reference: str | None, findings: StepFindings | None
    ) -> tuple[tuple[Question, ...], tuple[Question, ...]] | None:
        """Return the questions about the steps and the reply; None if there are none."""
        steps: tuple[Question, ...] = ()
        if _is_bare(turn):
            assert isinstance(turn, str)
            reply = turn
        else:
            reading = self._reading(turn)
            if not reading.is_complete:
                return None
            reply = reading.turn.reply
            steps = tuple(self.step_question(step, findings) for step in reading.turn.reasoning)
        replies = () if reference is None else self.reply_questions(reply, reference)
        return (steps, replies) if steps or replies else None

    def findings(self, dialogue: Dialogue) -> StepFindings | None:
        """Return what finds the words of steps in a conversation; None if this judge is not told."""
        return StepFindings(dialogue, self.language) if self._findings else None

    def step_question(self, step: Step, findings: StepFindings | None) -> Question:
        """Return the question whether a step is right."""
        found = findings.of(step) if findings else ""
        return ask_about_step(step, self.language, self.scorer.reserved, found)

    def reply_questions(self, reply: str, reference: str) -> tuple[Question, Question]:
        """Return the question which of two replies is better, the reply first and then second."""
        reserved = (self.reply_scorer or self.scorer).reserved
        return (
            ask_about_replies(reply, reference, self.language, reserved),
            ask_about_replies(reference, reply, self.language, reserved),
        )

    def _reading(self, turn: Turn) -> Reading:
        if isinstance(turn, Reading):
            return turn
        return read(turn if isinstance(turn, str) else render(turn), self.vocabulary)

    def _judge_one(
        self,
        dialogue: Dialogue,
        turn: Turn,
        reference: str | None,
        stop: threading.Event | None = None,
    ) -> Judgement:
        if _is_bare(turn):
            assert isinstance(turn, str)
            if reference is None:
                return Judgement(None, NO_REFERENCE, is_complete=None)
            with self.open(dialogue, stop) as session:
                return Judgement(None, session.reply(turn, reference), is_complete=None)
        reading = self._reading(turn)
        if not reading.is_complete:
            return Judgement.of_incomplete(has_reference=reference is not None)
        complete = reading.turn
        with self.open(dialogue, stop) as session:
            steps = tuple(session.step(part_of(step), step) for step in complete.reasoning)
            return Judgement(steps, session.reply(complete.reply, reference), is_complete=True)


def _is_bare(turn: Turn) -> bool:
    """Whether a turn is text without any tag of the grammar: a reply alone."""
    tags = (tag for part in Part for tag in (part.opening, part.closing))
    return isinstance(turn, str) and not any(tag in turn for tag in tags)


def _judgement(answers: Answers, is_bare: bool, is_unified: bool) -> Judgement:
    """Return the judgement from answers, as a session would make it.

    Args:
        answers: On the steps (`chain`) and the reply (`ends`).
        is_bare: Whether the turn is a reply alone.
        is_unified: Whether an answer depends on the earlier ones, and is invalid without them.
    """
    steps: list[StepOutcome] = []
    broken: Unscorable | None = None
    for given in answers.chain:
        outcome = broken or _step_outcome(given)
        if is_unified and isinstance(outcome, Unscorable):
            broken = outcome
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
    return StepVerdict(_most_probable(probabilities) == 0, probabilities[0])


def _reply_outcome(as_first: Sequence[float], as_second: Sequence[float]) -> ReplyOutcome:
    """Average both orders; in `as_second` the candidate comes after the reference."""
    forward, backward = _checked(as_first, PREFERENCES), _checked(as_second, PREFERENCES)
    if isinstance(forward, Unscorable):
        return forward
    if isinstance(backward, Unscorable):
        return backward
    first_order = dict(zip(Preference, forward, strict=True))
    second_order = dict(zip(Preference, backward, strict=True))
    averaged = {
        preference: (first_order[preference] + second_order[preference.swapped()]) / 2
        for preference in Preference
    }
    return ResponseVerdict(max(averaged, key=lambda name: averaged[name]), averaged)


# --- one turn, while it is generated -------------------------------------------------------------


class JudgeSession:
    """The judge's conversation about one turn: three steps in order, then the reply.

    The model is first called at the first question. No method raises because of the model: a
    question that it cannot answer is `Unscorable`, and so are those that depend on it.
    """

    def __init__(
        self, judge: Judge, dialogue: Dialogue, stop: threading.Event | None = None
    ) -> None:
        self._judge = judge
        self._answered: list[Part] = []
        self._findings = judge.findings(dialogue)
        self._on_steps = _Conversation(judge, judge.scorer, dialogue, stop)
        self._on_reply = self._on_steps
        if judge.reply_scorer is not None:
            self._on_reply = _Conversation(judge, judge.reply_scorer, dialogue, stop)

    def __enter__(self) -> "JudgeSession":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self, part: Part, step: Step) -> StepOutcome:
        """Judge one step. Steps come in the order of `STEPS`, once each."""
        conversation = self._on_steps
        if conversation.broken is not None:
            return conversation.broken
        expected = STEPS[len(self._answered)] if len(self._answered) < len(STEPS) else None
        if part is not expected:
            return Unscorable(f"the {part.value} step is out of order")
        question = self._judge.step_question(step, self._findings)
        given = conversation.ask(question)
        outcome = given if isinstance(given, Unscorable) else _step_outcome(given)
        if not self._judge.is_unified:
            self._answered.append(part)
            return outcome
        if isinstance(outcome, Unscorable):
            conversation.broken = outcome
            return outcome
        # The verdict is valid even if `keep` fails; later ones are then unscorable.
        conversation.keep(question, VERDICTS[0 if outcome.correct else 1])
        self._answered.append(part)
        return outcome

    def reply(self, text: str, reference: str | None) -> ReplyOutcome:
        """Compare the reply with a reference, in both orders, after all steps or none at all."""
        if reference is None:
            return NO_REFERENCE
        conversation = self._on_reply
        if len(self._answered) not in {0, len(STEPS)} and conversation.broken is None:
            return Unscorable("the reply was asked about before all steps were judged")
        orders: list[Sequence[float]] = []
        for question in self._judge.reply_questions(text, reference):
            given = conversation.ask(question)
            if isinstance(given, Unscorable):
                return given
            orders.append(given)
        return _reply_outcome(*orders)

    def close(self) -> None:
        """Release the model. No question can be asked afterwards."""
        for conversation in (self._on_steps, self._on_reply):
            conversation.close()


class _Conversation:
    """A conversation with one scorer, which can restart with a shorter dialogue."""

    def __init__(
        self, judge: Judge, scorer: LabelScorer, dialogue: Dialogue, stop: threading.Event | None
    ) -> None:
        self.broken: Unscorable | None = None
        """Why no further question can be asked."""
        self._judge = judge
        self._scorer = scorer
        self._dialogue = dialogue
        self._stop = stop
        self._session: ScoringSession | None = None
        self._answered: list[tuple[Question, str]] = []

    def ask(self, question: Question) -> Sequence[float] | Unscorable:
        """Ask after the answered questions; a failure does not break the conversation by itself."""
        if self._stop is not None and self._stop.is_set():
            self.broken = self.broken or Unscorable("judging was stopped before this")
        if self.broken is not None:
            return self.broken
        while True:
            try:
                if self._session is None:
                    self._session = self._opened()
                given = self._session.ask(question.text, question.labels)
                return self._judge.temperatures.applied(question.labels, given)
            except InputError as error:
                if error.code != TOO_LONG or len(self._dialogue) < 2:
                    return self._failed(error)
                self._shorten()
            except FAILURES as error:
                return self._failed(error)

    def keep(self, question: Question, label: str) -> None:
        """Add the last question and its answer to the conversation."""
        assert self._session is not None
        self._answered.append((question, label))
        try:
            self._session.answer(label)
        except FAILURES as error:
            self.broken = self._failed(error)

    def close(self) -> None:
        self.broken = self.broken or Unscorable("the judge's session is closed")
        self._release()

    def _release(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.close()
        except FAILURES as error:
            name = self._judge.name
            logger.warning("judge %s: closing a session failed: %s", name, trace_of(error))

    def _opened(self) -> ScoringSession:
        """Open a session and replay the answered questions."""
        messages = judge_messages(self._dialogue, self._judge.language, self._scorer.reserved)
        session = self._scorer.open(messages)
        for question, label in self._answered:
            session.ask(question.text, question.labels)
            session.answer(label)
        return session

    def _shorten(self) -> None:
        """Drop the first half of a dialogue that is too long for the judge."""
        self._release()
        utterances = self._dialogue.utterances
        latest = utterances[-(len(utterances) // 2) :]
        self._dialogue = replace(self._dialogue, utterances=latest)
        logger.info("judge %s: reads the last %d utterances", self._judge.name, len(latest))

    def _failed(self, error: Exception) -> Unscorable:
        logger.warning("judge %s failed: %s", self._judge.name, trace_of(error))
        return Unscorable(FAILED)


TOO_LONG = "message_too_long"
"""Code of the `InputError` of a conversation that exceeds the context."""

FAILURES = (CompeerError, RuntimeError)
"""Errors of a model: our own, and torch's, which are RuntimeErrors."""

FAILED = "the reward model failed"

TOLERANCE = 1e-3


def _checked(
    probabilities: Sequence[float], labels: Sequence[str]
) -> tuple[float, ...] | Unscorable:
    """Return the probabilities if they are valid."""
    values = tuple(float(value) for value in probabilities)
    if not values:
        return Unscorable(FAILED)
    if len(values) != len(labels):
        return Unscorable(f"the reward model gave {len(values)} numbers for {len(labels)} labels")
    if not all(math.isfinite(value) for value in values):
        return Unscorable("the reward model gave a number that is not finite")
    if min(values) < -TOLERANCE or abs(sum(values) - 1) > TOLERANCE:
        return Unscorable("the reward model gave numbers that are not probabilities")
    return tuple(min(1.0, max(0.0, value)) for value in values)


def _most_probable(probabilities: Sequence[float]) -> int:
    """Return the index of the largest value; the first of equals, as in greedy decoding."""
    return max(range(len(probabilities)), key=lambda place: probabilities[place])
