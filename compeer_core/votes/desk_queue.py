"""What the annotation desk reads out of its tables: answers, and which items wait for whom.

An answer in which no question is answered takes back what the person said before: they have not
answered then, as far as the queue goes.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from compeer_core.votes.agreement import Unsettled
from compeer_core.votes.annotations import QUESTIONS, Annotation, opinions
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
        self._given: dict[str, list[AssignmentRow]] = {}
        held = now - timedelta(hours=ASSIGNED_HOURS)
        self._ended: set[tuple[int, str]] = set()
        for row in session.scalars(select(AssignmentRow).order_by(AssignmentRow.assigned_at)):
            self._given.setdefault(row.item_id, []).append(row)
            if max(row.assigned_at, row.saved_at or row.assigned_at) < held:
                self._ended.add((row.annotator_id, row.item_id))
        self.said: dict[str, list[Annotation]] = {}
        for annotation in said(session):
            self.said.setdefault(annotation.item_id, []).append(annotation)
        self.answered = {item: standing(of_item) for item, of_item in self.said.items()}
        self._names = {row.id: row.name for row in session.scalars(select(AnnotatorRow))}

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
        return len(self.answered.get(item, ())) >= 2 and any(
            opinions(self.said[item], part).outcome is Unsettled.NEEDS_THIRD for part in QUESTIONS
        )

    def _is_given(self, item: str, person: int) -> bool:
        return any(row.annotator_id == person for row in self._given.get(item, ()))

    def _is_open(self, item: str, name: str, person: int, conflicts: bool) -> bool:
        answered = self.answered.get(item, ())
        if name in answered:
            return False
        is_conflict = len(answered) >= 2
        if is_conflict != conflicts or (is_conflict and not self.needs_third(item)):
            return False
        others = {
            self._names[row.annotator_id]
            for row in self._given.get(item, ())
            if row.annotator_id != person and (row.annotator_id, item) not in self._ended
        }
        return len({*answered, *others}) < (3 if conflicts else 2)


def standing(annotations: list[Annotation]) -> tuple[str, ...]:
    """Return whose answer about one item stands, in the order in which they first answered."""
    latest = {each.annotator: each for each in annotations}
    return tuple(name for name, each in latest.items() if not is_empty(each))


def is_empty(annotation: Annotation) -> bool:
    """Whether an answer answers nothing, and so takes back the one before."""
    return all(annotation.answer(question) is None for question in QUESTIONS)


def said(session: Session, item_id: str | None = None) -> Iterator[Annotation]:
    """Yield all answers, or those about one item, in the order in which they were given."""
    query = select(AnswerRow, AnnotatorRow.name).join(
        AnnotatorRow, AnnotatorRow.id == AnswerRow.annotator_id
    )
    if item_id is not None:
        query = query.where(AnswerRow.item_id == item_id)
    for row, name in session.execute(query.order_by(AnswerRow.at, AnswerRow.id)):
        yield annotation_of(row, name)


def annotation_of(row: AnswerRow, name: str) -> Annotation:
    """Return an answer as the rest of the program knows it."""
    return Annotation.model_validate(
        {
            "item_id": row.item_id,
            "annotator": name,
            "steps": tuple(row.steps),
            "preference": row.preference,
            "shown_first": row.shown_first,
            "confidence": row.confidence,
            "note": row.note,
            "seconds": row.seconds,
            "date": row.at,
        }
    )
