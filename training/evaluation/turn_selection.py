"""Reads turns for the consistency evaluation, and selects those that can be evaluated."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from compeer_core.cer import Candidate, Case, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.consistency import CLEAR_SIGNS, Followed, carries_out
from compeer_core.reasoning import Reading, SupportTurn, read
from training.data.records import read_records


class Rejected(StrEnum):
    """Reasons why a turn cannot be evaluated."""

    BARE = "no reasoning"
    INCOMPLETE = "the turn is not complete"
    ALONE = "no other reply to compare with"
    SAME = "both replies are the same"
    UNTOLD = "the signs cannot be told"
    UNREADABLE = "a judge could not be read"


@dataclass(frozen=True)
class Row:
    """A generated turn and a reference reply."""

    id: str
    case: Case
    text: str | None
    """The turn in the output grammar."""
    reference: str | None


@dataclass(frozen=True)
class Turn:
    """A turn that can be evaluated."""

    row: Row
    reading: Reading
    parsed: SupportTurn
    reference: str
    follows: bool
    """The reply carries out the strategy, according to its signs."""

    @property
    def has_clear_signs(self) -> bool:
        return self.parsed.reasoning.strategy.strategy in CLEAR_SIGNS


def select(row: Row) -> Turn | Rejected:
    """Return the turn, or the reason why it cannot be evaluated."""
    if row.text is None:
        return Rejected.BARE
    reading = read(row.text)
    if not reading.is_complete:
        return Rejected.INCOMPLETE
    turn = reading.turn
    if not row.reference:
        return Rejected.ALONE
    if _plain(row.reference) == _plain(turn.reply):
        return Rejected.SAME
    history = row.case.dialogue().merged()
    strategy = turn.reasoning.strategy.strategy
    followed = carries_out(history, turn.reply, strategy, row.case.language)
    if followed is Followed.UNKNOWN:
        return Rejected.UNTOLD
    return Turn(row, reading, turn, row.reference, followed is Followed.YES)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


class _WrittenTurn(FrozenModel):
    """The relevant fields of a generated turn (`steps/turns.jsonl`)."""

    model_config = ConfigDict(extra="ignore")

    id: str
    case: Case
    text: str


class _AnyRow(FrozenModel):
    """Distinguishes CER rows, which have `first`, from generated turns."""

    model_config = ConfigDict(extra="ignore")

    first: Any = None


def read_rows(paths: Iterable[Path], splits: Collection[str]) -> Iterator[Row]:
    """Yield the turns of the given splits.

    Raises:
        ConfigError: A file is missing or has another format.
    """
    for path in paths:
        is_cer = any(each.first is not None for each in islice(read_records(path, _AnyRow), 1))
        if is_cer:
            rows = (_row_of_record(record) for record in read_records(path, CerRecord))
        else:
            rows = (
                Row(each.id, each.case, each.text, each.case.original)
                for each in read_records(path, _WrittenTurn)
            )
        yield from (row for row in rows if row.case.split in splits)


def _row_of_record(record: CerRecord) -> Row:
    def row(candidate: Candidate, other: Candidate | None) -> Row:
        reference = record.case.original if other is None else other.reply
        return Row(record.id, record.case, candidate.turn, reference)

    if record.first.turn is None and record.second is not None:
        return row(record.second, record.first)
    return row(record.first, record.second)
