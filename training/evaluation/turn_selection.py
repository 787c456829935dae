"""Turns whose verdicts are to be compared: which there are, and which of them can count."""

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
from training.data.samples import read_records


class Rejected(StrEnum):
    """Why a turn does not count."""

    BARE = "no reasoning"
    INCOMPLETE = "the turn is not complete"
    ALONE = "no other reply to compare with"
    SAME = "both replies are the same"
    UNTOLD = "the signs cannot be told"
    UNREADABLE = "a judge could not be read"


@dataclass(frozen=True)
class Row:
    """A written turn and the reply that it is compared with."""

    id: str
    case: Case
    text: str | None
    """The turn in the output grammar."""
    reference: str | None


@dataclass(frozen=True)
class Turn:
    """A turn that is fit to be judged."""

    row: Row
    reading: Reading
    said: SupportTurn
    reference: str
    follows: bool
    """The reply carries out the strategy, by its signs."""

    @property
    def has_clear_signs(self) -> bool:
        return self.said.reasoning.strategy.strategy in CLEAR_SIGNS


def sift(row: Row) -> Turn | Rejected:
    """Return the turn, or why it cannot count whatever judges say."""
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
    """What is needed of a turn that a generator wrote for a case."""

    model_config = ConfigDict(extra="ignore")

    id: str
    case: Case
    text: str


class _AnyRow(FrozenModel):
    """Tells the two kinds of rows apart."""

    model_config = ConfigDict(extra="ignore")

    first: Any = None


def read_rows(paths: Iterable[Path], splits: Collection[str]) -> Iterator[Row]:
    """Yield the turns of some splits.

    Raises:
        ConfigError: A file is missing or holds something else.
    """
    for path in paths:
        kinds = {each.first is not None for each in islice(read_records(path, _AnyRow), 1)}
        if kinds == {True}:
            found = (_of_record(record) for record in read_records(path, CerRecord))
        else:
            found = (
                Row(each.id, each.case, each.text, each.case.original)
                for each in read_records(path, _WrittenTurn)
            )
        yield from (row for row in found if row.case.split in splits)


def _of_record(record: CerRecord) -> Row:
    def row(one: Candidate, other: Candidate | None) -> Row:
        reference = record.case.original if other is None else other.reply
        return Row(record.id, record.case, one.turn, reference)

    if record.first.turn is None and record.second is not None:
        return row(record.second, record.first)
    return row(record.first, record.second)
