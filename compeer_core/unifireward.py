"""UnifiReward: one judge for the three steps of the reasoning and for the reply (COMPEER).

The judge is asked in one conversation. It sees the history, then step after step, and answers each
with one word, True or False; at last it sees the reply beside a reference and says which is better.
Its own answers stay in the conversation, so a later verdict is made in the light of the earlier
ones. An answer is the likeliest of the words it may choose from, read from their probabilities;
that is what greedy decoding would write. What the answers are worth is in `compeer_core.judgement`.

Beside it stands what it is compared with: a process reward model (PRM), asked about each step as if
there were no other, and an outcome reward model (ORM), asked about the reply alone. Together they are
a `Judge` with the same methods (`reply_scorer`).
"""

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
"""The words for a step: correct, wrong."""
PREFERENCES = ("First", "Second", "Both", "Neither")
"""The words for the reply, in the order of `Preference`."""

Turn = SupportTurn | Reading | str

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
    "Turn",
    "Unscorable",
    "ask_about_replies",
    "ask_about_step",
]


# --- the questions -----------------------------------------------------------------------------


def ask_about_step(step: Step, language: str = "en", reserved: Sequence[str] = ()) -> Question:
    """Return the question whether a step is right, answered by one of `VERDICTS`.

    Args:
        step: One step of a turn's reasoning; what it says is neutralised here.
        language: Of the question, one of `compeer_core.prompts.LANGUAGES`.
        reserved: The judge's special tokens, see `compeer_core.prompts.neutralise`.
    """
    quoted = neutralise(render_step(step), reserved)
    return Question(step_question(part_of(step), quoted, language), VERDICTS)


def ask_about_replies(
    first: str, second: str, language: str = "en", reserved: Sequence[str] = ()
) -> Question:
    """Return the question which of two replies is better, answered by one of `PREFERENCES`.

    Args:
        first: A reply as it was written; it is neutralised here, as is the other.
        second: The other reply.
        language: See `ask_about_step`.
        reserved: See `ask_about_step`.
    """
    texts = (neutralise(first, reserved), neutralise(second, reserved))
    return Question(reply_question(*texts, language), PREFERENCES)


# --- the judge ---------------------------------------------------------------------------------


class Judge:
    """A reward model at work.

    Attributes:
        scorer: Judges the steps and, unless there is a `reply_scorer`, the reply.
        reply_scorer: Judges the reply, if another model does. The steps are then judged as if each
            were alone: a PRM and an ORM instead of UnifiReward.
    """

    def __init__(
        self,
        name: str,
        scorer: LabelScorer,
        language: str = "en",
        vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
        reply_scorer: LabelScorer | None = None,
    ) -> None:
        """Take one model that can score labels, or one for the steps and one for the reply.

        Raises:
            ConfigError: A verdict word is more than one token for a model, so that its
                probability could not be read at one place.
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

    @property
    def is_unified(self) -> bool:
        """Whether one model judges all, each verdict in the light of those before it."""
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
            stop: Once it is set, no question is asked any more; all that is left is unscorable.
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
            references: For each turn the reply to compare with, or None.
            stop: As for `open`; what is asked at once is not interrupted.

        Returns:
            One judgement for each turn. A failure of the model makes the questions of one turn
            unscorable and leaves the others alone.
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
        """Judge by candidates; what is not answered in one is judged one by one."""
        asked = {
            number: questions
            for number, (turn, reference) in enumerate(pairs)
            if (questions := self._questions(turn, reference)) is not None
        }
        if self.reply_scorer is None:
            candidates = {
                n: CandidateQuestions(steps, replies) for n, (steps, replies) in asked.items()
            }
            answered = self._scored(self.scorer, dialogue, candidates)
        else:
            on_steps = {
                n: CandidateQuestions((), steps) for n, (steps, _) in asked.items() if steps
            }
            on_replies = {
                n: CandidateQuestions((), replies) for n, (_, replies) in asked.items() if replies
            }
            found = self._scored(self.scorer, dialogue, on_steps)
            others = self._scored(self.reply_scorer, dialogue, on_replies)
            none = Answers((), ())
            answered = {
                n: Answers(found.get(n, none).ends, others.get(n, none).ends)
                for n in asked
                if (n in found or n not in on_steps) and (n in others or n not in on_replies)
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
        """Return the answers that there are.

        Those that fail are left out: a session says why, and knows what to leave out of a dialogue
        that is too long.
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
            number: answer
            for number, answer in zip(candidates, answers, strict=True)
            if isinstance(answer, Answers)
        }

    def _questions(
        self, turn: Turn, reference: str | None
    ) -> tuple[tuple[Question, ...], tuple[Question, ...]] | None:
        """Return what is asked about the steps and the reply; None where there is nothing to ask."""
        steps: tuple[Question, ...] = ()
        if _is_bare(turn):
            assert isinstance(turn, str)
            reply = turn
        else:
            reading = self._reading(turn)
            if not reading.is_complete:
                return None
            reply = reading.turn.reply
            steps = tuple(self.step_question(step) for step in reading.turn.reasoning)
        replies = () if reference is None else self.reply_questions(reply, reference)
        return (steps, replies) if steps or replies else None

    def step_question(self, step: Step) -> Question:
        """Return the question whether a step is right."""
        return ask_about_step(step, self.language, self.scorer.reserved)

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
    """Whether a turn is a text without any tag of the grammar: a reply alone."""
    tags = (tag for part in Part for tag in (part.opening, part.closing))
    return isinstance(turn, str) and not any(tag in turn for tag in tags)


def _judgement(answers: Answers, is_bare: bool, is_unified: bool) -> Judgement:
    """Return the judgement that answers amount to, as a session would have made it.

    Args:
        answers: Those on the steps, and those on the reply.
        is_bare: Whether there is a reply alone.
        is_unified: Whether an answer builds on those before it, and is worth nothing without them.
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
    return StepVerdict(_likeliest(probabilities) == 0, probabilities[0])


def _reply_outcome(as_first: Sequence[float], as_second: Sequence[float]) -> ReplyOutcome:
    """Average both orders; in `as_second` the candidate stands behind the reference."""
    one, other = _checked(as_first, PREFERENCES), _checked(as_second, PREFERENCES)
    if isinstance(one, Unscorable):
        return one
    if isinstance(other, Unscorable):
        return other
    one_order = dict(zip(Preference, one, strict=True))
    other_order = dict(zip(Preference, other, strict=True))
    averaged = {
        preference: (one_order[preference] + other_order[preference.swapped()]) / 2
        for preference in Preference
    }
    return ResponseVerdict(max(averaged, key=lambda name: averaged[name]), averaged)


# --- one turn, while it is written -------------------------------------------------------------


class JudgeSession:
    """The judge's conversation about one turn: three steps in order, then the reply.

    The model is first touched when the first question is asked. No method raises because of the
    model: what it cannot answer is `Unscorable`, and so is all that would build on that answer.
    """

    def __init__(
        self, judge: Judge, dialogue: Dialogue, stop: threading.Event | None = None
    ) -> None:
        self._judge = judge
        self._answered: list[Part] = []
        self._on_steps = _Talk(judge, judge.scorer, dialogue, stop)
        self._on_reply = self._on_steps
        if judge.reply_scorer is not None:
            self._on_reply = _Talk(judge, judge.reply_scorer, dialogue, stop)

    def __enter__(self) -> "JudgeSession":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self, part: Part, step: Step) -> StepOutcome:
        """Judge one step. Steps come in the order of `STEPS`, once each."""
        talk = self._on_steps
        if talk.broken is not None:
            return talk.broken
        expected = STEPS[len(self._answered)] if len(self._answered) < len(STEPS) else None
        if part is not expected:
            return Unscorable(f"the {part.value} step is out of order")
        question = self._judge.step_question(step)
        given = talk.ask(question)
        outcome = given if isinstance(given, Unscorable) else _step_outcome(given)
        if not self._judge.is_unified:
            self._answered.append(part)
            return outcome
        if isinstance(outcome, Unscorable):
            talk.broken = outcome
            return outcome
        # A verdict stands even if it cannot be kept: it was read before that. What would build on
        # it is then unscorable.
        talk.keep(question, VERDICTS[0 if outcome.correct else 1])
        self._answered.append(part)
        return outcome

    def reply(self, text: str, reference: str | None) -> ReplyOutcome:
        """Compare the reply with a reference, in both orders, after all steps or none at all."""
        if reference is None:
            return NO_REFERENCE
        talk = self._on_reply
        if len(self._answered) not in {0, len(STEPS)} and talk.broken is None:
            return Unscorable("the reply was asked about before all steps were judged")
        orders: list[Sequence[float]] = []
        for question in self._judge.reply_questions(text, reference):
            given = talk.ask(question)
            if isinstance(given, Unscorable):
                return given
            orders.append(given)
        return _reply_outcome(*orders)

    def close(self) -> None:
        """Let go of the model. No question can be asked afterwards."""
        for talk in (self._on_steps, self._on_reply):
            talk.close()


class _Talk:
    """A conversation with one scorer, which can begin again with less of the dialogue."""

    def __init__(
        self, judge: Judge, scorer: LabelScorer, dialogue: Dialogue, stop: threading.Event | None
    ) -> None:
        self.broken: Unscorable | None = None
        """Why nothing more can be asked."""
        self._judge = judge
        self._scorer = scorer
        self._dialogue = dialogue
        self._stop = stop
        self._session: ScoringSession | None = None
        self._kept: list[tuple[Question, str]] = []  # with its answer

    def ask(self, question: Question) -> Sequence[float] | Unscorable:
        """Ask from behind what is kept; a failure does not break the conversation by itself."""
        if self._stop is not None and self._stop.is_set():
            self.broken = self.broken or Unscorable("judging was stopped before this")
        if self.broken is not None:
            return self.broken
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

    def keep(self, question: Question, label: str) -> None:
        """Let the question asked last stand in the conversation, with an answer."""
        assert self._session is not None
        self._kept.append((question, label))
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
        """A conversation that stands where this one does."""
        messages = judge_messages(self._dialogue, self._judge.language, self._scorer.reserved)
        session = self._scorer.open(messages)
        for question, label in self._kept:
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

    def _failed(self, error: Exception) -> Unscorable:
        logger.warning("judge %s failed: %s", self._judge.name, trace_of(error))
        return Unscorable(FAILED)


TOO_LONG = "message_too_long"
"""The code of the `InputError` with which a model says that it cannot read so much."""

FAILURES = (CompeerError, RuntimeError)
"""What a model may fail with: our own errors, and those of torch, which are RuntimeErrors."""

FAILED = "the reward model failed"

TOLERANCE = 1e-3


def _checked(
    probabilities: Sequence[float], labels: Sequence[str]
) -> tuple[float, ...] | Unscorable:
    """The probabilities, if they are some."""
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


def _likeliest(probabilities: Sequence[float]) -> int:
    """The place of the largest; of equals the first, as greedy decoding takes it."""
    return max(range(len(probabilities)), key=lambda place: probabilities[place])
