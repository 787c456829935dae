"""The annotation desk: assignments, drafts, answers, and adjudication where two people differ.

The paper's rule: two people answer independently, and a third decides where they differ. So an item is
assigned to two people, and to a third, who may adjudicate, once their answers differ. Nobody gets an item
twice, or sees the answers of others before answering; `conflict` shows both answers, without names, to the
third. The owner may want a single answer for some items, and choose who gets a batch
(`compeer_core.annotation.owner`).

An answer is never changed: a revision is another answer, and the last one counts
(`compeer_core.annotation.annotations.opinions`). An empty answer withdraws the previous one. Once the item is
assigned to a third person, who has seen the answers, neither is possible. Drafts are saved while they are
typed. Of two tabs with the same item only one may write, until it has been silent for `TAB_SECONDS`.

Results are shown only for items that need no more independent answers (`Desk.report`,
`Desk.annotations`).

People sign in with a token, which is shown once; the database stores its hash. Each browser gets a pass of
its own, so that signing out in one leaves the others signed in.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from compeer_core.annotation.annotations import (
    QUESTIONS,
    Annotation,
    AnnotationItem,
    by_item,
    labelled,
    opinions,
)
from compeer_core.annotation.queue import (
    Queue,
    annotation_of,
    answers_of,
    differ,
    is_empty,
    standing,
)
from compeer_core.annotation.report import Report, report
from compeer_core.cer import CerRecord, StepLabels
from compeer_core.errors import ConfigError, InputError
from compeer_core.images import Image, read_image
from compeer_core.reasoning import Part
from compeer_core.votes.reading import storable
from compeer_core.votes.schema import (
    AnnotatorRow,
    AnswerRow,
    AssignmentRow,
    DeletionRow,
    DeskPictureRow,
    ItemRow,
    PassRow,
)
from compeer_core.votes.store import VoteStore

TAB_SECONDS = 30.0
"""How long a tab may be silent before another one may write."""
PASS_SECONDS = 7 * 24 * 3600
"""How long a pass is valid."""
_CLOCK_SECONDS = 24 * 3600
"""How far in the future a pass may begin, since clocks are sometimes set back."""
_LOCK = 0x4445534B
"""Key of the PostgreSQL lock for assignments and answers."""

Order = Literal["first", "second"]


@dataclass(frozen=True)
class Annotator:
    """Somebody who is signed in."""

    id: int
    name: str
    may_adjudicate: bool


@dataclass(frozen=True)
class Work:
    """An item opened by somebody: its content, the order of replies, and their draft."""

    item: AnnotationItem
    number: int
    """Position in the queue, from 1."""
    batch: str
    """The name of its batch."""
    pictures: frozenset[str]
    """Names of the pictures of its history that can be shown (`Desk.picture`)."""
    shown_first: Order
    """Which of the item's two replies is shown first; drawn once for each person."""
    decides: bool
    """Whether the person adjudicates, and sees the first two answers (`Desk.conflict`)."""
    answered: Annotation | None
    """Their previous answer, if it stands."""
    draft: Mapping[str, Any] | None
    saved_at: datetime | None
    may_write: bool
    """False if another tab has the item."""


@dataclass(frozen=True)
class Begun:
    """An item with a draft or an answer of somebody."""

    item_id: str
    number: int
    state: Literal["draft", "done"]
    at: datetime
    """Time of saving."""


@dataclass(frozen=True)
class Progress:
    """The progress of one annotator."""

    items: int
    """Number of items in the queue."""
    to_do: int
    """Number of items that can still be assigned to them."""
    drafts: int
    done: int
    conflicts: int
    """Number of items that wait for a third person, if they may adjudicate."""
    is_over: bool
    """Whether no item waits for anybody."""


class Desk:
    """The annotation desk over the database of a store."""

    def __init__(self, store: VoteStore) -> None:
        self._database = store.database
        self._now = store.now

    # --- people ---------------------------------------------------------------------------------

    def add_annotator(self, name: str, *, may_adjudicate: bool = False) -> str:
        """Add an annotator under a pseudonym, and return their token, which is stored nowhere.

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
        """Return the owner of a token; None if it is unknown or revoked."""
        with self._database.reading() as session:
            row = session.scalars(select(AnnotatorRow).filter_by(token_hash=_hash(token))).first()
        if row is None or row.revoked_at is not None:
            return None
        return Annotator(row.id, row.name, row.may_adjudicate)

    def new_pass(self, annotator: Annotator | None) -> str:
        """Return a pass for a browser, valid for `PASS_SECONDS` or until `end_pass`.

        Args:
            annotator: The annotator; None for the owner of the desk.
        """
        new = secrets.token_urlsafe(32)
        now = self._now()
        with self._database.writing() as session:
            old = PassRow.begun_at < now - timedelta(seconds=PASS_SECONDS)
            session.execute(delete(PassRow).where(old))
            owner = None if annotator is None else annotator.id
            session.add(PassRow(hash=_hash(new), annotator_id=owner, begun_at=now))
        return new

    def let_in(self, browser_pass: str) -> Annotator | None:
        """Return the annotator of a pass; None if it is unknown, expired, or the token is revoked."""
        with self._database.reading() as session:
            of_browser = self._valid(session, browser_pass)
            if of_browser is None or of_browser.annotator_id is None:
                return None
            row = session.get_one(AnnotatorRow, of_browser.annotator_id)
            if row.revoked_at is not None:
                return None
            return Annotator(row.id, row.name, row.may_adjudicate)

    def lets_owner_in(self, browser_pass: str) -> bool:
        """Whether a pass is a valid one of the owner."""
        with self._database.reading() as session:
            of_browser = self._valid(session, browser_pass)
            return of_browser is not None and of_browser.annotator_id is None

    def _valid(self, session: Session, browser_pass: str) -> PassRow | None:
        row = session.get(PassRow, _hash(browser_pass))
        if row is None:
            return None
        age = (self._now() - row.begun_at).total_seconds()
        return row if -_CLOCK_SECONDS <= age <= PASS_SECONDS else None

    def end_pass(self, browser_pass: str) -> None:
        """Invalidate a pass."""
        with self._database.reading() as session:  # takes no write lock for an unknown pass
            row = session.get(PassRow, _hash(browser_pass))
        if row is None:
            return
        with self._database.writing() as session:
            session.execute(delete(PassRow).where(PassRow.hash == row.hash))

    def revoke(self, name: str) -> None:
        """Revoke the token of an annotator; their answers stay.

        Raises:
            ConfigError: There is no annotator of that name.
        """
        with self._database.writing() as session:
            _named(session, name).revoked_at = self._now()

    def renew_token(self, name: str) -> str:
        """Replace the token of an annotator, also a revoked one, and return the new one.

        The old token and all browsers that are signed in with it are refused from now on.

        Raises:
            ConfigError: There is no annotator of that name.
        """
        token = secrets.token_urlsafe(24)
        with self._database.writing() as session:
            row = _named(session, name)
            row.token_hash, row.revoked_at = _hash(token), None
            session.execute(delete(PassRow).filter_by(annotator_id=row.id))
        return token

    def delete_annotator(self, name: str) -> int:
        """Delete an annotator with all drafts and answers; return the number of answers.

        Raises:
            ConfigError: There is no annotator of that name.
        """
        with self._database.writing() as session:
            row = _named(session, name)
            answers = select(func.count()).select_from(AnswerRow).filter_by(annotator_id=row.id)
            count = session.scalar(answers) or 0
            session.execute(delete(AnnotatorRow).filter_by(id=row.id))
            session.add(DeletionRow(at=self._now(), battles=0, votes=0, answers=count))
            self._database.erase(session)
        return count

    # --- items ----------------------------------------------------------------------------------

    def add_items(
        self,
        items: Iterable[tuple[AnnotationItem, CerRecord | None]],
        pictures: Callable[[str], Image] | None = None,
        *,
        batch: str = "",
        readings: Mapping[str, Sequence[Annotation]] = MappingProxyType({}),
    ) -> int:
        """Add items at the end of the queue, all or none; return how many were new.

        Args:
            items: Each with the row that its answers will label, if there is one: the same replies in
                the same order, one of them with a turn. It is hidden from annotators.
            pictures: Opens a picture of a history by its name; without it pictures are not shown.
            batch: The name of the batch that they belong to.
            readings: Answers of language models by item, hidden from annotators. One person's answer is
                enough for such an item, until the owner wants two.
        """
        batch = storable(batch).strip()
        count = 0
        with self._database.writing() as session:
            position = session.scalar(select(func.max(ItemRow.position))) or 0
            known = set(session.scalars(select(ItemRow.id)))
            for item, record in items:
                if item.id in known:
                    continue
                known.add(item.id)
                count += 1
                read = [each.model_dump(mode="json") for each in readings.get(item.id, ())]
                session.add(
                    ItemRow(
                        id=item.id,
                        position=position + count,
                        item=item.model_dump(mode="json"),
                        record=None if record is None else record.model_dump(mode="json"),
                        batch=batch,
                        people=1 if read else 2,
                        readings=read or None,
                    )
                )
                names = {name for each in item.history for name in each.images}
                if pictures is not None and names:
                    session.flush()
                    session.add_all(
                        DeskPictureRow(item_id=item.id, name=name, data=pictures(name).data)
                        for name in sorted(names)
                    )
        return count

    def picture(self, annotator: Annotator, item_id: str, index: int) -> Image | None:
        """Return a picture of an item that is assigned to somebody; None if there is none.

        Args:
            annotator: The person.
            item_id: The item.
            index: Number of the picture in the history, from 0.

        Raises:
            InputError: ``item_not_yours``.
        """
        with self._database.reading() as session:
            _assignment(session, annotator, item_id, lock=False)
            item = AnnotationItem.model_validate(session.get_one(ItemRow, item_id).item)
            names = [name for each in item.history for name in each.images]
            if not 0 <= index < len(names):
                return None
            row = session.get(DeskPictureRow, (item_id, names[index]))
            return None if row is None else read_image(row.data)

    def next_item(self, annotator: Annotator, tab: str, *, conflicts: bool = False) -> Work | None:
        """Assign an item to somebody; None if there is none left for them.

        Items they have begun come first, then the queue in order. An item is reserved for them, so that
        no third person answers it in vain.

        Args:
            annotator: The person.
            tab: Id of the browser tab, chosen by the page.
            conflicts: Only items that wait for a third person.
        """
        with self._database.writing() as session:
            self._alone(session)
            queue = Queue(session, self._now())
            item_id = (
                queue.next_for(annotator.name, annotator.id, conflicts=conflicts)
                if annotator.may_adjudicate or not conflicts
                else None
            )
            return None if item_id is None else self._opened(session, annotator, item_id, tab)

    def open_item(self, annotator: Annotator, item_id: str, tab: str) -> Work:
        """Open an assigned item, also to revise its answer.

        Raises:
            InputError: ``item_not_yours``, or ``item_closed`` (others have answered it).
        """
        with self._database.writing() as session:
            _assignment(session, annotator, item_id)
            return self._opened(session, annotator, item_id, tab)

    def hold(self, annotator: Annotator, item_id: str, tab: str) -> bool:
        """Keep an item open in a tab; return whether the tab may write.

        Raises:
            InputError: ``item_not_yours``.
        """
        with self._database.writing() as session:
            return _take(_assignment(session, annotator, item_id), tab, self._now())

    def release(self, annotator: Annotator, item_id: str, tab: str) -> None:
        """Give up the right of a tab to write, so that another one has it at once.

        Raises:
            InputError: ``item_not_yours``.
        """
        with self._database.writing() as session:
            assignment = _assignment(session, annotator, item_id)
            if assignment.tab == storable(tab):
                assignment.tab = assignment.tab_until = None

    def begun(self, annotator: Annotator) -> list[Begun]:
        """Return somebody's drafts, then their answers, each from the newest on."""
        with self._database.reading() as session:
            numbers = {id_: n for n, id_ in enumerate(_item_ids(session), start=1)}
            mine = select(AssignmentRow).filter_by(annotator_id=annotator.id)
            drafts = [
                Begun(row.item_id, numbers[row.item_id], "draft", row.saved_at)
                for row in session.scalars(mine)
                if row.draft is not None and row.saved_at is not None
            ]
            last = _last_answers(session, annotator)
        drafted = {each.item_id for each in drafts}
        done = [
            Begun(item, numbers[item], "done", each.date)
            for item, each in last.items()
            if not is_empty(each) and item not in drafted
        ]
        return [
            *sorted(drafts, key=lambda each: each.at, reverse=True),
            *sorted(done, key=lambda each: each.at, reverse=True),
        ]

    def save_draft(
        self, annotator: Annotator, item_id: str, tab: str, draft: Mapping[str, Any]
    ) -> datetime:
        """Save a draft; return the time.

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
        row = session.get_one(ItemRow, item_id)
        of_item = list(answers_of(session, item_id))
        own = [each for each in of_item if each.annotator == annotator.name and not is_empty(each)]
        stands = annotator.name in standing(of_item)
        is_third = annotator.name not in standing(of_item)[:2] and len(standing(of_item)) >= 2
        if is_third and not stands and not _may_decide(annotator, of_item):
            raise InputError("others have answered the item", "item_closed")
        pictures = select(DeskPictureRow.name).filter_by(item_id=item_id)
        return Work(
            item=AnnotationItem.model_validate(row.item),
            number=_item_ids(session).index(item_id) + 1,
            batch=row.batch,
            pictures=frozenset(session.scalars(pictures)),
            shown_first="first" if assignment.shown_first == "first" else "second",
            decides=is_third,
            answered=own[-1] if stands else None,
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
        tab: str | None = None,
    ) -> Annotation:
        """Store an answer durably, and remove the draft.

        Args:
            annotator: The person.
            item_id: An item assigned to them.
            steps: See `Annotation`.
            preference: In the order in which this person saw the replies; ignored if the item has only
                one.
            confidence: See `Annotation`.
            note: See `Annotation`.
            seconds: See `Annotation`.
            token: Id of the request; a repeated request returns the same answer.
            tab: Id of the browser tab; None skips the check.

        Raises:
            InputError: ``item_not_yours``, ``item_open_elsewhere``, ``item_closed`` (two others have
                answered, and this person does not adjudicate), ``item_decided`` (a third person has
                the item), or ``answer_unusable`` with the problem.
        """
        key = storable(token) or None
        with self._database.writing() as session:
            self._alone(session)
            assignment = _assignment(session, annotator, item_id)
            earlier = session.scalars(
                select(AnswerRow)
                .filter_by(item_id=item_id, annotator_id=annotator.id)
                .order_by(AnswerRow.number)
            ).all()
            for row in earlier:
                if key is not None and row.token == key:
                    return annotation_of(row, annotator.name)
            if tab is not None and not _take(assignment, tab, self._now()):
                raise InputError("another tab has the item", "item_open_elsewhere")
            _check_open(session, annotator, item_id)
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

    def take_back(self, annotator: Annotator) -> str:
        """Withdraw somebody's last standing answer; return the item.

        The answer becomes the draft again, and the item waits for them.

        Raises:
            InputError: ``nothing_to_take_back``, or ``item_decided`` (a third person has the item).
        """
        with self._database.writing() as session:
            self._alone(session)
            last = _last_answers(session, annotator)
            item_id = next((id_ for id_, each in last.items() if not is_empty(each)), None)
            if item_id is None:
                raise InputError("there is no answer to take back", "nothing_to_take_back")
            _check_open(session, annotator, item_id)
            answer = last[item_id]
            number = select(func.max(AnswerRow.number)).filter_by(
                item_id=item_id, annotator_id=annotator.id
            )
            now = max(self._now(), answer.date)
            session.add(
                AnswerRow(
                    item_id=item_id,
                    annotator_id=annotator.id,
                    number=(session.scalar(number) or 0) + 1,
                    at=now,
                    steps=[None, None, None],
                    shown_first=answer.shown_first,
                    note="",
                )
            )
            assignment = _assignment(session, annotator, item_id)
            assignment.draft = answer.model_dump(
                mode="json", include={"steps", "preference", "confidence", "note", "seconds"}
            )
            assignment.saved_at = now
            assignment.tab = assignment.tab_until = None
        return item_id

    def conflict(self, annotator: Annotator, item_id: str) -> tuple[Annotation, Annotation]:
        """Return the first two answers for the adjudicator, in the item's order and without names.

        Raises:
            InputError: ``item_not_yours``, or ``not_a_conflict``.
        """
        with self._database.reading() as session:
            _assignment(session, annotator, item_id, lock=False)
            of_item = list(answers_of(session, item_id))
        latest = {each.annotator: each for each in of_item}
        people = standing(of_item)[:2]
        if not annotator.may_adjudicate or len(people) < 2 or annotator.name in people:
            raise InputError("the item waits for no third person", "not_a_conflict")
        first, second = people
        return _unnamed(latest[first], "1"), _unnamed(latest[second], "2")

    # --- results --------------------------------------------------------------------------------

    def annotations(
        self, *, closed: bool = False, batch: str | None = None
    ) -> Iterator[Annotation]:
        """Yield all answers, including revised ones, in order of time.

        Args:
            closed: Only about items that need no more independent answers, so that annotators may read
                them.
            batch: Only about items of this batch.
        """
        with self._database.reading() as session:
            queue = Queue(session, self._now())
            ids = {
                item
                for item in (queue.closed if closed else queue.ids)
                if batch in (None, queue.batch[item])
            }
            for each in answers_of(session):
                if each.item_id in ids:
                    yield each

    def report(self, *, batch: str | None = None, seed: int = 0) -> Report:
        """Return the agreement on items that two people have answered.

        Args:
            batch: Only on items of this batch.
            seed: Of the bootstrap.
        """
        with self._database.reading() as session:
            queue = Queue(session, self._now())
            numbers = {
                item: number
                for number, item in enumerate(queue.ids, start=1)
                if batch in (None, queue.batch[item])
            }
            closed = {
                item: queue.answers[item]
                for item in numbers
                if len(queue.answered.get(item, ())) >= 2
            }
            with_replies = {
                row.id
                for row in session.scalars(select(ItemRow))
                if row.item["replies"] is not None
            }
        return report(closed, numbers, with_replies, seed=seed)

    def progress(self, annotator: Annotator) -> Progress:
        """Return the progress of an annotator."""
        with self._database.reading() as session:
            queue = Queue(session, self._now())
            mine = session.scalars(select(AssignmentRow).filter_by(annotator_id=annotator.id)).all()
            open_for = partial(queue.open_for, annotator.name, annotator.id)
            return Progress(
                items=len(queue.ids),
                to_do=len(open_for(conflicts=False)),
                drafts=sum(row.draft is not None for row in mine),
                done=sum(annotator.name in people for people in queue.answered.values()),
                conflicts=len(open_for(conflicts=True)) if annotator.may_adjudicate else 0,
                is_over=queue.is_over,
            )

    # --- rows of CER ----------------------------------------------------------------------------

    def settled(self, *, batch: str | None = None) -> Iterator[CerRecord]:
        """Yield labelled rows of the items with at least one settled question, in queue order.

        Each question is settled independently. Items without a row are left out: the pipeline labels
        them from `annotations`.

        Args:
            batch: Only items of this batch.
        """
        with self._database.reading() as session:
            answers = by_item(answers_of(session))
            rows = select(ItemRow).where(ItemRow.record.is_not(None)).order_by(ItemRow.position)
            if batch is not None:
                rows = rows.filter_by(batch=batch)
            for row in session.scalars(rows):
                questions = (
                    part
                    for part in QUESTIONS
                    if part is not Part.REPLY or row.item["replies"] is not None
                )
                of_item = answers.get(row.id, [])
                record = labelled(
                    CerRecord.model_validate(row.record),
                    {part: opinions(of_item, part) for part in questions},
                )
                if record is not None:
                    yield record

    def _alone(self, session: Session) -> None:
        """Block assignments, answers and withdrawals by others until the transaction ends."""
        if not self._database.is_sqlite:  # its writers are serialised anyway
            session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def _item_ids(session: Session) -> list[str]:
    return list(session.scalars(select(ItemRow.id).order_by(ItemRow.position)))


def _last_answers(session: Session, annotator: Annotator) -> dict[str, Annotation]:
    """Return somebody's last answer about each item, the newest first."""
    rows = session.scalars(
        select(AnswerRow)
        .filter_by(annotator_id=annotator.id)
        .order_by(AnswerRow.at.desc(), AnswerRow.id.desc())
    )
    last: dict[str, Annotation] = {}
    for row in rows:
        last.setdefault(row.item_id, annotation_of(row, annotator.name))
    return last


def _check_open(session: Session, annotator: Annotator, item_id: str) -> None:
    """Refuse an answer that is neither independent nor an adjudication.

    Raises:
        InputError: ``item_closed`` or ``item_decided``.
    """
    of_item = list(answers_of(session, item_id))
    people = standing(of_item)
    if len(people) < 2:
        return
    if annotator.name in people[:2]:
        names = select(AnnotatorRow.name).join(
            AssignmentRow, AssignmentRow.annotator_id == AnnotatorRow.id
        )
        given = session.scalars(
            names.where(AssignmentRow.item_id == item_id, AnnotatorRow.may_adjudicate)
        )
        if set(given) - set(people[:2]):
            raise InputError("a third person has the item", "item_decided")
    elif annotator.name not in people and not _may_decide(annotator, of_item):
        raise InputError("others have answered the item", "item_closed")


def _may_decide(annotator: Annotator, of_item: list[Annotation]) -> bool:
    return annotator.may_adjudicate and differ(of_item)


def _unnamed(annotation: Annotation, name: str) -> Annotation:
    preference = annotation.answer(Part.REPLY)
    return annotation.model_copy(
        update={"annotator": name, "preference": preference, "shown_first": "first"}
    )


def _assignment(
    session: Session, annotator: Annotator, item_id: str, *, lock: bool = True
) -> AssignmentRow:
    known = storable(item_id) == item_id
    key = (annotator.id, item_id)
    assignment = session.get(AssignmentRow, key, with_for_update=lock) if known else None
    if assignment is None:
        raise InputError("the item is not assigned to this person", "item_not_yours")
    return assignment


def _take(assignment: AssignmentRow, tab: str, now: datetime) -> bool:
    """Let a tab write, unless another one has used the item within `TAB_SECONDS`."""
    until = now + timedelta(seconds=TAB_SECONDS)
    other = assignment.tab is not None and assignment.tab != tab
    # A longer reservation is from before the clock was set back.
    if other and assignment.tab_until is not None and now < assignment.tab_until <= until:
        return False
    assignment.tab = storable(tab)
    assignment.tab_until = until
    return True


def _named(session: Session, name: str) -> AnnotatorRow:
    row = session.scalars(
        select(AnnotatorRow).filter_by(name=storable(name)).with_for_update()
    ).first()
    if row is None:
        raise ConfigError(f"there is no annotator {name!r}")
    return row


def _hash(token: str) -> str:
    # Tokens and passes are long and random, so a fast hash is enough, and the timing of an index lookup
    # reveals nothing about them.
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
