"""What only the owner of the annotation desk does: who works on which items, and how far they are.

Items come in batches. For each, the owner chooses who gets it and which share of its items two people
answer (the overlap, on which agreement is measured); one answer is enough for the rest. Whoever may decide
conflicts does so in every batch.

The owner signs in with a token that belongs to the database, so that all processes of a deployment accept it,
also after a restart. Annotators have tokens of their own (`Desk.add_annotator`), which open nothing here.
"""

import base64
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import delete, func, select, update

from compeer_core.annotation.annotations import Annotation
from compeer_core.annotation.queue import Queue
from compeer_core.annotation.readings import ReaderAgreement, draw, reader_agreement
from compeer_core.errors import InputError
from compeer_core.votes.reading import storable
from compeer_core.votes.schema import (
    AnnotatorRow,
    AnswerRow,
    AssignmentRow,
    BatchPersonRow,
    DeletionRow,
    ItemRow,
    PassRow,
    SecretRow,
)
from compeer_core.votes.store import VoteStore

_SECRET = "desk_owner"


@dataclass(frozen=True)
class PersonState:
    """An annotator and their progress."""

    name: str
    may_adjudicate: bool
    revoked: bool
    to_do: int
    """Number of items that can still be assigned to them."""
    drafts: int
    done: int
    conflicts: int
    """Number of items that wait for them as a third person."""


@dataclass(frozen=True)
class BatchState:
    """A batch and its progress."""

    name: str
    """Empty for items that were imported without a name."""
    items: int
    twice: int
    """Number of items that two people answer."""
    closed: int
    """Number of items that need no more independent answers."""
    conflicts: int
    """Number of items that wait for a third person."""
    read: int
    """Number of items that a language model has answered."""
    people: tuple[str, ...]
    """Who gets the items; empty for everybody."""


class DeskOwner:
    """The owner's part of the desk over the database of a store."""

    def __init__(self, store: VoteStore) -> None:
        self._store = store
        self._database = store.database

    # --- sign-in --------------------------------------------------------------------------------

    def token(self) -> str:
        """Return the owner's token: 256 random bits, the same until `renew_token`."""
        return base64.urlsafe_b64encode(self._store.secret(_SECRET)).decode().rstrip("=")

    def knows(self, token: str) -> bool:
        """Whether this is the owner's token."""
        return secrets.compare_digest(token.encode("utf-8", "replace"), self.token().encode())

    def renew_token(self) -> str:
        """Replace the owner's token, end all sessions of the owner, and return the new token."""
        with self._database.writing() as session:
            session.execute(delete(SecretRow).filter_by(name=_SECRET))
            session.execute(delete(PassRow).where(PassRow.annotator_id.is_(None)))
        return self.token()

    # --- progress -------------------------------------------------------------------------------

    def people(self) -> list[PersonState]:
        """Return the annotators in the order of their creation."""
        with self._database.reading() as session:
            queue = Queue(session, self._store.now())
            with_draft = select(AssignmentRow.annotator_id).where(AssignmentRow.draft.is_not(None))
            drafts = Counter(session.scalars(with_draft))
            return [
                PersonState(
                    name=row.name,
                    may_adjudicate=row.may_adjudicate,
                    revoked=row.revoked_at is not None,
                    to_do=len(queue.open_for(row.name, row.id, conflicts=False)),
                    drafts=drafts[row.id],
                    done=sum(row.name in names for names in queue.answered.values()),
                    conflicts=len(queue.open_for(row.name, row.id, conflicts=True))
                    if row.may_adjudicate
                    else 0,
                )
                for row in session.scalars(select(AnnotatorRow).order_by(AnnotatorRow.id))
            ]

    def batches(self) -> list[BatchState]:
        """Return the batches in the order of their first items."""
        with self._database.reading() as session:
            queue = Queue(session, self._store.now())
            names = {row.id: row.name for row in session.scalars(select(AnnotatorRow))}
            read = set(session.scalars(select(ItemRow.id).where(ItemRow.readings.is_not(None))))
            closed = set(queue.closed)
            items: dict[str, list[str]] = {}
            for item in queue.ids:
                items.setdefault(queue.batch[item], []).append(item)
            return [
                BatchState(
                    name=batch,
                    items=len(ids),
                    twice=sum(queue.wanted[item] > 1 for item in ids),
                    closed=len(closed.intersection(ids)),
                    conflicts=sum(map(queue.needs_third, ids)),
                    read=len(read.intersection(ids)),
                    people=tuple(sorted(names[each] for each in queue.members.get(batch, ()))),
                )
                for batch, ids in items.items()
            ]

    # --- batches --------------------------------------------------------------------------------

    def assign(self, batch: str, people: list[str], overlap: float, *, seed: int = 0) -> None:
        """Choose who gets the items of a batch, and the share that two people answer.

        Answers and drafts stay. Items that somebody has begun remain theirs.

        Args:
            batch: The batch.
            people: Names of annotators; empty for everybody.
            overlap: In [0, 1], rounded to whole items, at least one unless it is 0.
            seed: Of the draw of these items.

        Raises:
            InputError: ``batch_unknown``, ``person_unknown``, ``overlap_unusable`` or
                ``overlap_needs_two`` (a single person cannot answer twice).
        """
        if not 0 <= overlap <= 1:
            raise InputError(f"the overlap must be from 0 to 1, got {overlap}", "overlap_unusable")
        if overlap and len(set(people)) == 1:
            raise InputError("one person cannot answer twice", "overlap_needs_two")
        batch = storable(batch)
        with self._database.writing() as session:
            ids = list(
                session.scalars(
                    select(ItemRow.id).filter_by(batch=batch).order_by(ItemRow.position)
                )
            )
            if not ids:
                raise InputError("there is no such batch", "batch_unknown")
            members = session.scalars(
                select(AnnotatorRow).where(AnnotatorRow.name.in_(map(storable, people)))
            ).all()
            if len(members) < len(set(people)):
                raise InputError("there is no such annotator", "person_unknown")
            session.execute(delete(BatchPersonRow).filter_by(batch=batch))
            session.add_all(BatchPersonRow(batch=batch, annotator_id=row.id) for row in members)
            twice = set(draw(ids, ids, overlap, seed)) if overlap else set()
            session.execute(
                update(ItemRow), [{"id": item, "people": 1 + (item in twice)} for item in ids]
            )

    def remove(self, batch: str) -> int:
        """Delete the items of a batch with all drafts and answers; return the number of answers.

        Raises:
            InputError: ``batch_unknown``.
        """
        batch = storable(batch)
        with self._database.writing() as session:
            ids = select(ItemRow.id).filter_by(batch=batch)
            if session.scalar(ids.limit(1)) is None:
                raise InputError("there is no such batch", "batch_unknown")
            answers = select(func.count()).select_from(AnswerRow).where(AnswerRow.item_id.in_(ids))
            count = session.scalar(answers) or 0
            session.execute(delete(ItemRow).filter_by(batch=batch))
            session.execute(delete(BatchPersonRow).filter_by(batch=batch))
            session.add(DeletionRow(at=self._store.now(), battles=0, votes=0, answers=count))
            self._database.erase(session)
        return count

    # --- readers --------------------------------------------------------------------------------

    def readings(self, batch: str | None = None) -> Iterator[Annotation]:
        """Yield the answers of language models, in the order of the items.

        Args:
            batch: Only about items of this batch.
        """
        query = select(ItemRow).where(ItemRow.readings.is_not(None)).order_by(ItemRow.position)
        if batch is not None:
            query = query.filter_by(batch=batch)
        with self._database.reading() as session:
            for row in session.scalars(query):
                for each in row.readings or ():
                    yield Annotation.model_validate(each)

    def reader_agreement(self, batch: str | None = None, *, seed: int = 0) -> ReaderAgreement:
        """Compare people with language models on items that need no more independent answers.

        Args:
            batch: Only on items of this batch.
            seed: Of the bootstrap.
        """
        readings: dict[str, list[Annotation]] = {}
        for each in self.readings(batch):
            readings.setdefault(each.item_id, []).append(each)
        with self._database.reading() as session:
            queue = Queue(session, self._store.now())
        closed = {item: queue.answers[item] for item in queue.closed if item in readings}
        return reader_agreement(
            len(readings), closed, {item: readings[item] for item in closed}, seed=seed
        )
