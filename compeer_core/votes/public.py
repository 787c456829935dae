"""Votes for publication: enough to reproduce the board, and as little else as possible.

A row of the store identifies a person by a permanent pseudonym, with the microsecond of each vote and how
long they looked at the replies. About somebody in distress that reveals at which hours, how often and
about what they came to talk. So in a public file

* people and battles are numbers that hold in this file only; rows of one person can still be matched,
  since intervals need that;
* a time is reduced to its date;
* viewing times are left out;
* a group of raters with fewer than `FEW_CLUSTERS` people is not named.

Numbers follow the order of the pseudonyms, which are random. A board of such a file therefore draws the
same people in the same order: all of its numbers are those of the store's board, and only the hash of the
votes and the time differ.
"""

from collections.abc import Iterable, Iterator, Sequence

from compeer_core.stats import FEW_CLUSTERS
from compeer_core.votes.rows import VoteRow


def public_rows(votes: Sequence[VoteRow]) -> Iterator[VoteRow]:
    """Yield anonymised votes, ordered by battle."""
    people = _numbered("r", (vote.voter for vote in votes))
    battles = _numbered("b", (vote.battle_id for vote in votes))
    groups = set(large_groups(votes))
    for vote in sorted(votes, key=lambda vote: (battles[vote.battle_id], people[vote.voter])):
        day = vote.at.replace(hour=0, minute=0, second=0, microsecond=0)
        yield vote.model_copy(
            update={
                "battle_id": battles[vote.battle_id],
                "voter": people[vote.voter],
                "rater_group": vote.rater_group if vote.rater_group in groups else "",
                "at": day,
                "dwell_ms": None,
            }
        )


def large_groups(votes: Iterable[VoteRow]) -> list[str]:
    """Return the groups of raters that are large enough to be named; visitors are not a group."""
    members: dict[str, set[str]] = {}
    for vote in votes:
        members.setdefault(vote.rater_group, set()).add(vote.voter)
    return sorted(name for name, people in members.items() if name and len(people) >= FEW_CLUSTERS)


def _numbered(letter: str, names: Iterable[str]) -> dict[str, str]:
    ordered = sorted(set(names))
    width = len(str(len(ordered)))
    return {name: f"{letter}{number:0{width}}" for number, name in enumerate(ordered, start=1)}
