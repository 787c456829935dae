"""Rows of CER as the conversations a reward model is trained on (COMPEER, Figure 4).

- *unified*: the history, then step after step with its verdict, then two replies with the preference;
  all in one conversation, so that a later verdict is learnt in the light of the earlier ones;
- *process* (PRM): the history and one step, with its verdict; a conversation for each step;
- *outcome* (ORM): the history and two replies, with the preference.

The questions are laid out by the functions with which `compeer_core.unifireward` asks them, so a
judge meets in use what it was trained on.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from compeer_core.backends.protocol import Message
from compeer_core.cer import Candidate, CerRecord
from compeer_core.findings import StepFindings
from compeer_core.images import Image
from compeer_core.prompts import judge_messages
from compeer_core.reasoning import STEPS, Part, part_of, read
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import (
    PREFERENCES,
    VERDICTS,
    ask_about_replies,
    ask_about_step,
)


class Answered(NamedTuple):
    """A question about a part of a turn, and its verdict."""

    part: Part
    question: str
    verdict: str


class Kind(StrEnum):
    """Which reward model."""

    UNIFIED = "unified"
    """UnifiReward: steps and reply, in one conversation."""
    PROCESS = "process"
    """PRM: each step on its own."""
    OUTCOME = "outcome"
    """ORM: the reply alone."""


def conversations(
    record: CerRecord,
    kind: Kind,
    pictures: Sequence[Sequence[Image]] | None = None,
    language: str = "en",
    findings: bool = False,
) -> Iterator[tuple[Message, ...]]:
    """Yield the training conversations of a row; none if it has no verdict of this kind.

    Args:
        record: A row. If both of its turns were judged step by step, each makes a conversation.
        kind: The reward model that is trained.
        pictures: The opened pictures of each utterance of the history.
        language: Of the questions, whatever that of the row: a judge is prompted in one language.
        findings: Whether questions about steps contain what a rule finds (`compeer_core.findings`).
    """
    opening = judge_messages(record.case.dialogue(pictures), language)
    for asked in questions(record, kind, language, findings):
        yield _conversation(opening, asked)


def questions(
    record: CerRecord, kind: Kind, language: str = "en", findings: bool = False
) -> Iterator[Sequence[Answered]]:
    """Yield the questions of each training conversation of a row; see `conversations`."""
    reply = _about_the_reply(record, language)
    finder = StepFindings(record.case.dialogue(), language) if findings else None
    steps = [
        about
        for candidate in record.candidates
        if (about := _about_the_steps(candidate, language, finder))
    ]
    match kind:
        case Kind.OUTCOME:
            if reply:
                yield [reply]
        case Kind.PROCESS:
            for about in steps:
                for answered in about:
                    yield [answered]
        case Kind.UNIFIED:
            for about in steps:
                # The judge judges a reply after all steps or none.
                ending = [reply] if reply and len(about) == len(STEPS) else []
                yield [*about, *ending]
            if reply and not steps:
                yield [reply]


def _about_the_steps(
    candidate: Candidate, language: str, findings: StepFindings | None
) -> list[Answered]:
    """Return the step questions of a turn with their verdicts, up to the first missing verdict."""
    if candidate.steps is None or candidate.turn is None:
        return []
    reading = read(candidate.turn)
    if not reading.is_complete:
        return []
    answered: list[Answered] = []
    for step, is_right in zip(reading.turn.reasoning, candidate.steps, strict=True):
        if is_right is None:
            break
        found = findings.of(step) if findings else ""
        question = ask_about_step(step, language, findings=found).text
        answered.append(Answered(part_of(step), question, VERDICTS[0 if is_right else 1]))
    return answered


def _about_the_reply(record: CerRecord, language: str) -> Answered | None:
    if record.preference is None or record.second is None:
        return None
    question = ask_about_replies(record.first.reply, record.second.reply, language)
    verdict = PREFERENCES[list(Preference).index(record.preference)]
    return Answered(Part.REPLY, question.text, verdict)


def _conversation(opening: Sequence[Message], asked: Sequence[Answered]) -> tuple[Message, ...]:
    messages = list(opening)
    for number, (_, question, verdict) in enumerate(asked):
        if number == 0:  # the first question joins the message with the history
            last = messages.pop()
            messages.append(Message("user", (*last.content, question)))
        else:
            messages.append(Message("user", (question,)))
        messages.append(Message("assistant", (verdict,)))
    return tuple(messages)
