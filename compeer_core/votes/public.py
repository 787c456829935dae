"""Votes as anybody may have them: enough to make the board again, and as little else as that takes.

A row of the store names a person by a pseudonym that stays the same for ever, says to the
microsecond when they voted, and for how long they looked at the replies. Of somebody who came to talk
about their distress that says at which hours, how often and about what. So in a public file

* people and battles are numbers that hold in this file alone; only that two rows are of one person
  can be seen, since intervals need it;
* a time is a date;
* how long somebody looked at the replies is left out;
* a group of raters with fewer than `FEW_RATERS` people is not named.

Numbers are given in the order of the pseudonyms, which are random. A board of such a file therefore
draws the same people in the same order: all of its numbers are those of the board of the store, and
only the hash of the votes and the moment differ.
"""

from collections.abc import Iterable, Iterator, Sequence

from compeer_core.votes.rating import FEW_RATERS
from compeer_core.votes.rows import VoteRow


def public_rows(votes: Sequence[VoteRow]) -> Iterator[VoteRow]:
    """Yield votes without what they say about people, by number of battle."""
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
    """Return the groups of raters that are large enough to be named; visitors are no group."""
    members: dict[str, set[str]] = {}
    for vote in votes:
        members.setdefault(vote.rater_group, set()).add(vote.voter)
    return sorted(name for name, people in members.items() if name and len(people) >= FEW_RATERS)


def _numbered(letter: str, names: Iterable[str]) -> dict[str, str]:
    ordered = sorted(set(names))
    width = len(str(len(ordered)))
    return {name: f"{letter}{number:0{width}}" for number, name in enumerate(ordered, start=1)}
