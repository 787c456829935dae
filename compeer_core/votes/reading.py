"""Conversion of table rows to battles, receipts and votes, and their queries."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Row, Select, func, select
from sqlalchemy.orm import Session, aliased, contains_eager

from compeer_core.errors import VoteRefusedError
from compeer_core.judgement import Reward
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import Battle, Flag, SidePlan, SideStatus, VoteReceipt
from compeer_core.votes.rows import VoteRow
from compeer_core.votes.schema import BattleRow, RevisionRow, SideRow, VoteRecord, VoterRow

_UNSTORABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_REVISION_FLAGS = (Flag.TOO_FAST, Flag.NOT_BOTH_SEEN, Flag.RATE_LIMITED, Flag.AFTER_REVEAL)
_LEFT, _RIGHT = aliased(SideRow), aliased(SideRow)


def storable(text: str) -> str:
    r"""Return a text without control characters and lone surrogates, which databases reject.

    Line breaks, tabs and other unusual text stay: right-to-left marks, zero-width characters, markup.
    Escape it for display.

    Example:
        >>> storable("a\x00b\n\u202e<b>")
        'ab\n\u202e<b>'
    """
    return _UNSTORABLE.sub("", text)


def refused(code: str, message: str, **values: object) -> VoteRefusedError:
    return VoteRefusedError(message, code, values)


def locked_battle(session: Session, battle_id: str) -> BattleRow | None:
    if storable(battle_id) != battle_id:
        return None
    return session.scalar(select(BattleRow).filter_by(id=battle_id).with_for_update())


def own_battle(session: Session, battle_id: str, voter: str, *, lock: bool = False) -> BattleRow:
    """Return a person's battle, with `lock` until the transaction ends.

    Raises:
        VoteRefusedError: ``battle_unknown`` or ``battle_not_yours``.
    """
    if storable(battle_id) != battle_id:
        battle = None
    elif lock:
        # Lock the person before the battle, as deletion does: otherwise the two could deadlock.
        session.scalar(_existing(voter))
        battle = locked_battle(session, battle_id)
    else:
        battle = session.get(BattleRow, battle_id)
    if battle is None:
        raise refused("battle_unknown", "there is no such battle")
    if battle.voter_id != voter:
        raise refused("battle_not_yours", "the battle belongs to somebody else")
    return battle


def _existing(voter: str) -> Select[str]:
    query = select(VoterRow.id).where(VoterRow.id == storable(voter))
    return query.with_for_update(read=True, key_share=True)


def revisions_of(session: Session, battle_id: str, voter: str) -> list[RevisionRow]:
    """Return all revisions of a person's vote in a battle, in order, with the vote loaded."""
    query = (
        select(RevisionRow)
        .join(RevisionRow.vote)
        .where(VoteRecord.battle_id == battle_id, VoteRecord.voter_id == voter)
        .order_by(RevisionRow.number)
        .options(contains_eager(RevisionRow.vote))
    )
    return list(session.scalars(query))


def latest_revision(session: Session, battle_id: str, voter: str) -> RevisionRow | None:
    """Return the last revision of a person's vote in a battle."""
    revisions = revisions_of(session, battle_id, voter)
    return revisions[-1] if revisions else None


def standing_votes(
    as_of: datetime | None,
) -> Select[RevisionRow, BattleRow, VoterRow]:
    """Select the last revision of each vote that is not withdrawn, with battle and voter."""
    numbers = select(RevisionRow.vote_id, func.max(RevisionRow.number).label("number"))
    if as_of is not None:
        numbers = numbers.where(RevisionRow.at <= as_of)
    last = numbers.group_by(RevisionRow.vote_id).subquery()
    return (
        select(RevisionRow, BattleRow, VoterRow)
        .join(last, (last.c.vote_id == RevisionRow.vote_id) & (last.c.number == RevisionRow.number))
        .join(VoteRecord, VoteRecord.id == RevisionRow.vote_id)
        .join(BattleRow, BattleRow.id == VoteRecord.battle_id)
        .join(VoterRow, VoterRow.id == VoteRecord.voter_id)
        .where(RevisionRow.preference.is_not(None))
    )


def vote_columns(as_of: datetime | None) -> Select[*tuple[Any, ...]]:
    """Select the columns of the standing votes that `vote_row` reads.

    Columns instead of objects: for 10,000 votes the session would create 50,000 objects, which takes several
    times as long as the board itself.
    """
    return (
        standing_votes(as_of)
        .join(_LEFT, (_LEFT.battle_id == BattleRow.id) & (_LEFT.side == 0))
        .join(_RIGHT, (_RIGHT.battle_id == BattleRow.id) & (_RIGHT.side == 1))
        .with_only_columns(
            *(getattr(RevisionRow, flag.value) for flag in _REVISION_FLAGS),
            RevisionRow.preference,
            RevisionRow.at,
            RevisionRow.dwell_ms,
            VoterRow.pseudonym,
            BattleRow.id,
            BattleRow.blind,
            BattleRow.with_reasoning,
            BattleRow.image_hash,
            BattleRow.language,
            BattleRow.topic,
            BattleRow.verdict,
            BattleRow.closed_reason,
            BattleRow.imported,
            *(
                getattr(side, column).label(f"{name}_{column}")
                for name, side in (("left", _LEFT), ("right", _RIGHT))
                for column in ("model", "reward", "reply_length", "leaked", "status")
            ),
            maintain_column_froms=True,
        )
    )


def vote_row(row: Row[Any]) -> VoteRow:
    """Return the vote of a row of `vote_columns`."""
    lengths = (row.left_reply_length, row.right_reply_length)
    rewards = tuple(
        None if reward is None else reward["total"]
        for reward in (row.left_reward, row.right_reward)
    )
    return VoteRow(
        battle_id=row.id,
        voter=row.pseudonym,
        left=row.left_model,
        right=row.right_model,
        preference=row.preference,
        blind=row.blind,
        with_reasoning=row.with_reasoning,
        has_image=row.image_hash is not None,
        language=row.language,
        topic=row.topic,
        at=row.at,
        dwell_ms=row.dwell_ms,
        flags=_flags(
            row,
            row,
            leaked=(row.left_leaked, row.right_leaked),
            statuses=(row.left_status, row.right_status),
        ),
        verdict=row.verdict,
        rewards=None if rewards == (None, None) else rewards,
        lengths=None if None in lengths else lengths,
    )


def flags_of(battle: BattleRow, revision: RevisionRow) -> tuple[Flag, ...]:
    return _flags(
        battle,
        revision,
        leaked=[side.leaked for side in battle.sides],
        statuses=[side.status for side in battle.sides],
    )


def _flags(
    battle: BattleRow | Row[Any],
    revision: RevisionRow | Row[Any],
    *,
    leaked: Iterable[bool | None],
    statuses: Iterable[str],
) -> tuple[Flag, ...]:
    flags = [flag for flag in _REVISION_FLAGS if getattr(revision, flag.value)]
    if any(leaked):
        flags.append(Flag.LEAKED)
    if SideStatus.STOPPED in statuses:
        flags.append(Flag.STOPPED)
    if battle.closed_reason is not None:
        flags.append(Flag.CLOSED)
    if battle.imported:
        flags.append(Flag.IMPORTED)
    return tuple(sorted(flags))


def receipt_of(battle: BattleRow, revision: RevisionRow) -> VoteReceipt:
    flags = flags_of(battle, revision)
    preference = None if revision.preference is None else Preference(revision.preference)
    return VoteReceipt(
        battle_id=battle.id,
        number=revision.number,
        preference=preference,
        at=revision.at,
        flags=flags,
        counted=battle.blind and preference is not None and not flags,
    )


def battle_of(row: BattleRow) -> Battle:
    left, right = row.sides
    return Battle(
        id=row.id,
        voter=row.voter_id,
        sides=(SidePlan(left.model, left.seed), SidePlan(right.model, right.seed)),
        statuses=(SideStatus(left.status), SideStatus(right.status)),
        blind=row.blind,
        with_reasoning=row.with_reasoning,
        opened_at=row.opened_at,
        expires_at=row.expires_at,
        closed=row.closed_reason,
    )


def reward_of(stored: Mapping[str, Any] | None) -> Reward | None:
    if stored is None:
        return None
    steps = stored["steps"]
    return Reward(**{**stored, "steps": None if steps is None else tuple(steps)})
