"""The annotation desk: who annotates what, drafts, answers, and who decides where two differ.

The paper's rule: two people answer on their own, a third decides where they differ. So an item is
given to two people, and to a third, who may adjudicate, once their answers are there and differ.
Nobody is given an item twice, or sees what others said before answering; `conflict` shows both answers
to the third, without names.

An answer is never changed: a second thought is another answer, and the last one counts
(`compeer_core.votes.annotations.opinions`). Drafts are kept as they are typed. Of two tabs with the
same item only one may write, until it has been silent for `TAB_SECONDS`.

People come in by a token, which is shown once; the database has its hash.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from compeer_core.cer import Candidate, CerRecord, DecidedBy, StepLabels
from compeer_core.errors import ConfigError, InputError
from compeer_core.reasoning import STEPS, Part
from compeer_core.votes.agreement import Consensus, Unsettled
from compeer_core.votes.annotations import (
    QUESTIONS,
    Annotation,
    AnnotationItem,
    opinions,
)
from compeer_core.votes.reading import storable
from compeer_core.votes.schema import (
    AnnotatorRow,
    AnswerRow,
    AssignmentRow,
    DeletionRow,
    ItemRow,
)
from compeer_core.votes.store import VoteStore

TAB_SECONDS = 30.0
"""So long a tab may be silent before another one may write."""
ASSIGNED_HOURS = 24.0
"""So long an item without an answer waits for whom it was given to."""

Order = Literal["first", "second"]


@dataclass(frozen=True)
class Annotator:
    """Somebody who has come in."""

    id: int
    name: str
    may_adjudicate: bool


@dataclass(frozen=True)
class Work:
    """An item before somebody: what is shown, in which order, and what they have typed so far."""

    item: AnnotationItem
    shown_first: Order
    """Which of the item's two replies stands first; drawn once for each person."""
    draft: Mapping[str, Any] | None
    saved_at: datetime | None
    may_write: bool
    """False where another tab has the item."""


@dataclass(frozen=True)
class Progress:
    """How far somebody is."""

    to_do: int
    """Items that could still be given to them."""
    drafts: int
    done: int
    conflicts: int
    """Items that wait for a third person, if they may be it."""


class Desk:
    """The annotation desk over the database of a store."""

    def __init__(self, store: VoteStore) -> None:
        self._database = store.database
        self._now = store.now

    # --- people ---------------------------------------------------------------------------------

    def add_annotator(self, name: str, *, may_adjudicate: bool = False) -> str:
        """Add somebody under a pseudonym, and return their token, which is nowhere else.

        Raises:
            ConfigError: The pseudonym is taken, or empty.
        """
        token = secrets.token_urlsafe(24)
        name = storable(name).strip()
        if not name:
            raise ConfigError("an annotator needs a name")
        with self._database.writing() as session:
            if session.scalars(select(AnnotatorRow).filter_by(name=name)).first() is not None:
                raise ConfigError(f"there is an annotator {name!r} already")
            session.add(
                AnnotatorRow(
                    name=name,
                    token_hash=_hash(token),
                    may_adjudicate=may_adjudicate,
                    created_at=self._now(),
                )
            )
        return token

    def log_in(self, token: str) -> Annotator | None:
        """Return whose token it is; None where it is nobody's, or was revoked."""
        with self._database.reading() as session:
            row = session.scalars(select(AnnotatorRow).filter_by(token_hash=_hash(token))).first()
        if row is None or row.revoked_at is not None:
            return None
        return Annotator(row.id, row.name, row.may_adjudicate)

    def revoke(self, name: str) -> None:
        """Let nobody in with somebody's token any more; their answers stay.

        Raises:
            ConfigError: There is nobody of that name.
        """
        with self._database.writing() as session:
            _named(session, name).revoked_at = self._now()

    def delete_annotator(self, name: str) -> int:
        """Delete somebody with all their drafts and answers; return how many answers those were.

        Raises:
            ConfigError: There is nobody of that name.
        """
        with self._database.writing() as session:
            row = _named(session, name)
            answers = select(func.count()).select_from(AnswerRow).filter_by(annotator_id=row.id)
            count = session.scalar(answers) or 0
            session.execute(delete(AnnotatorRow).filter_by(id=row.id))
            session.add(DeletionRow(at=self._now(), battles=0, votes=0, answers=count))
        self._database.forget()
        return count

    # --- items ----------------------------------------------------------------------------------

    def add_items(self, items: Iterable[tuple[AnnotationItem, CerRecord | None]]) -> int:
        """Put items at the end of the queue; return how many were new.

        Args:
            items: Each with the row that its answers will be the labels of, if there is one: the
                same replies in the same order, one of them with a turn. Annotators never see it.
        """
        count = 0
        with self._database.writing() as session:
            position = session.scalar(select(func.max(ItemRow.position))) or 0
            known = set(session.scalars(select(ItemRow.id)))
            for item, record in items:
                if item.id in known:
                    continue
                known.add(item.id)
                count += 1
                session.add(
                    ItemRow(
                        id=item.id,
                        position=position + count,
                        item=item.model_dump(mode="json"),
                        record=None if record is None else record.model_dump(mode="json"),
                    )
                )
        return count

    def next_item(self, annotator: Annotator, tab: str, *, conflicts: bool = False) -> Work | None:
        """Give somebody an item; None where there is none left for them.

        What they have begun comes first, then the queue in its order. An item is held for them, so
        that no third person answers it for nothing.

        Args:
            annotator: Who asks.
            tab: The page's name for the tab of the browser.
            conflicts: Only items that wait for a third person.
        """
        with self._database.writing() as session:
            if not self._database.is_sqlite:  # whose writers take turns anyway
                session.execute(text("LOCK TABLE desk_assignments IN SHARE ROW EXCLUSIVE MODE"))
            queue = _Queue(session, self._now())
            item_id = queue.next_for(annotator, conflicts=conflicts)
            return None if item_id is None else self._opened(session, annotator, item_id, tab)

    def open_item(self, annotator: Annotator, item_id: str, tab: str) -> Work:
        """Open an item that somebody was given before, also to answer it again.

        Raises:
            InputError: ``item_not_yours``.
        """
        with self._database.writing() as session:
            _assignment(session, annotator, item_id)
            return self._opened(session, annotator, item_id, tab)

    def save_draft(
        self, annotator: Annotator, item_id: str, tab: str, draft: Mapping[str, Any]
    ) -> datetime:
        """Keep what somebody has typed so far; return when.

        Raises:
            InputError: ``item_not_yours``, or ``item_open_elsewhere`` (another tab has it).
        """
        now = self._now()
        with self._database.writing() as session:
            assignment = _assignment(session, annotator, item_id)
            if not _take(assignment, tab, now):
                raise InputError("another tab has the item", "item_open_elsewhere")
            assignment.draft = {
                storable(key): storable(value) if isinstance(value, str) else value
                for key, value in draft.items()
            }
            assignment.saved_at = now
        return now

    def _opened(self, session: Session, annotator: Annotator, item_id: str, tab: str) -> Work:
        key = (annotator.id, item_id)
        assignment = session.get(AssignmentRow, key)
        now = self._now()
        if assignment is None:
            assignment = AssignmentRow(
                annotator_id=annotator.id,
                item_id=item_id,
                assigned_at=now,
                shown_first=secrets.choice(("first", "second")),
            )
            session.add(assignment)
        may_write = _take(assignment, tab, now)
        item = AnnotationItem.model_validate(session.get_one(ItemRow, item_id).item)
        return Work(
            item=item,
            shown_first="first" if assignment.shown_first == "first" else "second",
            draft=assignment.draft,
            saved_at=assignment.saved_at,
            may_write=may_write,
        )

    # --- answers --------------------------------------------------------------------------------

    def answer(
        self,
        annotator: Annotator,
        item_id: str,
        *,
        steps: StepLabels = (None, None, None),
        preference: str | None = None,
        confidence: int | None = None,
        note: str = "",
        seconds: float | None = None,
        token: str = "",
    ) -> Annotation:
        """Write down an answer. It is on the disk when this returns, and the draft is gone.

        Args:
            annotator: Who answers.
            item_id: What was given to them.
            steps: See `Annotation`, as for all that follows.
            preference: In the order in which this person saw the replies; dropped where the item
                has none to compare.
            confidence: See `Annotation`.
            note: See `Annotation`.
            seconds: See `Annotation`.
            token: The page's name for this request; sent again, it is the same answer.

        Raises:
            InputError: ``item_not_yours``, or ``answer_unusable`` with what is wrong.
        """
        key = storable(token) or None
        with self._database.writing() as session:
            assignment = _assignment(session, annotator, item_id)
            earlier = session.scalars(
                select(AnswerRow)
                .filter_by(item_id=item_id, annotator_id=annotator.id)
                .order_by(AnswerRow.number)
            ).all()
            for row in earlier:
                if key is not None and row.token == key:
                    return _annotation(row, annotator.name)
            has_replies = session.get_one(ItemRow, item_id).item["replies"] is not None
            at = max([self._now(), *(row.at for row in earlier)])
            try:
                annotation = Annotation.model_validate(
                    {
                        "item_id": item_id,
                        "annotator": annotator.name,
                        "steps": steps,
                        "preference": preference if has_replies else None,
                        "shown_first": assignment.shown_first,
                        "confidence": confidence,
                        "note": storable(note),
                        "seconds": seconds,
                        "date": at,
                    }
                )
            except ValidationError as error:
                detail = error.errors()[0]
                raise InputError(
                    f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}", "answer_unusable"
                ) from error
            session.add(
                AnswerRow(
                    item_id=item_id,
                    annotator_id=annotator.id,
                    number=len(earlier) + 1,
                    token=key,
                    at=at,
                    steps=list(annotation.steps),
                    preference=annotation.preference,
                    shown_first=annotation.shown_first,
                    confidence=annotation.confidence,
                    note=annotation.note,
                    seconds=annotation.seconds,
                )
            )
            assignment.draft = assignment.saved_at = assignment.tab = assignment.tab_until = None
        return annotation

    def conflict(self, annotator: Annotator, item_id: str) -> tuple[Annotation, Annotation]:
        """Return what the first two said, to the third, in the item's order and without names.

        Raises:
            InputError: ``item_not_yours``, or ``not_a_conflict``.
        """
        with self._database.reading() as session:
            _assignment(session, annotator, item_id)
            said = [each for each in _said(session, item_id) if each.annotator != annotator.name]
        latest = {each.annotator: each for each in said}
        if not annotator.may_adjudicate or len(latest) < 2:
            raise InputError("the item waits for no third person", "not_a_conflict")
        first, second = list(latest.values())[:2]
        return _unnamed(first, "1"), _unnamed(second, "2")

    def annotations(self) -> Iterator[Annotation]:
        """Yield all answers, revised ones too, in the order in which they were given."""
        with self._database.reading() as session:
            yield from _said(session)

    def progress(self, annotator: Annotator) -> Progress:
        """Return how far somebody is."""
        with self._database.reading() as session:
            queue = _Queue(session, self._now())
            mine = session.scalars(select(AssignmentRow).filter_by(annotator_id=annotator.id)).all()
            done = {item for item, people in queue.answered.items() if annotator.name in people}
            return Progress(
                to_do=len(queue.open_for(annotator, conflicts=False)),
                drafts=sum(row.draft is not None for row in mine),
                done=len(done),
                conflicts=len(queue.open_for(annotator, conflicts=True)),
            )

    # --- rows of CER ----------------------------------------------------------------------------

    def settled(self) -> Iterator[CerRecord]:
        """Yield the rows of items with at least one question on which two people agree.

        Each question is settled for itself. Rows come in the order of the queue; items without a row
        of their own are for `annotations` and the pipeline.
        """
        with self._database.reading() as session:
            answers: dict[str, list[Annotation]] = {}
            for annotation in _said(session):
                answers.setdefault(annotation.item_id, []).append(annotation)
            rows = select(ItemRow).where(ItemRow.record.is_not(None)).order_by(ItemRow.position)
            for row in session.scalars(rows):
                record = _labelled(
                    CerRecord.model_validate(row.record), answers.get(row.id, []), row.item
                )
                if record is not None:
                    yield record


class _Queue:
    """Which items wait for whom, at one time."""

    def __init__(self, session: Session, now: datetime) -> None:
        self._ids = list(session.scalars(select(ItemRow.id).order_by(ItemRow.position)))
        self._given: dict[str, list[AssignmentRow]] = {}
        held = now - timedelta(hours=ASSIGNED_HOURS)
        self._ended: set[tuple[int, str]] = set()
        for row in session.scalars(select(AssignmentRow).order_by(AssignmentRow.assigned_at)):
            self._given.setdefault(row.item_id, []).append(row)
            if max(row.assigned_at, row.saved_at or row.assigned_at) < held:
                self._ended.add((row.annotator_id, row.item_id))
        self._answers: dict[str, list[Annotation]] = {}
        for annotation in _said(session):
            self._answers.setdefault(annotation.item_id, []).append(annotation)
        self.answered = {
            item: {each.annotator for each in said} for item, said in self._answers.items()
        }
        self._names = {row.id: row.name for row in session.scalars(select(AnnotatorRow))}

    def next_for(self, annotator: Annotator, *, conflicts: bool) -> str | None:
        """Return what somebody has begun, or else the first item that is open for them."""
        ids = self.open_for(annotator, conflicts=conflicts)
        begun = [item for item in ids if self._is_given(item, annotator)]
        return next(iter(begun or ids), None)

    def open_for(self, annotator: Annotator, *, conflicts: bool) -> list[str]:
        """Return the items that could be given to somebody, in the queue's order."""
        if conflicts and not annotator.may_adjudicate:
            return []
        return [item for item in self._ids if self._is_open(item, annotator, conflicts=conflicts)]

    def _is_given(self, item: str, annotator: Annotator) -> bool:
        return any(row.annotator_id == annotator.id for row in self._given.get(item, ()))

    def _is_open(self, item: str, annotator: Annotator, *, conflicts: bool) -> bool:
        answered = self.answered.get(item, set())
        if annotator.name in answered:
            return False
        is_conflict = len(answered) >= 2
        if is_conflict != conflicts or (is_conflict and not self._needs_third(item)):
            return False
        others = {
            self._names[row.annotator_id]
            for row in self._given.get(item, ())
            if row.annotator_id != annotator.id and (row.annotator_id, item) not in self._ended
        }
        return len(answered | others) < (3 if conflicts else 2)

    def _needs_third(self, item: str) -> bool:
        said = self._answers[item]
        return any(opinions(said, part).outcome is Unsettled.NEEDS_THIRD for part in QUESTIONS)


def _labelled(
    record: CerRecord, said: list[Annotation], item: Mapping[str, Any]
) -> CerRecord | None:
    asked = [part for part in QUESTIONS if part is not Part.REPLY or item["replies"] is not None]
    settled: dict[Part, tuple[bool | str, DecidedBy]] = {}
    for part in asked:
        found = opinions(said, part)
        outcome = found.outcome
        if isinstance(outcome, Consensus):
            agreeing = [
                name for name, given in list(found.latest.items())[:3] if given == outcome.label
            ]
            by = DecidedBy(kind="people", name=", ".join(sorted(agreeing)))
            settled[part] = (outcome.label, by)
    if not settled:
        return None
    changes: dict[str, Any] = {}
    if Part.REPLY in settled:
        changes["preference"], changes["preference_by"] = settled[Part.REPLY]
    labels = [settled[part] for part in STEPS if part in settled]
    if labels:
        names = sorted({name for _, by in labels for name in by.name.split(", ")})
        judged = "first" if record.first.turn is not None else "second"
        candidate = getattr(record, judged)
        changes[judged] = Candidate.model_validate(
            candidate.model_dump()
            | {
                "steps": tuple(settled[part][0] if part in settled else None for part in STEPS),
                "steps_by": DecidedBy(kind="people", name=", ".join(names)),
            }
        )
    # model_copy would not look whether the parts fit
    return CerRecord.model_validate(
        {name: getattr(record, name) for name in CerRecord.model_fields} | changes
    )


def _said(session: Session, item_id: str | None = None) -> Iterator[Annotation]:
    query = select(AnswerRow, AnnotatorRow.name).join(
        AnnotatorRow, AnnotatorRow.id == AnswerRow.annotator_id
    )
    if item_id is not None:
        query = query.where(AnswerRow.item_id == item_id)
    for row, name in session.execute(query.order_by(AnswerRow.at, AnswerRow.id)):
        yield _annotation(row, name)


def _annotation(row: AnswerRow, name: str) -> Annotation:
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


def _unnamed(annotation: Annotation, name: str) -> Annotation:
    preference = annotation.answer(Part.REPLY)
    return annotation.model_copy(
        update={"annotator": name, "preference": preference, "shown_first": "first"}
    )


def _assignment(session: Session, annotator: Annotator, item_id: str) -> AssignmentRow:
    known = storable(item_id) == item_id
    found = (
        session.get(AssignmentRow, (annotator.id, item_id), with_for_update=True) if known else None
    )
    if found is None:
        raise InputError("the item was not given to this person", "item_not_yours")
    return found


def _take(assignment: AssignmentRow, tab: str, now: datetime) -> bool:
    """Let a tab write, unless another one has written or asked a moment ago."""
    other = assignment.tab is not None and assignment.tab != tab
    if other and assignment.tab_until is not None and assignment.tab_until > now:
        return False
    assignment.tab = storable(tab)
    assignment.tab_until = now + timedelta(seconds=TAB_SECONDS)
    return True


def _named(session: Session, name: str) -> AnnotatorRow:
    row = session.scalars(
        select(AnnotatorRow).filter_by(name=storable(name)).with_for_update()
    ).first()
    if row is None:
        raise ConfigError(f"there is no annotator {name!r}")
    return row


def _hash(token: str) -> str:
    # Tokens are random and long, so a fast hash does.
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
