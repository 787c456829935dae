"""Annotations: one person's answers about one supporter turn, and their files.

An annotator sees an `AnnotationItem`: a history, the three reasoning steps of a turn, and two replies in
random order, without their authors; steps or replies may be missing. The answers are an `Annotation`: whether
each step is right, and which reply is better. Each of these four questions may be left open.

Files are JSON lines for programs or CSV for spreadsheets. Reading returns exactly what was written. In CSV,
a text that a spreadsheet would run as a formula gets an apostrophe in front (``=1+1`` becomes ``'=1+1``),
which is removed on reading. CSV may use commas, semicolons (Excel where the comma is the decimal point) or
tabs, with or without a byte order mark.

A file has a row for each revision; the latest one of each person counts (`opinions`).
"""

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

from pydantic import Field, ValidationError, model_validator

from compeer_core.annotation.agreement import (
    Agreement,
    Consensus,
    Unsettled,
    adjudicate,
    measure_agreement,
)
from compeer_core.cer import (
    Candidate,
    Case,
    CaseUtterance,
    CerRecord,
    DecidedBy,
    StepLabels,
)
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS, Part, SupportTurn, read, render_step
from compeer_core.row_files import UtcDatetime, guarded, opened, replacing, unguarded, write_lines
from compeer_core.taxonomy import Preference

MAX_NOTE_CHARACTERS = 10_000
Answer = bool | Preference

QUESTIONS: Mapping[Part, tuple[Answer, ...]] = MappingProxyType(
    dict.fromkeys(STEPS, (True, False)) | {Part.REPLY: tuple(Preference)}
)
"""The four questions with their possible answers; that of the reply is the preference."""


class Annotation(FrozenModel):
    """The answers of one person about one item, at one time."""

    item_id: str = Field(min_length=1)
    annotator: str = Field(min_length=1)
    """A pseudonym."""
    steps: StepLabels = (None, None, None)
    """Whether the history, emotion and strategy steps are right; None if left open."""
    preference: Preference | None = None
    """In the order in which this person saw the replies; None if left open."""
    shown_first: Literal["first", "second"] = "first"
    """Which of the item's two replies was shown first to this person."""
    confidence: int | None = Field(default=None, ge=1, le=5)
    """From 1, a guess, to 5, certain."""
    note: str = Field(default="", max_length=MAX_NOTE_CHARACTERS)
    seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Working time."""
    date: UtcDatetime

    def answer(self, question: Part) -> Answer | None:
        """Return the answer to a question, None if it was left open.

        The preference refers to the item's own order of replies.
        """
        if question is not Part.REPLY:
            return self.steps[STEPS.index(question)]
        if self.preference is None or self.shown_first == "first":
            return self.preference
        return self.preference.swapped()


class AnnotationItem(FrozenModel):
    """What an annotator sees. The authors are in a separate file (`ItemKey`)."""

    id: str
    language: str
    """ISO 639-1."""
    history: tuple[CaseUtterance, ...] = Field(min_length=1)
    steps: tuple[str, str, str] | None
    """The reasoning with its labels, without tags; None if only the replies are compared."""
    replies: tuple[str, str] | None
    """In random order; None if there is only one reply."""

    @model_validator(mode="after")
    def _asks_something(self) -> "AnnotationItem":
        if self.steps is None and self.replies is None:
            raise ValueError(f"item {self.id}: has neither steps nor replies to judge")
        return self

    @property
    def questions(self) -> tuple[Part, ...]:
        """The questions that the item asks."""
        steps = () if self.steps is None else STEPS
        return steps if self.replies is None else (*steps, Part.REPLY)

    @classmethod
    def of(
        cls,
        item_id: str,
        case: Case,
        turn: SupportTurn,
        replies: tuple[str, str] | None,
    ) -> "AnnotationItem":
        """Return the item of a turn, with the two replies to compare if there are two."""
        reasoning = turn.reasoning
        return cls(
            id=item_id,
            language=case.language,
            history=case.history,
            steps=(
                render_step(reasoning.history),
                render_step(reasoning.emotion),
                render_step(reasoning.strategy),
            ),
            replies=replies,
        )


class ItemKey(FrozenModel):
    """The part of an item that is hidden from annotators."""

    item_id: str
    case: Case
    author: str
    """Author of the turn."""
    turn: str
    """In the output grammar."""
    original: Literal["first", "second"] | None
    """Which of the two replies is from the corpus; None if the turn's is the only one."""

    def record(self) -> CerRecord:
        """Return the unlabelled row of the item, with replies in the item's order.

        Raises:
            CompletionError: The turn is not complete.
        """
        written = Candidate(author=self.author, reply=read(self.turn).turn.reply, turn=self.turn)
        candidates = [written]
        if self.case.original is not None and self.original is not None:
            original = Candidate(author="corpus", reply=self.case.original)
            candidates = [original, written] if self.original == "first" else [written, original]
        return CerRecord(
            id=f"{self.case.id}@{self.item_id}",
            case=self.case,
            first=candidates[0],
            second=candidates[1] if len(candidates) > 1 else None,
        )


# --- Opinions of several people -----------------------------------------------------------------


@dataclass(frozen=True)
class Opinions:
    """The answers of several people to one question about one item."""

    latest: Mapping[str, Answer]
    """The latest answer by annotator, in the order of their first answers."""
    independent: Mapping[str, Answer]
    """The answers of the first two before a third began; agreement is measured on these."""

    @property
    def outcome(self) -> Consensus[Answer] | Unsettled:
        """The settled answer by the paper's rule. Answers after the third are ignored."""
        answers = list(self.latest.values())
        if len(answers) < 2:
            return Unsettled.NEEDS_SECOND
        return adjudicate(answers[0], answers[1], answers[2] if len(answers) > 2 else None)

    @property
    def outcome_of_readers(self) -> Consensus[Answer] | Unsettled:
        """The answer of the model, or of all models, that read the item; dropped where two differ."""
        answers = set(self.latest.values())
        if not answers:
            return Unsettled.NEEDS_FIRST
        if len(answers) > 1:
            return Unsettled.NO_CONSENSUS
        return Consensus(answers.pop(), adjudicated=False)


def opinions(annotations: Iterable[Annotation], question: Part) -> Opinions:
    """Return the answers to a question about one item.

    Of two annotations of one person the later counts as a whole: a question left open there is
    withdrawn. Of equal dates the one that comes later in the argument counts.

    Args:
        annotations: About one item, in any order and with revisions.
        question: The question.
    """
    ordered = sorted(annotations, key=lambda annotation: annotation.date)
    began: dict[str, int] = {}
    latest: dict[str, Answer | None] = {}
    for position, annotation in enumerate(ordered):
        answer = annotation.answer(question)
        latest[annotation.annotator] = answer
        if answer is not None:
            began.setdefault(annotation.annotator, position)
    standing = {name: answer for name in began if (answer := latest[name]) is not None}
    people = list(standing)
    before_third = ordered[: began[people[2]]] if len(people) > 2 else ordered
    early = {each.annotator: each.answer(question) for each in before_third}
    independent = {name: answer for name in people[:2] if (answer := early.get(name)) is not None}
    return Opinions(MappingProxyType(standing), MappingProxyType(independent))


def by_item(annotations: Iterable[Annotation]) -> dict[str, list[Annotation]]:
    """Group annotations by item, in order of first appearance."""
    items: dict[str, list[Annotation]] = {}
    for annotation in annotations:
        items.setdefault(annotation.item_id, []).append(annotation)
    return items


def labelled(
    record: CerRecord, answers: Mapping[Part, Opinions], *, by_models: bool = False
) -> CerRecord | None:
    """Return a row with the settled labels; None if no question is settled.

    Each question is settled independently: a row may have two steps and no preference.

    Args:
        record: The unlabelled row, with replies in the item's order. The steps are those of the first
            reply that has a turn.
        answers: By question, without those that were not asked.
        by_models: The annotators are models (`Opinions.outcome_of_readers`), not people.
    """
    outcomes = {
        part: each.outcome_of_readers if by_models else each.outcome
        for part, each in answers.items()
    }
    settled = {part: each for part, each in outcomes.items() if isinstance(each, Consensus)}
    if not settled:
        return None

    def deciders(parts: Iterable[Part]) -> DecidedBy:
        names = {
            name
            for part in parts
            for name, answer in list(answers[part].latest.items())[:3]
            if answer == settled[part].label
        }
        return DecidedBy(kind="model" if by_models else "people", name=", ".join(sorted(names)))

    fields: dict[str, object] = {name: getattr(record, name) for name in CerRecord.model_fields}
    if Part.REPLY in settled:
        fields["preference"] = settled[Part.REPLY].label
        fields["preference_by"] = deciders([Part.REPLY])
    steps = [part for part in STEPS if part in settled]
    if steps:
        judged = "first" if record.first.turn is not None else "second"
        fields[judged] = Candidate.model_validate(
            getattr(record, judged).model_dump()
            | {
                "steps": tuple(settled[part].label if part in settled else None for part in STEPS),
                "steps_by": deciders(steps),
            }
        )
    # unlike model_copy, this validates the combination
    return CerRecord.model_validate(fields)


def agreement(annotations: Iterable[Annotation], *, seed: int = 0) -> Mapping[Part, Agreement]:
    """Return how far the first two annotators of each item agree, by question.

    Adjudication does not count: see `Opinions.independent`.

    Args:
        annotations: About any number of items, in any order.
        seed: Of the bootstrap.
    """
    items = by_item(annotations).values()
    return MappingProxyType(
        {
            question: measure_agreement(
                [opinions(item, question).independent for item in items], answers, seed=seed
            )
            for question, answers in QUESTIONS.items()
        }
    )


def pair_agreement(
    annotations: Iterable[Annotation], *, seed: int = 0
) -> Mapping[tuple[str, str], Mapping[Part, Agreement]]:
    """Return how far each two people agree on the items that both answered independently.

    Args:
        annotations: About any number of items, in any order.
        seed: Of the bootstrap.
    """
    ratings: dict[tuple[str, str], dict[Part, list[Mapping[str, Answer]]]] = {}
    for item in by_item(annotations).values():
        for question in QUESTIONS:
            answers = opinions(item, question).independent
            if len(answers) == 2:
                first, second = sorted(answers)
                of_pair = ratings.setdefault((first, second), {each: [] for each in QUESTIONS})
                of_pair[question].append(answers)
    return MappingProxyType(
        {
            pair: {
                question: measure_agreement(of_pair[question], answers, seed=seed)
                for question, answers in QUESTIONS.items()
            }
            for pair, of_pair in sorted(ratings.items())
        }
    )


# --- Files --------------------------------------------------------------------------------------

_NUMBER = re.compile(r"\d+,\d+")


def write_annotations(path: Path, annotations: Iterable[Annotation]) -> int:
    """Replace a .csv or .jsonl file; return the number of rows.

    CSV begins with a byte order mark, without which Excel does not detect UTF-8.

    Raises:
        ConfigError: The name has another suffix.
    """
    is_csv = _is_csv(path)
    with replacing(path, "utf-8-sig" if is_csv else "utf-8") as file:
        return write_csv(file, annotations) if is_csv else write_lines(file, annotations)


def read_annotations(path: Path) -> Iterator[Annotation]:
    """Yield the annotations of a .csv or .jsonl file, which may be gzipped (.gz).

    Raises:
        ConfigError: The file cannot be read, or a value is invalid: the sentence names file, row,
            column, the value and the allowed ones.
    """
    for _, annotation in placed_annotations(path):
        yield annotation


def placed_annotations(path: Path) -> Iterator[tuple[str, Annotation]]:
    """Yield the place of each row, as errors name it, and its annotation; see `read_annotations`."""
    is_csv = _is_csv(path.with_suffix("") if path.suffix == ".gz" else path)
    with opened(path) as file:
        if is_csv:
            yield from _placed_csv(file, str(path))
            return
        for row, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, row {row}"
                yield where, parse_annotation(where, line)


def write_csv(file: IO[str], annotations: Iterable[Annotation]) -> int:
    """Write CSV into a file opened with ``newline=""``; return the number of rows."""
    writer = csv.writer(file)
    writer.writerow(_COLUMNS)
    count = 0
    for annotation in annotations:
        writer.writerow([column.write(annotation) for column in _COLUMNS.values()])
        count += 1
    return count


def _placed_csv(file: Iterable[str], name: str) -> Iterator[tuple[str, Annotation]]:
    lines = iter(file)
    header = next(lines, "")
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)
    row = 1
    try:
        names = [cell.strip() for cell in next(reader, [])]
        _check_columns(names, name)
        for row, cells in enumerate(reader, start=2):
            if any(cells):
                where = f"{name}, row {row}"
                yield where, _from_cells(cells, names, delimiter, where)
    except csv.Error as error:
        raise ConfigError(f"{name}, after row {row}: is not CSV: {error}") from error


def parse_annotation(where: str, line: str) -> Annotation:
    """Return the annotation of a line of JSON.

    Raises:
        ConfigError: As for `read_annotations`; `where` is the place.
    """
    try:
        return Annotation.model_validate_json(line)
    except ValidationError as error:
        raise ConfigError(_explained(where, error)) from error


def _is_csv(path: Path) -> bool:
    if path.suffix not in {".csv", ".jsonl"}:
        raise ConfigError(
            f"{path}: annotations are stored as .csv or .jsonl, not {path.suffix or path}"
        )
    return path.suffix == ".csv"


# --- Columns and values --------------------------------------------------------------------------


def _shown(value: object) -> str:
    return "" if value is None else str(value)


@dataclass(frozen=True)
class _Column:
    write: Callable[[Annotation], str]
    allowed: str
    is_text: bool = False


def _step_column(position: int) -> _Column:
    return _Column(lambda a: _shown(a.steps[position]), "True, False or nothing")


_COLUMNS: Mapping[str, _Column] = MappingProxyType(
    {
        "item_id": _Column(lambda a: guarded(a.item_id), "a text that is not empty", True),
        "annotator": _Column(lambda a: guarded(a.annotator), "a text that is not empty", True),
        **{part.value: _step_column(position) for position, part in enumerate(STEPS)},
        "preference": _Column(
            lambda a: _shown(a.preference), f"{', '.join(Preference)} or nothing"
        ),
        "shown_first": _Column(lambda a: a.shown_first, "first or second"),
        "confidence": _Column(
            lambda a: _shown(a.confidence), "a whole number from 1 to 5, or nothing"
        ),
        "note": _Column(
            lambda a: guarded(a.note), f"a text of at most {MAX_NOTE_CHARACTERS} characters", True
        ),
        "seconds": _Column(lambda a: _shown(a.seconds), "a number from 0 up, or nothing"),
        "date": _Column(
            lambda a: a.date.isoformat(), "a date with time and zone, as in 2026-11-21T12:00:00Z"
        ),
    }
)
_STEP_COLUMNS = tuple(part.value for part in STEPS)
_JSON_ALLOWED = {
    **{name: column.allowed for name, column in _COLUMNS.items() if name not in _STEP_COLUMNS},
    "steps": "a list of three, each true, false or null",
}


def _check_columns(names: Sequence[str], where: str) -> None:
    if not any(names):
        raise ConfigError(f"{where}: has no row of column names")
    for name in names:
        if name not in _COLUMNS:
            raise ConfigError(_unknown(f"{where}, row 1", name, list(_COLUMNS)))
        if names.count(name) > 1:
            raise ConfigError(f"{where}, row 1: the column {name} is there twice")
    for name in ("item_id", "annotator", "date"):
        if name not in names:
            raise ConfigError(
                f"{where}, row 1: has no column {name}, got {', '.join(names)}; it is needed"
            )


def _unknown(where: str, name: str, known: Sequence[str]) -> str:
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"{where}: unknown column {_short(name)}{hint}, allowed: {', '.join(known)}"


def _from_cells(
    cells: Sequence[str], names: Sequence[str], delimiter: str, where: str
) -> Annotation:
    if len(cells) != len(names):
        raise ConfigError(
            f"{where}: got {len(cells)} cells, allowed: {len(names)}, one for each column"
        )
    by_name = dict(zip(names, cells, strict=True))
    values: dict[str, object] = {}
    for name, cell in by_name.items():
        text = unguarded(cell) if _COLUMNS[name].is_text else cell.strip()
        if name == "seconds" and delimiter != "," and _NUMBER.fullmatch(text):
            text = text.replace(",", ".")
        if name in {"preference", "shown_first", *_STEP_COLUMNS}:
            text = text.lower()  # spreadsheets write TRUE
        if text:
            values[name] = text
    values["steps"] = tuple(values.pop(name, None) for name in _STEP_COLUMNS)
    try:
        return Annotation.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explained(where, error, by_name)) from error


def _explained(where: str, error: ValidationError, cells: Mapping[str, str] | None = None) -> str:
    """Return one sentence about the first problem."""
    detail = error.errors()[0]
    location = detail["loc"]
    if not location:
        return f"{where}: is no annotation: {detail['msg']}"
    name = str(location[0])
    if detail["type"] == "extra_forbidden":
        return _unknown(where, name, list(_JSON_ALLOWED))
    if name == "steps" and cells is not None:
        name = _STEP_COLUMNS[int(location[1])]
    allowed = _COLUMNS[name].allowed if cells is not None else _JSON_ALLOWED[name]
    if cells is not None:
        got = _short(cells[name])
    else:
        got = "nothing" if detail["type"] == "missing" else _short(detail["input"])
    return f"{where}, column {name}: got {got}, allowed: {allowed}"


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
