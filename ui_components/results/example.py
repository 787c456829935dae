"""The example board, shown while there are too few votes for a ranking.

Its votes are simulated: a seeded generator draws them from fixed probabilities, about models that do not
exist. They are in no database, no download and no API, and the page says so.
"""

import random
from datetime import UTC, datetime, timedelta
from functools import cache

from compeer_core.taxonomy import Preference
from compeer_core.votes.leaderboard.board import Board, Settings, bradley_terry
from compeer_core.votes.rows import VoteRow

MODELS = ("A", "B", "C")
"""From the best to the worst."""
VOTES = 120
_RATERS = 12
_WEIGHTS = (10, 5, 3, 2)
"""Of the answers: the better model, the other one, both, neither."""
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@cache
def example_board() -> Board:
    """Return the board of the simulated votes, the same in every process."""
    return bradley_terry(_simulated_votes(), settings=Settings(fits=100))


def _simulated_votes() -> list[VoteRow]:
    rng = random.Random(0)
    votes = []
    for number in range(VOTES):
        left, right = rng.sample(MODELS, 2)
        better = Preference.FIRST if left < right else Preference.SECOND
        answers = (better, better.swapped(), Preference.BOTH, Preference.NEITHER)
        votes.append(
            VoteRow(
                battle_id=f"example-{number}",
                voter=f"simulated-{number % _RATERS}",
                left=left,
                right=right,
                preference=rng.choices(answers, _WEIGHTS)[0],
                blind=True,
                language="en",
                at=_BEGIN + timedelta(hours=number),
                lengths=(rng.randint(60, 240), rng.randint(60, 240)),
            )
        )
    return votes
