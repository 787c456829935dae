"""Votes as the rest of the program reads them: one row for each person and battle.

The store yields rows, the board counts them, and a file of rows (JSON lines) is enough to reproduce the
board elsewhere. A row has no words of the battle, and identifies the voter by a pseudonym only.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from compeer_core.config import FrozenModel
from compeer_core.row_files import UtcDatetime, read_rows, write_rows
from compeer_core.taxonomy import Preference

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class VoteRow(FrozenModel):
    """The vote of one person on one battle, in its last revision.

    Pairs name the left side first: the one shown first to this person (A; on a phone, the first page).
    """

    battle_id: Name
    voter: Name
    """A pseudonym; the same person has the same one in every battle."""
    left: Name
    """The name of the model on the left."""
    right: Name
    preference: Preference
    """``first`` means that the left reply is better."""
    blind: bool
    """The names of the models were hidden until the vote."""
    with_reasoning: bool = False
    """The reasoning of both sides was visible before the vote."""
    has_image: bool = False
    language: str
    """ISO 639-1, or `und`."""
    topic: str = ""
    """Empty if unknown."""
    rater_group: str = ""
    """Unused; kept for files of votes and databases, where it is empty."""
    at: UtcDatetime
    """Time of this revision."""
    dwell_ms: Count | None = None
    """Time from the end of both replies to the vote."""
    flags: tuple[Name, ...] = ()
    """Reasons to doubt the vote, such as `leaked`. A board leaves flagged votes out, and reports how
    many, unless its filters admit the flag."""
    verdict: Preference | None = None
    """The judge's answer on the same two replies; None if it has none."""
    rewards: tuple[Finite | None, Finite | None] | None = None
    """Total reward of each side; None if it was not scored."""
    lengths: tuple[Count, Count] | None = None
    """Characters of the two replies, for the effect of length."""

    @field_validator("flags")
    @classmethod
    def _sort_flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        # The order of flags is arbitrary and must not change a hash.
        return tuple(sorted(set(flags)))


def write_votes(path: Path, votes: Iterable[VoteRow]) -> int:
    """Replace a .jsonl file; return the number of rows."""
    return write_rows(path, votes)


def read_votes(path: Path) -> Iterator[VoteRow]:
    """Yield the votes of a .jsonl file; empty lines are skipped.

    Raises:
        ConfigError: The file cannot be read, or a line is not a vote: the sentence names file, line and
            problem.
    """
    return read_rows(path, VoteRow)
