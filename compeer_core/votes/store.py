"""The store of battles and votes.

A battle is stored before anything is generated, a side when it ends, a vote when it is cast; each is durable
before the call returns. A vote is never changed: a revision is added, also to withdraw it. The last revision
counts, and all are stored until their owner deletes them (`VoteStore.delete_voter`).

A database constraint allows one vote per battle and person, whatever pages, tabs and programs do. A repeated
request with the same token gets the same answer and adds nothing.

History and replies are stored only with the person's consent (`BattlePlan.keep_words`). Addresses are stored as
a hash with a salt of the day; salts are deleted after the following day, which makes the hashes
irreversible. All methods are safe to call from any thread, and from several processes on one database.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TypedDict, Unpack

from sqlalchemy import delete, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from compeer_core.cer import CaseUtterance
from compeer_core.images import Image
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import (
    Agreement,
    Battle,
    BattlePlan,
    Deletion,
    Limits,
    Reveal,
    SideResult,
    SideStatus,
    Steps,
    Tag,
    VoteReceipt,
)
from compeer_core.votes.database import Database
from compeer_core.votes.reading import (
    battle_of,
    latest_revision,
    locked_battle,
    own_battle,
    receipt_of,
    refused,
    revisions_of,
    reward_of,
    standing_votes,
    storable,
    vote_columns,
    vote_row,
)
from compeer_core.votes.rows import VoteRow
from compeer_core.votes.schema import (
    Base,
    BattleRow,
    DeletionRow,
    PictureRow,
    RevisionRow,
    SaltRow,
    SecretRow,
    SideRow,
    VoteRecord,
    VoterRow,
)

_LOCK = 0x564F5445
"""Key space of the PostgreSQL locks for opening battles of a person and deleting the person."""
_MAX_TOKEN = 200
_MAX_DWELL_MS = 2**31 - 1


class BallotDetails(TypedDict, total=False):
    """Optional details of a vote."""

    tags: Sequence[str]
    """`Tag` values."""
    note: str
    dwell_ms: int | None
    """Time from the end of both replies to the vote, as reported by the page."""
    both_seen: bool | None
    """Whether both replies were fully visible; None if the page does not know."""
    steps: Steps | None
    token: str
    """Id of the request, the same when it is repeated."""


@dataclass(frozen=True)
class _Ballot:
    preference: Preference | None
    tags: tuple[str, ...] = ()
    note: str = ""
    dwell_ms: int | None = None
    both_seen: bool | None = None
    steps: Steps | None = None
    token: str | None = None


def _now() -> datetime:
    return datetime.now(UTC)


class VoteStore:
    """Battles and votes in a database.

    Attributes:
        database: May be shared with the annotation desk (`compeer_core.annotation.desk`).
        now: The clock.
    """

    def __init__(
        self,
        url: str | Database | None = None,
        limits: Limits | None = None,
        clock: Callable[[], datetime] = _now,
    ) -> None:
        """Open the store; see `Database` for the URL, by default a file of the user.

        Raises:
            ConfigError: The database cannot be used.
        """
        self.database = url if isinstance(url, Database) else Database(url)
        self.limits = limits or Limits()
        self.now = clock

    def close(self) -> None:
        """Close the database. May be called twice."""
        self.database.close()

    def __enter__(self) -> "VoteStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- battles --------------------------------------------------------------------------------

    def open_battle(
        self,
        plan: BattlePlan,
        address: str | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Battle:
        """Store the plan of a battle, before anything is generated.

        Args:
            plan: The plan.
            address: Address of the request; only a hash of it is stored.
            is_wanted: Returns False once the person has requested deletion. It is called while this
                call and `delete_voter` exclude each other, so that no battle is opened after a
                deletion.

        Raises:
            VoteRefusedError: ``forgotten``: `is_wanted` returned False.
            StoreError: The database failed; the battle must not begin.
        """
        now = self.now()
        utterances = plan.dialogue.merged().utterances
        pictures = {_picture_name(image): image for each in utterances for image in each.images}
        battle = BattleRow(
            id=f"b{secrets.token_hex(16)}",
            voter_id=plan.voter,
            opened_at=now,
            expires_at=now + timedelta(seconds=self.limits.battle_seconds),
            seed=plan.seed,
            blind=plan.blind,
            with_reasoning=plan.with_reasoning,
            language=storable(plan.language),
            topic=storable(plan.topic),
            imported=False,
            image_hash=_digest("".join(pictures)) if pictures else None,
            dialogue_id=storable(plan.dialogue.id),
        )
        if plan.keep_words:
            battle.history = [
                CaseUtterance(
                    speaker=each.speaker,
                    text=storable(each.text),
                    images=tuple(map(_picture_name, each.images)),
                ).model_dump(mode="json")
                for each in utterances
            ]
        for number, side in enumerate(plan.sides):
            battle.sides.append(
                SideRow(side=number, model=side.model, seed=side.seed, status=SideStatus.WRITING)
            )
        with self.database.writing() as session:
            self._alone_with(session, plan.voter)
            if not is_wanted():
                raise refused("forgotten", "the person has deleted their data")
            self._meet(session, plan.voter, address, now)
            session.add(battle)
            if plan.keep_words:
                for name, image in pictures.items():
                    session.merge(PictureRow(voter_id=plan.voter, name=name, data=image.data))
        return battle_of(battle)

    def finish_side(self, battle_id: str, side: int, result: SideResult) -> bool:
        """Store how a side ended; a side without a reply counts as failed.

        Returns:
            Whether it was stored: not if the side had ended before, or the battle is deleted.
        """
        status = result.status
        if status is SideStatus.WRITING:
            raise ValueError("a side that is still being written has no result")
        if not result.reply.strip():
            status = SideStatus.FAILED
        with self.database.writing() as session:
            battle = locked_battle(session, battle_id)
            if battle is None or battle.sides[side].status != SideStatus.WRITING:
                return False
            row = battle.sides[side]
            row.status = status
            if battle.history is not None:
                row.turn, row.reply = storable(result.turn), storable(result.reply)
            if result.seed is not None:
                row.seed = result.seed
            row.reply_length = len(result.reply)
            row.reward = None if result.reward is None else asdict(result.reward)
            row.seconds, row.tokens, row.leaked = result.seconds, result.tokens, result.leaked
            row.error = None if result.error is None else storable(result.error)
            row.finished_at = self.now()
        return True

    def fail_side(self, battle_id: str, side: int, error: str = "") -> bool:
        """Store that a side failed; see `finish_side`."""
        return self.finish_side(battle_id, side, SideResult(SideStatus.FAILED, error=error))

    def record_verdict(self, battle_id: str, judge: str, verdict: Preference | None) -> bool:
        """Store the verdict of the judge on the two replies, in the order in which they are shown.

        Returns:
            Whether it was stored: not if the battle is deleted.
        """
        with self.database.writing() as session:
            battle = locked_battle(session, battle_id)
            if battle is None:
                return False
            battle.judge, battle.verdict = judge, verdict
        return True

    def close_battle(self, battle_id: str, reason: str) -> bool:
        """Close a battle, for example because somebody needs help: delete its words, refuse votes.

        A vote that was cast stays, flagged.

        Returns:
            Whether the battle exists.
        """
        with self.database.writing() as session:
            battle = locked_battle(session, battle_id)
            if battle is None:
                return False
            battle.closed_reason = storable(reason) or "closed"
            battle.history = battle.source_row = None
            for side in battle.sides:
                side.turn = side.reply = None
            session.flush()
            _drop_unused_pictures(session, battle.voter_id)
            self.database.erase(session)
        return True

    def battle(self, battle_id: str, voter: str) -> Battle:
        """Return a person's battle.

        Raises:
            VoteRefusedError: ``battle_unknown`` or ``battle_not_yours``.
        """
        with self.database.reading() as session:
            return battle_of(own_battle(session, battle_id, voter))

    # --- votes ----------------------------------------------------------------------------------

    def cast(
        self,
        battle_id: str,
        voter: str,
        preference: Preference | str,
        **details: Unpack[BallotDetails],
    ) -> VoteReceipt:
        """Cast a vote durably.

        Args:
            battle_id: A battle of this person whose sides have ended.
            voter: The id in the signed cookie.
            preference: `Preference.FIRST` is the side that is shown first.
            **details: See `BallotDetails`.

        Raises:
            VoteRefusedError: For any of its reasons; ``already_voted`` has the standing preference in
                ``values``. After withdrawing a vote a person may vote again.
            StoreError: The database failed, and there is no vote.
        """
        return self._add(battle_id, voter, self._checked(preference, details))

    def revise(
        self,
        battle_id: str,
        voter: str,
        preference: Preference | str,
        **details: Unpack[BallotDetails],
    ) -> VoteReceipt:
        """Replace a standing vote; arguments and errors are those of `cast`."""
        return self._add(battle_id, voter, self._checked(preference, details), replaces=True)

    def undo(self, battle_id: str, voter: str, token: str = "") -> VoteReceipt:
        """Withdraw a vote within `Limits.undo_seconds`.

        A blind vote is final once the names were shown: withdrawing only those that turned out badly for a
        favourite would bias the leaderboard.

        Raises:
            VoteRefusedError: As for `cast`, and ``not_voted``, ``undo_too_late`` or ``undo_revealed``.
            StoreError: The database failed, and the vote stands.
        """
        return self._add(battle_id, voter, _Ballot(None, token=_token(token)), replaces=True)

    def standing(self, battle_id: str, voter: str) -> VoteReceipt | None:
        """Return a person's vote in a battle; None if there is none or it was withdrawn.

        Raises:
            VoteRefusedError: ``battle_unknown`` or ``battle_not_yours``.
        """
        with self.database.reading() as session:
            battle = own_battle(session, battle_id, voter)
            latest = latest_revision(session, battle_id, voter)
            if latest is None or latest.preference is None:
                return None
            return receipt_of(battle, latest)

    def reveal(self, battle_id: str, voter: str) -> Reveal:
        """Return the models to a person whose vote stands; later revisions are flagged.

        Raises:
            VoteRefusedError: ``battle_unknown``, ``battle_not_yours`` or ``not_voted``.
        """
        with self.database.writing() as session:
            battle = own_battle(session, battle_id, voter, lock=True)
            latest = latest_revision(session, battle_id, voter)
            if latest is None or latest.preference is None:
                raise refused("not_voted", "names are shown after the vote")
            latest.vote.revealed_at = latest.vote.revealed_at or self.now()
            left, right = battle.sides
            return Reveal(
                models=(left.model, right.model),
                rewards=(reward_of(left.reward), reward_of(right.reward)),
                preference=Preference(latest.preference),
                verdict=None if battle.verdict is None else Preference(battle.verdict),
            )

    def agreement(self, voter: str) -> Agreement:
        """Return how often a person and the judge agree, over the blind votes that were revealed."""
        votes = standing_votes(None).where(
            VoteRecord.voter_id == voter,
            VoteRecord.revealed_at.is_not(None),
            BattleRow.blind,
            BattleRow.verdict.is_not(None),
        )
        with self.database.reading() as session:
            same = [
                revision.preference == battle.verdict
                for revision, battle, _ in session.execute(votes)
            ]
        return Agreement(sum(same), len(same))

    def _checked(self, preference: Preference | str, details: BallotDetails) -> _Ballot:
        try:
            chosen = Preference(preference)
        except ValueError as error:
            raise refused("preference_unknown", f"unknown preference {preference!r}") from error
        try:
            tags = tuple(dict.fromkeys(Tag(tag).value for tag in details.get("tags", ())))
        except ValueError as error:
            raise refused("tag_unknown", str(error)) from error
        note = storable(details.get("note", "").replace("\r\n", "\n")).strip()
        limit = self.limits.note_characters
        if len(note) > limit:
            raise refused(
                "note_too_long",
                f"the note has {len(note)} characters, at most {limit} are allowed",
                limit=limit,
                length=len(note),
            )
        dwell = details.get("dwell_ms")
        return _Ballot(
            chosen,
            tags,
            note,
            # reported by the page, so it may be anything
            dwell if type(dwell) is int and 0 <= dwell <= _MAX_DWELL_MS else None,
            details.get("both_seen"),
            details.get("steps"),
            _token(details.get("token", "")),
        )

    def _add(
        self, battle_id: str, voter: str, ballot: _Ballot, *, replaces: bool = False
    ) -> VoteReceipt:
        with self.database.writing() as session:
            battle = own_battle(session, battle_id, voter, lock=True)
            earlier = revisions_of(session, battle_id, voter)
            for revision in earlier:
                if ballot.token is not None and revision.token == ballot.token:
                    return receipt_of(battle, revision)
            latest = earlier[-1] if earlier else None
            now = self.now()
            self._check(battle, latest, ballot, now, replaces=replaces)
            if latest is None:
                vote = VoteRecord(battle_id=battle_id, voter_id=voter)
                session.add(vote)
                session.flush()
            else:
                vote = latest.vote
                now = max(now, latest.at)  # clocks are sometimes set back
            revision = RevisionRow(
                vote_id=vote.id,
                voter_id=voter,
                number=1 if latest is None else latest.number + 1,
                token=ballot.token,
                at=now,
                preference=ballot.preference,
                tags=list(ballot.tags),
                note=ballot.note,
                steps=ballot.steps,
                dwell_ms=ballot.dwell_ms,
                too_fast=_below(ballot.dwell_ms, self.limits.min_dwell_ms),
                not_both_seen=None if ballot.both_seen is None else not ballot.both_seen,
                rate_limited=self._is_rate_limited(session, voter, now),
                after_reveal=vote.revealed_at is not None,
            )
            session.add(revision)
            session.flush()
            return receipt_of(battle, revision)

    def _check(
        self,
        battle: BattleRow,
        latest: RevisionRow | None,
        ballot: _Ballot,
        now: datetime,
        *,
        replaces: bool,
    ) -> None:
        """Check that a vote is allowed now."""
        statuses = {side.status for side in battle.sides}
        if battle.closed_reason is not None:
            raise refused("battle_closed", "the battle was closed")
        if SideStatus.FAILED in statuses:
            raise refused("battle_failed", "a side failed, so there is nothing to compare")
        if SideStatus.WRITING in statuses:
            raise refused("battle_not_finished", "a side is still being written")
        if now > battle.expires_at:
            raise refused("battle_expired", "the battle is too old for a vote")
        stands = latest is not None and latest.preference is not None
        if stands and not replaces:
            assert latest is not None
            raise refused(
                "already_voted", "there is a vote for this battle", preference=latest.preference
            )
        if replaces and not stands:
            raise refused("not_voted", "there is no vote for this battle")
        if ballot.preference is None:
            assert latest is not None
            if battle.blind and latest.vote.revealed_at is not None:
                raise refused("undo_revealed", "the names were shown, so the vote is final")
            if (now - latest.at).total_seconds() > self.limits.undo_seconds:
                raise refused(
                    "undo_too_late",
                    "the vote is too old to be withdrawn",
                    seconds=self.limits.undo_seconds,
                )

    def _is_rate_limited(self, session: Session, voter: str, now: datetime) -> bool:
        recent = select(func.count()).where(RevisionRow.at > now - timedelta(minutes=1))
        address = select(VoterRow.address_hash).where(VoterRow.id == voter).scalar_subquery()
        mine = recent.where(RevisionRow.voter_id == voter)
        theirs = recent.join_from(RevisionRow, VoterRow, VoterRow.id == RevisionRow.voter_id)
        theirs = theirs.where(VoterRow.address_hash == address)
        counted = select(mine.scalar_subquery(), theirs.scalar_subquery())
        of_person, of_address = session.execute(counted).one()
        return bool(
            of_person >= self.limits.votes_per_minute
            or of_address >= self.limits.votes_per_minute_and_address
        )

    # --- people ---------------------------------------------------------------------------------

    def delete_voter(self, voter: str) -> Deletion:
        """Delete all data of a person: battles with their words and pictures, votes, revisions.

        The file is overwritten soon afterwards; `Database.erased` says when. Earlier copies are out of
        reach. The number of deleted votes is stored, since a board of an earlier day may now differ.

        Raises:
            StoreError: The database failed; nothing was deleted.
        """
        with self.database.writing() as session:
            self._alone_with(session, voter)
            row = session.scalar(select(VoterRow).filter_by(id=voter).with_for_update())
            if row is None:
                return Deletion(0, 0)
            battles, votes = (
                session.scalar(select(func.count()).select_from(table).filter_by(voter_id=voter))
                or 0
                for table in (BattleRow, VoteRecord)
            )
            session.execute(delete(VoterRow).filter_by(id=voter))
            session.add(DeletionRow(at=self.now(), battles=battles, votes=votes, answers=0))
            self.database.erase(session)
        return Deletion(battles, votes)

    def voter_of(self, pseudonym: str) -> str | None:
        """Return the id of the person with a pseudonym; None if there is none."""
        with self.database.reading() as session:
            ids = select(VoterRow.id).filter_by(pseudonym=storable(pseudonym))
            return session.scalars(ids).first()

    def secret(self, name: str) -> bytes:
        """Return random bytes shared by all processes on this database, such as a cookie key."""
        with self.database.reading() as session:  # works on a full disk
            row = session.get(SecretRow, name)
        if row is not None:
            return row.value
        with self.database.writing() as session:
            _add_once(session, SecretRow(name=name, value=secrets.token_bytes(32)))
            return session.get_one(SecretRow, name).value

    def _alone_with(self, session: Session, voter: str) -> None:
        """Exclude other openings and deletions for a person until the transaction ends."""
        if not self.database.is_sqlite:  # its writers are serialised anyway
            lock = text("SELECT pg_advisory_xact_lock(:space, hashtext(:voter))")
            session.execute(lock, {"space": _LOCK, "voter": voter})

    def _meet(self, session: Session, voter: str, address: str | None, now: datetime) -> None:
        """Add a person if needed, and lock them until the transaction ends."""
        query = select(VoterRow).filter_by(id=voter).with_for_update()
        while (row := session.scalar(query)) is None:
            pseudonym = f"v{secrets.token_hex(8)}"
            _add_once(session, VoterRow(id=voter, pseudonym=pseudonym, created_at=now))
        if address is not None:
            row.address_hash = _address_hash(session, address, now)

    # --- for boards and files -------------------------------------------------------------------

    def votes(self, as_of: datetime | None = None) -> Iterator[VoteRow]:
        """Yield the standing votes of a time (None: of now), without those deleted since, in order of time.

        Doubtful votes and those of battles that were not blind are included: see `VoteRow`.
        """
        query = vote_columns(as_of).order_by(RevisionRow.at, BattleRow.id)
        with self.database.reading() as session:
            for row in session.execute(query.execution_options(yield_per=1000)):
                yield vote_row(row)

    def stamp(self, as_of: datetime | None = None) -> tuple[int, ...]:
        """Return a stamp that changes whenever a vote is cast, revised, judged or deleted.

        It takes milliseconds where `votes` takes a second, so that a board can be cached. A verdict that
        replaces another does not show. The last number changes only when something is deleted.
        """
        revisions = select(func.count(), func.max(RevisionRow.id)).select_from(RevisionRow)
        if as_of is not None:
            revisions = revisions.where(RevisionRow.at <= as_of)
        battles = select(func.count(BattleRow.verdict), func.count(BattleRow.closed_reason))
        with self.database.reading() as session:
            return (
                *(number or 0 for number in session.execute(revisions).one()),
                *session.execute(battles).one(),
                session.scalar(select(func.max(DeletionRow.id))) or 0,
            )


def _add_once(session: Session, row: Base) -> None:
    """Add a row, unless another process has just added it."""
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError:
        pass


# --- pictures and addresses ---------------------------------------------------------------------


def _picture_name(image: Image) -> str:
    ending = "png" if image.media_type == "image/png" else "jpg"
    return f"{hashlib.sha256(image.data).hexdigest()[:32]}.{ending}"


def _drop_unused_pictures(session: Session, voter: str) -> None:
    histories = session.scalars(
        select(BattleRow.history).where(BattleRow.voter_id == voter, BattleRow.history.is_not(None))
    )
    used = {name for history in histories for said in history for name in said["images"]}
    unused = delete(PictureRow).where(
        PictureRow.voter_id == voter, PictureRow.name.not_in(sorted(used))
    )
    session.execute(unused)


def _address_hash(session: Session, address: str, now: datetime) -> str:
    today = now.date()
    session.execute(delete(SaltRow).where(SaltRow.day < (today - timedelta(days=1)).isoformat()))
    _add_once(session, SaltRow(day=today.isoformat(), salt=secrets.token_bytes(32)))
    salt = session.get_one(SaltRow, today.isoformat()).salt
    return hmac.new(salt, address.encode("utf-8", "replace"), "sha256").hexdigest()[:32]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _below(value: int | None, limit: int) -> bool | None:
    return None if value is None else value < limit


def _token(text: str) -> str | None:
    return storable(text)[:_MAX_TOKEN] or None
