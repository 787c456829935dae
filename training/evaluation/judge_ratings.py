"""Judges' verdicts on CER rows, stored with the labels as JSON lines.

As in the demo, the turn with reasoning is the candidate and the other reply the reference, in both
orders. Labels are oriented the same way: `first` always means the candidate.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compeer_core.cer import CerRecord, DecidedBy, StepLabels
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import Judgement, ResponseVerdict, StepVerdict, Turn
from training.common.progress import track
from training.data.pictures import Pictures
from training.data.records import read_records


class Rated(FrozenModel):
    """The labels of a row, and the verdicts of one judge."""

    id: str
    group: str
    """The source dialogue: rows of the same dialogue are not independent."""
    corpus: str
    decided_by: str
    """Source of the step labels, or of the preference if there are none."""
    steps: StepLabels
    step_probabilities: tuple[float | None, float | None, float | None]
    """Probabilities of True; None if the step has no label or is unscorable."""
    preference: Preference | None
    """The label; `first` is the candidate."""
    verdict: Preference | None
    """The judge's preference."""
    preference_probabilities: tuple[float, float, float, float] | None
    """In the order of `Preference`."""
    unscorable: int
    """Number of labelled questions without a verdict."""


class RatingJudge(Protocol):
    """What a judge must be able to do to be rated."""

    name: str

    def judge(
        self, dialogue: Dialogue, turns: Sequence[Turn], references: Sequence[str | None]
    ) -> list[Judgement]:
        """See `compeer_core.unifireward.Judge.judge`."""
        ...


def rate(judge: RatingJudge, records: Iterable[CerRecord], pictures: Pictures) -> Iterator[Rated]:
    """Yield the ratings of records, in order."""
    for record in records:
        yield _rate_record(judge, record, pictures)


def rate_file(
    judge: RatingJudge, records: Iterable[CerRecord], total: int, pictures: Pictures, path: Path
) -> list[Rated]:
    """Rate all records and store the ratings in a file; an existing file is read instead.

    Raises:
        ConfigError: The existing file contains something else.
    """
    if not path.exists():
        ratings = track(rate(judge, records, pictures), f"{judge.name} rates", total=total)
        write_rows(path, ratings)
    return list(read_records(path, Rated))


@dataclass(frozen=True)
class JudgedTurn:
    """The turn of a row that is judged, and its labels."""

    turn: str
    """With reasoning if its steps have labels, otherwise the reply."""
    reply: str
    reference: str | None
    """The other reply; None if there is no preference."""
    steps: StepLabels
    preference: Preference | None
    """`first` is the judged turn."""
    decided_by: DecidedBy | None
    """Source of the step labels, or of the preference if there are none."""


def judged_turn(record: CerRecord) -> JudgedTurn:
    """Return the turn with reasoning, or the first reply if neither turn has any."""
    second_has_steps = record.second is not None and record.second.steps is not None
    is_second = second_has_steps and record.first.steps is None
    candidate = record.second if is_second and record.second is not None else record.first
    other = record.first if is_second else record.second
    has_steps = candidate.steps is not None and candidate.turn is not None
    preference = record.preference
    if preference is not None and is_second:
        preference = preference.swapped()
    return JudgedTurn(
        turn=candidate.turn if has_steps and candidate.turn is not None else candidate.reply,
        reply=candidate.reply,
        reference=other.reply if other is not None and preference is not None else None,
        steps=candidate.steps or (None, None, None),
        preference=preference,
        decided_by=candidate.steps_by or record.preference_by,
    )


def _rate_record(judge: RatingJudge, record: CerRecord, pictures: Pictures) -> Rated:
    judged = judged_turn(record)
    dialogue = record.case.dialogue(pictures.shown(record.case.history))
    judgement = judge.judge(dialogue, [judged.turn], [judged.reference])[0]
    probabilities = _step_probabilities(judged.steps, judgement)
    response = judgement.response
    verdict = response if isinstance(response, ResponseVerdict) else None
    unscorable = sum(
        label is not None and probability is None
        for label, probability in zip(judged.steps, probabilities, strict=True)
    )
    by = judged.decided_by
    return Rated(
        id=record.id,
        group=record.case.source_id,
        corpus=record.case.corpus,
        decided_by="" if by is None else f"{by.kind}: {by.name}",
        steps=judged.steps,
        step_probabilities=probabilities,
        preference=judged.preference,
        verdict=None if verdict is None else verdict.preference,
        preference_probabilities=None if verdict is None else _preference_probabilities(verdict),
        unscorable=unscorable + (judged.preference is not None and verdict is None),
    )


def _step_probabilities(
    steps: StepLabels, judgement: Judgement
) -> tuple[float | None, float | None, float | None]:
    outcomes = judgement.steps or (None, None, None)
    first, second, third = (
        outcome.probability_correct
        if isinstance(outcome, StepVerdict) and label is not None
        else None
        for label, outcome in zip(steps, outcomes, strict=True)
    )
    return first, second, third


def _preference_probabilities(verdict: ResponseVerdict) -> tuple[float, float, float, float]:
    first, second, both, neither = (verdict.probabilities[name] for name in Preference)
    return first, second, both, neither
