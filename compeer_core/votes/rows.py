"""Votes as the rest of the program reads them: one row for each person and battle.

The store yields rows, the board counts them, and a file of rows (JSON lines) is enough to count
them again elsewhere. A row says nothing about what was written in the battle, and of who voted only
a pseudonym.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from compeer_core.annotation.annotations import Date
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Preference

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class VoteRow(FrozenModel):
    """What one person said about one battle, in the last revision that counts.

    Whatever has two sides names the left one first, which is the one that stood first before this
    person's eyes (A; on a phone, the page opened first).
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
    """Nobody could see the names of the models before the vote."""
    with_reasoning: bool = False
    """The reasoning of both sides could be seen before the vote."""
    has_image: bool = False
    language: str
    """ISO 639-1, or `und`."""
    topic: str = ""
    """Empty where nobody said."""
    rater_group: str = ""
    """Of the voter: empty for visitors, else the group that they were invited to."""
    at: Date
    """When this revision was made, in UTC."""
    dwell_ms: Count | None = None
    """From the end of both replies to the vote."""
    flags: tuple[Name, ...] = ()
    """Reasons to doubt the vote, such as `leaked`. A board leaves a flagged vote out unless it is
    told to count votes with that flag, and says how many it left out."""
    verdict: Preference | None = None
    """What the judge said of the same two replies; None where it was not asked or could not say."""
    rewards: tuple[Finite | None, Finite | None] | None = None
    """The total of each side; None where it was not scored."""
    lengths: tuple[Count, Count] | None = None
    """Of the two replies, in characters, for the effect of length."""

    @field_validator("flags")
    @classmethod
    def _sort_flags(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        # The order in which reasons were found says nothing, and must not change a hash.
        return tuple(sorted(set(flags)))


def write_votes(path: Path, votes: Iterable[VoteRow]) -> int:
    """Write a .jsonl file under a temporary name, then rename; return the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    count = 0
    with fresh.open("w", encoding="utf-8", newline="\n") as file:
        for vote in votes:
            file.write(vote.model_dump_json() + "\n")
            count += 1
    fresh.replace(path)
    return count


def read_votes(path: Path) -> Iterator[VoteRow]:
    """Yield the rows of a .jsonl file; empty lines are passed over.

    Raises:
        ConfigError: The file cannot be read, or a line is no vote: the sentence names file, line
            and what is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(line, f"{path}, line {number}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8") from error


def _row(line: str, where: str) -> VoteRow:
    try:
        return VoteRow.model_validate_json(line)
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise ConfigError(f"{where}: {place + ': ' if place else ''}{detail['msg']}") from error
