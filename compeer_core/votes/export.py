"""Export votes as rows of CER, the training format, and import them.

A vote becomes a `CerRecord`: the history, the two replies in the order in which they were shown, the
preference, and the pseudonym of the person (`DecidedBy`, kind ``person``). Only votes are exported that the
board would count and whose words may be stored; the number of the others is reported by reason.

Rows of one conversation, and of conversations with the same opening words, are in one split. The split
depends on those words only, so it is the same in every export.

``.jsonl`` has one row per line. ``.csv`` has the same rows for spreadsheets: readable columns, and in the last
one the row itself, from which it is imported. Pictures are written into a folder beside the file, so that
the file's folder is the ``data_dir`` of training.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import IO

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload, undefer

from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord, DecidedBy, Split
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import read
from compeer_core.row_files import guarded, json_lines, opened, parse_row, replacing, write_lines
from compeer_core.votes.battles import Flag, SideStatus
from compeer_core.votes.reading import flags_of, standing_votes, storable
from compeer_core.votes.schema import (
    BattleRow,
    PictureRow,
    RevisionRow,
    SideRow,
    VoteRecord,
    VoterRow,
)
from compeer_core.votes.store import VoteStore

CORPUS = "compeer_votes"
LICENCE = "votes of visitors, kept with their consent"
NO_WORDS = "the words are not stored"
NAMED = "the names were visible"
NO_VOTE = "without a preference"
NOT_BY_PEOPLE = "not decided by people"
KNOWN = "already there"

_HELD_OUT: tuple[tuple[Split, int], ...] = (("test", 10), ("valid", 20))
"""Upper bounds in per cent of the hash range."""


@dataclass(frozen=True)
class Moved:
    """The result of an export or an import."""

    rows: int
    left_out: Mapping[str, int]
    """Number of votes or rows by reason; a vote with two flags counts under the first."""


def export_cer(
    path: Path,
    store: VoteStore | None = None,
    *,
    doubtful: bool = False,
    as_of: datetime | None = None,
    licence: str = LICENCE,
) -> Moved:
    """Write the votes of a store as rows of CER.

    Args:
        path: A .jsonl or .csv file.
        store: The store; None for the user's own.
        doubtful: Include flagged votes and those of battles that were not blind.
        as_of: Write the votes of this time; None for now.
        licence: The licence field of the rows.

    Raises:
        ConfigError: The name has another suffix, or the file cannot be written.
        StoreError: The database failed.
    """
    if store is None:
        with VoteStore() as own:
            return export_cer(path, own, doubtful=doubtful, as_of=as_of, licence=licence)
    left_out: Counter[str] = Counter()
    with store.database.reading() as session:
        records = _records(session, path, as_of, licence, left_out, doubtful=doubtful)
        count = write_cer(path, records)
    return Moved(count, dict(sorted(left_out.items())))


def write_cer(path: Path, records: Iterable[CerRecord]) -> int:
    """Replace a .jsonl or .csv file by rows of CER; return their number.

    Raises:
        ConfigError: The name has another suffix, or the file cannot be written.
    """
    encoding, write = _writer(path)
    try:
        with replacing(path, encoding) as file:
            return write(file, records)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def import_cer(path: Path, store: VoteStore, *, blind: bool = True) -> Moved:
    """Import rows of CER with people's preferences into a store, all or none.

    A row becomes a battle and a vote, flagged ``imported``; exported again, it is the same row. Known rows
    are skipped, so a file may be imported twice. Pictures are not imported.

    Args:
        path: A .jsonl or .csv file, as `export_cer` writes it.
        store: The store.
        blind: Whether model names were hidden from the voters.

    Raises:
        ConfigError: The file cannot be read, or a row is invalid: the sentence names it.
        StoreError: The database failed.
    """
    left_out: Counter[str] = Counter()
    count = 0
    now = store.now()
    with store.database.writing() as session:
        for record in _read(path):
            reason = _unfit(session, record)
            if reason is not None:
                left_out[reason] += 1
                continue
            _add(session, record, now, blind=blind)
            session.expunge_all()
            count += 1
    return Moved(count, dict(sorted(left_out.items())))


# --- from votes to rows ---------------------------------------------------------------------------


def _records(
    session: Session,
    path: Path,
    as_of: datetime | None,
    licence: str,
    left_out: Counter[str],
    *,
    doubtful: bool,
) -> Iterator[CerRecord]:
    query = standing_votes(as_of).order_by(RevisionRow.at, BattleRow.id)
    query = query.options(
        undefer(BattleRow.history),
        undefer(BattleRow.source_row),
        selectinload(BattleRow.sides).options(undefer(SideRow.turn), undefer(SideRow.reply)),
    )
    pictures = _Pictures(session, path)
    for revision, battle, voter in session.execute(query.execution_options(yield_per=200)):
        flags = [flag for flag in flags_of(battle, revision) if flag is not Flag.IMPORTED]
        if battle.source_row is None and battle.history is None:
            left_out[NO_WORDS] += 1
        elif flags and not doubtful:
            left_out[flags[0].value] += 1
        elif not battle.blind and not doubtful:
            left_out[NAMED] += 1
        elif battle.source_row is not None:
            yield CerRecord.model_validate_json(battle.source_row)
        else:
            yield _record(revision, battle, voter, licence, pictures)


def _record(
    revision: RevisionRow, battle: BattleRow, voter: VoterRow, licence: str, pictures: "_Pictures"
) -> CerRecord:
    case = _case(battle, licence, pictures)
    by = DecidedBy(kind="person", name=voter.pseudonym)
    steps = revision.steps or (None, None)
    first, second = (
        _candidate(side, judged, by) for side, judged in zip(battle.sides, steps, strict=True)
    )
    return CerRecord.model_validate(
        {
            "id": f"{case.id}@{battle.id}",
            "case": case,
            "first": first,
            "second": second,
            "preference": revision.preference,
            "preference_by": by,
        }
    )


def _candidate(side: SideRow, steps: list[bool | None] | None, by: DecidedBy) -> Candidate:
    turn = side.turn if side.turn and read(side.turn).is_complete else None
    is_judged = turn is not None and steps is not None and any(step is not None for step in steps)
    return Candidate.model_validate(
        {
            "author": side.model,
            "reply": side.reply or "",
            "turn": turn,
            "steps": tuple(steps) if is_judged and steps is not None else None,
            "steps_by": by if is_judged else None,
        }
    )


def _case(battle: BattleRow, licence: str, pictures: "_Pictures") -> Case:
    utterances = [CaseUtterance.model_validate(each) for each in battle.history or ()]
    opening = next(each.text for each in utterances if each.speaker is Speaker.SEEKER)
    source = _digest(" ".join(opening.split()).casefold())
    dialogue = f"{CORPUS}/{source}/{_digest(battle.dialogue_id or battle.id)}"
    rounds = sum(
        a.speaker is Speaker.SEEKER and b.speaker is Speaker.SUPPORTER
        for a, b in pairwise(utterances)
    )
    return Case(
        id=f"{dialogue}#{rounds}",
        dialogue_id=dialogue,
        source_id=f"{CORPUS}/{source}",
        corpus=CORPUS,
        language=battle.language,
        split=_split(source),
        licence=licence,
        round=rounds,
        rounds=rounds + 1,
        history=tuple(
            each.model_copy(
                update={"images": tuple(pictures.write(battle, name) for name in each.images)}
            )
            for each in utterances
        ),
        original=None,
    )


def _split(source: str) -> Split:
    drawn = int(source, 16) % 100
    return next((split for split, end in _HELD_OUT if drawn < end), "train")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Pictures:
    """Writes pictures into a folder beside a file, each once."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session = session
        self._folder = path.with_name(f"{path.stem}_pictures")

    def write(self, battle: BattleRow, name: str) -> str:
        """Return the path of the picture below the folder of the file."""
        target = self._folder / name
        if not target.exists():
            data = self._session.scalars(
                select(PictureRow.data).filter_by(voter_id=battle.voter_id, name=name)
            ).one()
            self._folder.mkdir(exist_ok=True)
            fresh = target.with_name(f"{name}.new")
            fresh.write_bytes(data)
            fresh.replace(target)
        return f"{self._folder.name}/{name}"


# --- from rows to votes ---------------------------------------------------------------------------


def _unfit(session: Session, record: CerRecord) -> str | None:
    if record.preference is None or record.preference_by is None or record.second is None:
        return NO_VOTE
    if record.preference_by.kind not in {"person", "people"}:
        return NOT_BY_PEOPLE
    own = record.id.rpartition("@")[2]  # as `export_cer` names them
    known = select(BattleRow.id).where(BattleRow.id.in_([storable(record.id), storable(own)]))
    return KNOWN if session.scalars(known.limit(1)).first() is not None else None


def _add(session: Session, record: CerRecord, now: datetime, *, blind: bool) -> None:
    assert record.preference_by is not None
    pseudonym = storable(record.preference_by.name)
    voter = session.scalars(select(VoterRow).filter_by(pseudonym=pseudonym)).first()
    if voter is None:
        voter = VoterRow(id=f"imported:{pseudonym}", pseudonym=pseudonym, created_at=now)
        session.add(voter)
        session.flush()
    battle = BattleRow(
        id=storable(record.id),
        voter_id=voter.id,
        opened_at=now,
        expires_at=now,
        seed=0,
        blind=blind,
        with_reasoning=False,
        language=storable(record.case.language),
        topic="",
        image_hash=_digest(images) if (images := _images(record)) else None,
        dialogue_id=storable(record.case.dialogue_id),
        imported=True,
        source_row=record.model_dump_json(),
    )
    for number, candidate in enumerate(record.candidates):
        battle.sides.append(
            SideRow(
                side=number,
                model=storable(candidate.author),
                seed=0,
                status=SideStatus.FINISHED,
                reply_length=len(candidate.reply),
                finished_at=now,
            )
        )
    session.add(battle)
    session.flush()
    session.add(
        RevisionRow(
            vote=VoteRecord(battle_id=battle.id, voter_id=voter.id),
            voter_id=voter.id,
            number=1,
            at=now,
            preference=record.preference,
            tags=[],
            note="",
            rate_limited=False,
            after_reveal=False,
        )
    )
    session.flush()


def _images(record: CerRecord) -> str:
    return " ".join(name for each in record.case.history for name in each.images)


# --- files ----------------------------------------------------------------------------------------


def _writer(path: Path) -> tuple[str, Callable[[IO[str], Iterable[CerRecord]], int]]:
    if path.suffix == ".jsonl":
        return "utf-8", write_lines
    if path.suffix == ".csv":
        return "utf-8-sig", _write_csv  # Excel detects UTF-8 by the byte order mark
    raise ConfigError(f"{path}: rows are stored as .jsonl or .csv, not {path.suffix or path}")


def _write_csv(file: IO[str], records: Iterable[CerRecord]) -> int:
    writer = csv.writer(file)
    writer.writerow(
        [
            "id",
            "split",
            "language",
            "history",
            "first",
            "second",
            "preference",
            "first_author",
            "second_author",
            "by",
            "row",
        ]
    )
    count = 0
    for record in records:
        second = record.second or Candidate(author="", reply="")
        history = "\n".join(f"{each.speaker.value}: {each.text}" for each in record.case.history)
        cells = (
            record.id,
            record.case.split,
            record.case.language,
            history,
            record.first.reply,
            second.reply,
            record.preference or "",
            record.first.author,
            second.author,
            "" if record.preference_by is None else record.preference_by.name,
            record.model_dump_json(),
        )
        writer.writerow([guarded(cell) for cell in cells])
        count += 1
    return count


def _read(path: Path) -> Iterator[CerRecord]:
    _writer(path)
    for where, row in json_lines(path) if path.suffix == ".jsonl" else _csv_rows(path):
        yield parse_row(CerRecord, where, row)


def _csv_rows(path: Path) -> Iterator[tuple[str, str]]:
    # A row may be longer than the default limit of 131,072 characters, which is a global setting.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with opened(path) as file:
            reader = csv.DictReader(file, strict=True)
            if "row" not in (reader.fieldnames or ()):
                raise ConfigError(f"{path}: has no column row, from which rows are imported")
            for number, cells in enumerate(reader, start=2):
                yield f"{path}, row {number}", cells["row"] or ""
    except csv.Error as error:
        raise ConfigError(f"{path}: is not CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
