"""The queue of the annotation desk: answers, and which items wait for whom, read from the database.

An answer in which every question is open withdraws the person's previous answer: for the queue, they have
not answered.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from compeer_core.annotation.agreement import Unsettled
from compeer_core.annotation.annotations import QUESTIONS, Annotation, by_item, opinions
from compeer_core.taxonomy import Preference
from compeer_core.votes.schema import (
    AnnotatorRow,
    AnswerRow,
    AssignmentRow,
    BatchPersonRow,
    ItemRow,
)

ASSIGNED_HOURS = 24.0
"""How long an unanswered item is reserved for the person it was assigned to."""


class Queue:
    """A snapshot of which items wait for whom.

    Attributes:
        ids: All items, in order.
        batch: The batch of each item.
        wanted: How many independent answers each item needs, 1 or 2.
        members: The annotators of each batch that is not open to everybody.
        answers: All answers by item, including revised and withdrawn ones, in order of time.
        answered: Who has answered each item, in the order of their first answers.
    """

    def __init__(self, session: Session, now: datetime) -> None:
        items = session.execute(
            select(ItemRow.id, ItemRow.batch, ItemRow.people).order_by(ItemRow.position)
        ).all()
        self.ids = [row.id for row in items]
        self.batch = {row.id: row.batch for row in items}
        self.wanted = {row.id: row.people for row in items}
        self.members: dict[str, set[int]] = {}
        for member in session.scalars(select(BatchPersonRow)):
            self.members.setdefault(member.batch, set()).add(member.annotator_id)
        self._assigned: dict[str, list[int]] = {}
        held = now - timedelta(hours=ASSIGNED_HOURS)
        self._expired: set[tuple[int, str]] = set()
        assignments = select(
            AssignmentRow.annotator_id,
            AssignmentRow.item_id,
            AssignmentRow.assigned_at,
            AssignmentRow.saved_at,
        )
        for person, item, assigned_at, saved_at in session.execute(assignments):
            self._assigned.setdefault(item, []).append(person)
            if max(assigned_at, saved_at or assigned_at) < held:
                self._expired.add((person, item))
        self.answers = by_item(answers_of(session))
        self.answered = {item: standing(of_item) for item, of_item in self.answers.items()}
        self._names = {row.id: row.name for row in session.scalars(select(AnnotatorRow))}
        self._thirds: dict[str, bool] = {}

    @property
    def closed(self) -> list[str]:
        """Items with as many independent answers as are wanted."""
        return [item for item in self.ids if len(self.answered.get(item, ())) >= self.wanted[item]]

    @property
    def is_over(self) -> bool:
        """Whether no item waits for anybody."""
        return len(self.closed) == len(self.ids) and not any(map(self.needs_third, self.ids))

    def next_for(self, name: str, person: int, *, conflicts: bool) -> str | None:
        """Return an item that somebody has begun, or else the first one that is open for them."""
        ids = self.open_for(name, person, conflicts=conflicts)
        begun = [item for item in ids if person in self._assigned.get(item, ())]
        return next(iter(begun or ids), None)

    def open_for(self, name: str, person: int, *, conflicts: bool) -> list[str]:
        """Return the items that could be assigned to somebody, in the queue's order."""
        return [item for item in self.ids if self._is_open(item, name, person, conflicts)]

    def needs_third(self, item: str) -> bool:
        """Whether two people have answered an item and differ on a question."""
        if item not in self._thirds:
            self._thirds[item] = len(self.answered.get(item, ())) >= 2 and differ(
                self.answers[item]
            )
        return self._thirds[item]

    def _is_open(self, item: str, name: str, person: int, conflicts: bool) -> bool:
        answered = self.answered.get(item, ())
        if name in answered:
            return False
        is_conflict = len(answered) >= 2
        if is_conflict != conflicts or (is_conflict and not self.needs_third(item)):
            return False
        members = self.members.get(self.batch[item])
        if members is not None and person not in members and not conflicts:
            return False
        others = {
            self._names[other]
            for other in self._assigned.get(item, ())
            if other != person and (other, item) not in self._expired
        }
        return len({*answered, *others}) < (3 if conflicts else self.wanted[item])


def differ(annotations: list[Annotation]) -> bool:
    """Whether two people differ on a question about an item, and no third has decided it."""
    return any(
        opinions(annotations, question).outcome is Unsettled.NEEDS_THIRD
        for question in QUESTIONS
        if len({each.answer(question) for each in annotations}) > 1  # a fast path, since most agree
    )


def standing(annotations: list[Annotation]) -> tuple[str, ...]:
    """Return whose answer about an item stands, in the order of their first answers."""
    latest = {each.annotator: each for each in annotations}
    return tuple(name for name, each in latest.items() if not is_empty(each))


def is_empty(annotation: Annotation) -> bool:
    """Whether every question is open, which withdraws the previous answer."""
    return all(annotation.answer(question) is None for question in QUESTIONS)


def answers_of(session: Session, item_id: str | None = None) -> Iterator[Annotation]:
    """Yield all answers, or those about one item, in order of time."""
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
    """Return the annotation of a row of answers.

    Without validation: it was validated when written, and thousands are read for each assignment.
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
