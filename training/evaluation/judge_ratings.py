"""Judges' verdicts on CER rows, stored with the labels as JSON lines.

As in the demo, the turn with reasoning is the candidate and the other reply the reference, in both
orders. Labels are oriented the same way: `first` always means the candidate.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from compeer_core.cer import CerRecord, StepLabels
from compeer_core.config import FrozenModel
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import Judge, Judgement, ResponseVerdict, StepVerdict
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


def rate(judge: Judge, records: Iterable[CerRecord], pictures: Pictures) -> Iterator[Rated]:
    """Yield the ratings of records, in order."""
    for record in records:
        yield _rate_record(judge, record, pictures)


def rate_file(
    judge: Judge, records: Iterable[CerRecord], total: int, pictures: Pictures, path: Path
) -> list[Rated]:
    """Rate all records and store the ratings in a file; an existing file is read instead.

    Raises:
        ConfigError: The existing file contains something else.
    """
    if not path.exists():
        ratings = track(rate(judge, records, pictures), f"{judge.name} rates", total=total)
        write_rows(path, ratings)
    return list(read_records(path, Rated))


def _rate_record(judge: Judge, record: CerRecord, pictures: Pictures) -> Rated:
    second_has_steps = record.second is not None and record.second.steps is not None
    is_second = second_has_steps and record.first.steps is None
    candidate = record.second if is_second and record.second is not None else record.first
    other = record.first if is_second else record.second
    reference = other.reply if other is not None and record.preference is not None else None
    has_steps = candidate.steps is not None and candidate.turn is not None
    turn = candidate.turn if has_steps and candidate.turn is not None else candidate.reply
    dialogue = record.case.dialogue(pictures.shown(record.case.history))
    judgement = judge.judge(dialogue, [turn], [reference])[0]
    label = record.preference
    if label is not None and is_second:
        label = label.swapped()
    steps: StepLabels = candidate.steps or (None, None, None)
    probabilities = _step_probabilities(steps, judgement)
    response = judgement.response
    verdict = response if isinstance(response, ResponseVerdict) else None
    unscorable = sum(
        label is not None and probability is None
        for label, probability in zip(steps, probabilities, strict=True)
    )
    by = candidate.steps_by or record.preference_by
    return Rated(
        id=record.id,
        group=record.case.source_id,
        corpus=record.case.corpus,
        decided_by="" if by is None else f"{by.kind}: {by.name}",
        steps=steps,
        step_probabilities=probabilities,
        preference=label,
        verdict=None if verdict is None else verdict.preference,
        preference_probabilities=None if verdict is None else _preference_probabilities(verdict),
        unscorable=unscorable + (label is not None and verdict is None),
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
