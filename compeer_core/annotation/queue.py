"""What the annotation desk reads out of its tables: answers, and which items wait for whom.

An answer in which no question is answered takes back what the person said before: they have not
answered then, as far as the queue goes.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from compeer_core.annotation.agreement import Unsettled
from compeer_core.annotation.annotations import QUESTIONS, Annotation, opinions
from compeer_core.taxonomy import Preference
from compeer_core.votes.schema import AnnotatorRow, AnswerRow, AssignmentRow, ItemRow

ASSIGNED_HOURS = 24.0
"""So long an item without an answer waits for whom it was given to."""


class Queue:
    """Which items wait for whom, at one time.

    Attributes:
        ids: All items, in order.
        said: All answers by item, revised and withdrawn ones too, in the order in which they came.
        answered: Who has answered each item, in the order in which they first did.
    """

    def __init__(self, session: Session, now: datetime) -> None:
        self.ids = list(session.scalars(select(ItemRow.id).order_by(ItemRow.position)))
        self._given: dict[str, list[int]] = {}
        held = now - timedelta(hours=ASSIGNED_HOURS)
        self._ended: set[tuple[int, str]] = set()
        given = select(
            AssignmentRow.annotator_id,
            AssignmentRow.item_id,
            AssignmentRow.assigned_at,
            AssignmentRow.saved_at,
        )
        for person, item, assigned_at, saved_at in session.execute(given):
            self._given.setdefault(item, []).append(person)
            if max(assigned_at, saved_at or assigned_at) < held:
                self._ended.add((person, item))
        self.said: dict[str, list[Annotation]] = {}
        for annotation in said(session):
            self.said.setdefault(annotation.item_id, []).append(annotation)
        self.answered = {item: standing(of_item) for item, of_item in self.said.items()}
        self._names = {row.id: row.name for row in session.scalars(select(AnnotatorRow))}
        self._thirds: dict[str, bool] = {}

    @property
    def closed(self) -> list[str]:
        """The items that nobody is asked about on their own any more: two people have answered."""
        return [item for item in self.ids if len(self.answered.get(item, ())) >= 2]

    @property
    def is_over(self) -> bool:
        """Whether nobody is asked about anything any more."""
        return len(self.closed) == len(self.ids) and not any(map(self.needs_third, self.ids))

    def next_for(self, name: str, person: int, *, conflicts: bool) -> str | None:
        """Return what somebody has begun, or else the first item that is open for them."""
        ids = self.open_for(name, person, conflicts=conflicts)
        begun = [item for item in ids if self._is_given(item, person)]
        return next(iter(begun or ids), None)

    def open_for(self, name: str, person: int, *, conflicts: bool) -> list[str]:
        """Return the items that could be given to somebody, in the queue's order."""
        return [item for item in self.ids if self._is_open(item, name, person, conflicts)]

    def needs_third(self, item: str) -> bool:
        """Whether two people have answered an item and differ on a question."""
        if item not in self._thirds:
            self._thirds[item] = len(self.answered.get(item, ())) >= 2 and differ(self.said[item])
        return self._thirds[item]

    def _is_given(self, item: str, person: int) -> bool:
        return person in self._given.get(item, ())

    def _is_open(self, item: str, name: str, person: int, conflicts: bool) -> bool:
        answered = self.answered.get(item, ())
        if name in answered:
            return False
        is_conflict = len(answered) >= 2
        if is_conflict != conflicts or (is_conflict and not self.needs_third(item)):
            return False
        others = {
            self._names[other]
            for other in self._given.get(item, ())
            if other != person and (other, item) not in self._ended
        }
        return len({*answered, *others}) < (3 if conflicts else 2)


def differ(annotations: list[Annotation]) -> bool:
    """Whether people differ on a question about an item, and a third has yet to decide it."""
    return any(
        opinions(annotations, question).outcome is Unsettled.NEEDS_THIRD
        for question in QUESTIONS
        if len({each.answer(question) for each in annotations}) > 1  # most agree, which is quick
    )


def standing(annotations: list[Annotation]) -> tuple[str, ...]:
    """Return whose answer about one item stands, in the order in which they first answered."""
    latest = {each.annotator: each for each in annotations}
    return tuple(name for name, each in latest.items() if not is_empty(each))


def is_empty(annotation: Annotation) -> bool:
    """Whether an answer answers nothing, and so takes back the one before."""
    return all(annotation.answer(question) is None for question in QUESTIONS)


def said(session: Session, item_id: str | None = None) -> Iterator[Annotation]:
    """Yield all answers, or those about one item, in the order in which they were given."""
    query = select(
        AnnotatorRow.name,
        AnswerRow.item_id,
        AnswerRow.at,
        AnswerRow.steps,
        AnswerRow.preference,
        AnswerRow.shown_first,
        AnswerRow.confidence,
        AnswerRow.note,
        AnswerRow.seconds,
    ).join(AnnotatorRow, AnnotatorRow.id == AnswerRow.annotator_id)
    if item_id is not None:
        query = query.where(AnswerRow.item_id == item_id)
    for row in session.execute(query.order_by(AnswerRow.at, AnswerRow.id)):
        yield annotation_of(row, row.name)


def annotation_of(row: "AnswerRow | Row[Any]", name: str) -> Annotation:
    """Return an answer as the rest of the program knows it.

    It was looked at when it was written, and thousands are read for each item that is given out.
    """
    return Annotation.model_construct(
        item_id=row.item_id,
        annotator=name,
        steps=tuple(row.steps),
        preference=None if row.preference is None else Preference(row.preference),
        shown_first="first" if row.shown_first == "first" else "second",
        confidence=row.confidence,
        note=row.note,
        seconds=row.seconds,
        date=row.at,
    )
