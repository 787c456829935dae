"""Annotations: what one person said about one supporter turn, and how it is kept in files.

An annotator sees an `AnnotationItem`: a history, the three reasoning steps of a turn, and two
replies in an order that was drawn. Neither says who wrote what, so that annotators stay blind. What
they answer is an `Annotation`: whether each step is right, and which reply is better. Each of these
four questions can be left open.

Annotations are kept as JSON lines, for programs, or as CSV, for spreadsheets. Both forms give back
exactly what was written. In CSV a text that a spreadsheet would run as a formula gets an apostrophe
in front (``=1+1`` is written as ``'=1+1``), which is taken away again when it is read. CSV is read
with commas, semicolons (Excel where the comma is the decimal point) or tabs, with a byte order mark
or without.

People revise. The file has one row for each time that somebody answered; of each person the latest
row counts (`opinions`).
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

from pydantic import Field, ValidationError

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
from compeer_core.row_files import UtcDatetime, guarded, unguarded
from compeer_core.taxonomy import Preference

MAX_NOTE_CHARACTERS = 10_000
Answer = bool | Preference

QUESTIONS: Mapping[Part, tuple[Answer, ...]] = MappingProxyType(
    dict.fromkeys(STEPS, (True, False)) | {Part.REPLY: tuple(Preference)}
)
"""The four questions, each with the answers it can have. That of the reply is the preference."""


class Annotation(FrozenModel):
    """What one person answered about one item, at one time."""

    item_id: str = Field(min_length=1)
    annotator: str = Field(min_length=1)
    """A pseudonym."""
    steps: StepLabels = (None, None, None)
    """Whether the history, the emotion and the strategy step are right; None was left open."""
    preference: Preference | None = None
    """About the two replies as this person saw them; None was left open."""
    shown_first: Literal["first", "second"] = "first"
    """Which of the item's two replies stood first before this person's eyes."""
    confidence: int | None = Field(default=None, ge=1, le=5)
    """From 1, a guess, to 5, certain."""
    note: str = Field(default="", max_length=MAX_NOTE_CHARACTERS)
    seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How long the person took."""
    date: UtcDatetime
    """In UTC, whatever the zone it was given in."""

    def answer(self, question: Part) -> Answer | None:
        """Return what was answered, None where the question was left open.

        The preference is turned into the item's own order of replies.
        """
        if question is not Part.REPLY:
            return self.steps[STEPS.index(question)]
        if self.preference is None or self.shown_first == "first":
            return self.preference
        return self.preference.swapped()


class AnnotationItem(FrozenModel):
    """What an annotator is shown. Who wrote what is in a file of its own."""

    id: str
    language: str
    """ISO 639-1."""
    history: tuple[CaseUtterance, ...] = Field(min_length=1)
    steps: tuple[str, str, str]
    """The reasoning as it was written, labels included, without tags."""
    replies: tuple[str, str] | None
    """In an order that was drawn; None where there is only one reply, and nothing to prefer."""

    @classmethod
    def of(
        cls,
        item_id: str,
        case: Case,
        turn: SupportTurn,
        replies: tuple[str, str] | None,
    ) -> "AnnotationItem":
        """Return what is shown of a turn and the two replies that are compared, if there are two."""
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
    """What an annotator must not see of an item."""

    item_id: str
    case: Case
    author: str
    """Who wrote the turn."""
    turn: str
    """In the output grammar."""
    original: Literal["first", "second"] | None
    """Which of the two replies is the corpus's; None where there is only the turn's."""

    def record(self) -> CerRecord:
        """Return the row of the item, its replies in the item's order, without labels.

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


# --- What several people said ------------------------------------------------------------------


@dataclass(frozen=True)
class Opinions:
    """What people said about one question of one item."""

    latest: Mapping[str, Answer]
    """The answer that counts, by annotator, in the order in which they first answered."""
    independent: Mapping[str, Answer]
    """What the first two said before a third was asked: agreement is measured on this."""

    @property
    def outcome(self) -> Consensus[Answer] | Unsettled:
        """The answer by the paper's rule. People after the third are not asked for."""
        answers = list(self.latest.values())
        if len(answers) < 2:
            return Unsettled.NEEDS_SECOND
        return adjudicate(answers[0], answers[1], answers[2] if len(answers) > 2 else None)


def opinions(annotations: Iterable[Annotation], question: Part) -> Opinions:
    """Return what people said about one item, in any order and with revisions.

    Of two annotations of one person the later counts, as a whole: a question left open there is
    withdrawn. Of equal dates the one that comes later here counts.
    """
    ordered = sorted(annotations, key=lambda annotation: annotation.date)
    began: dict[str, int] = {}
    latest: dict[str, Answer | None] = {}
    for position, annotation in enumerate(ordered):
        answer = annotation.answer(question)
        latest[annotation.annotator] = answer
        if answer is not None:
            began.setdefault(annotation.annotator, position)
    counting = {name: answer for name in began if (answer := latest[name]) is not None}
    people = list(counting)
    before = ordered[: began[people[2]]] if len(people) > 2 else ordered
    said = {a.annotator: a.answer(question) for a in before}
    independent = {name: answer for name in people[:2] if (answer := said.get(name)) is not None}
    return Opinions(MappingProxyType(counting), MappingProxyType(independent))


def by_item(annotations: Iterable[Annotation]) -> dict[str, list[Annotation]]:
    """Return the annotations of each item, in the order in which items first come."""
    items: dict[str, list[Annotation]] = {}
    for annotation in annotations:
        items.setdefault(annotation.item_id, []).append(annotation)
    return items


def labelled(record: CerRecord, said: Mapping[Part, Opinions]) -> CerRecord | None:
    """Return a row with what people agree on; None where they agree on nothing.

    Each question is settled for itself: a row may have two steps and no preference.

    Args:
        record: The row without labels, its replies in the item's order. The steps are of the first
            of them that has a turn.
        said: What people said, by question; one that was not asked is left out.
    """
    settled = {
        part: outcome
        for part, each in said.items()
        if isinstance(outcome := each.outcome, Consensus)
    }
    if not settled:
        return None

    def people(parts: Iterable[Part]) -> DecidedBy:
        names = {
            name
            for part in parts
            for name, answer in list(said[part].latest.items())[:3]
            if answer == settled[part].label
        }
        return DecidedBy(kind="people", name=", ".join(sorted(names)))

    fields: dict[str, object] = {name: getattr(record, name) for name in CerRecord.model_fields}
    if Part.REPLY in settled:
        fields["preference"] = settled[Part.REPLY].label
        fields["preference_by"] = people([Part.REPLY])
    steps = [part for part in STEPS if part in settled]
    if steps:
        judged = "first" if record.first.turn is not None else "second"
        fields[judged] = Candidate.model_validate(
            getattr(record, judged).model_dump()
            | {
                "steps": tuple(settled[part].label if part in settled else None for part in STEPS),
                "steps_by": people(steps),
            }
        )
    # model_copy would not look whether the parts fit
    return CerRecord.model_validate(fields)


def agreement(annotations: Iterable[Annotation], *, seed: int = 0) -> Mapping[Part, Agreement]:
    """Return how well the first two annotators of each item agree, question by question.

    Nobody's adjudication is in it: see `Opinions.independent`.

    Args:
        annotations: Of any number of items, in any order.
        seed: Of the bootstraps.
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
    """Return how well each two people agree on the items that both answered on their own.

    Args:
        annotations: Of any number of items, in any order.
        seed: Of the bootstraps.
    """
    ratings: dict[tuple[str, str], dict[Part, list[Mapping[str, Answer]]]] = {}
    for item in by_item(annotations).values():
        for question in QUESTIONS:
            said = opinions(item, question).independent
            if len(said) == 2:
                one, other = sorted(said)
                of_pair = ratings.setdefault((one, other), {each: [] for each in QUESTIONS})
                of_pair[question].append(said)
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
    """Write a .csv or .jsonl file under a temporary name, then rename; return the number of rows.

    CSV begins with a byte order mark, without which Excel takes UTF-8 for something else.

    Raises:
        ConfigError: The name ends in neither.
    """
    encoding, write, _ = _form(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding=encoding, newline="") as file:
        count = write(file, annotations)
    fresh.replace(path)
    return count


def read_annotations(path: Path) -> Iterator[Annotation]:
    """Yield the annotations of a .csv or .jsonl file.

    Raises:
        ConfigError: The file cannot be read, or one of its values is none: the sentence names file,
            row, column, what was found and what is allowed.
    """
    _, _, read = _form(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from read(file, str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (save it as 'CSV UTF-8')") from error


def write_csv(file: IO[str], annotations: Iterable[Annotation]) -> int:
    """Write CSV into a file opened with ``newline=""``; return the number of rows."""
    writer = csv.writer(file)
    writer.writerow(_COLUMNS)
    count = 0
    for annotation in annotations:
        writer.writerow([column.write(annotation) for column in _COLUMNS.values()])
        count += 1
    return count


def read_csv(file: Iterable[str], name: str) -> Iterator[Annotation]:
    """Yield the rows of a CSV; `name` is what messages call it. Empty rows are passed over.

    Raises:
        ConfigError: As for `read_annotations`. Rows are counted as a spreadsheet does.
    """
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
                yield _from_cells(cells, names, delimiter, f"{name}, row {row}")
    except csv.Error as error:
        raise ConfigError(f"{name}, after row {row}: is no CSV: {error}") from error


def write_jsonl(file: IO[str], annotations: Iterable[Annotation]) -> int:
    """Write one JSON object per line; return their number."""
    count = 0
    for annotation in annotations:
        file.write(annotation.model_dump_json() + "\n")
        count += 1
    return count


def read_jsonl(file: Iterable[str], name: str) -> Iterator[Annotation]:
    """Yield what `write_jsonl` wrote; empty lines are passed over.

    Raises:
        ConfigError: As for `read_annotations`.
    """
    for row, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield Annotation.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(_explained(f"{name}, row {row}", error)) from error


def _form(
    path: Path,
) -> tuple[
    str,
    Callable[[IO[str], Iterable[Annotation]], int],
    Callable[[Iterable[str], str], Iterator[Annotation]],
]:
    if path.suffix == ".csv":
        return "utf-8-sig", write_csv, read_csv
    if path.suffix == ".jsonl":
        return "utf-8", write_jsonl, read_jsonl
    raise ConfigError(f"{path}: annotations are kept in .csv or .jsonl, not {path.suffix or path}")


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
    """Return one sentence on the first thing that is wrong."""
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
