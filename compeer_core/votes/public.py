"""Votes for publication: enough to reproduce the board, and as little else as possible.

A row of the store identifies a person by a permanent pseudonym, with the microsecond of each vote and how
long they looked at the replies. About somebody in distress that reveals at which hours, how often and
about what they came to talk. So in a public file

* people and battles are numbers that hold in this file only; rows of one person can still be matched,
  since intervals need that;
* a time is reduced to its date;
* viewing times are left out.

Numbers follow the order of the pseudonyms, which are random. A board of such a file therefore draws the
same people in the same order: all of its numbers are those of the store's board, and only the hash of the
votes and the time differ.
"""

from collections.abc import Iterable, Iterator, Sequence

from compeer_core.votes.rows import VoteRow


def public_rows(votes: Sequence[VoteRow]) -> Iterator[VoteRow]:
    """Yield anonymised votes, ordered by battle."""
    people = _numbered("r", (vote.voter for vote in votes))
    battles = _numbered("b", (vote.battle_id for vote in votes))
    for vote in sorted(votes, key=lambda vote: (battles[vote.battle_id], people[vote.voter])):
        day = vote.at.replace(hour=0, minute=0, second=0, microsecond=0)
        yield vote.model_copy(
            update={
                "battle_id": battles[vote.battle_id],
                "voter": people[vote.voter],
                "at": day,
                "dwell_ms": None,
            }
        )


def _numbered(letter: str, names: Iterable[str]) -> dict[str, str]:
    ordered = sorted(set(names))
    width = len(str(len(ordered)))
    return {name: f"{letter}{number:0{width}}" for number, name in enumerate(ordered, start=1)}
