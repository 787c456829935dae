"""The public file of votes: the same board, and nothing that leads to a person."""

import random
from datetime import UTC, datetime, timedelta

from compeer_core.taxonomy import Preference
from compeer_core.votes.leaderboard.board import Filters, Settings, Status, bradley_terry
from compeer_core.votes.public import public_rows
from compeer_core.votes.rows import VoteRow

NOON = datetime(2026, 11, 21, 12, 34, 56, 789, tzinfo=UTC)
PSEUDONYMS = [f"v{number:016x}" for number in random.Random(3).sample(range(2**60), 13)]


def made_votes():
    drawn = random.Random(7)
    votes = []
    for number in range(150):
        left, right = drawn.sample(["base", "ur", "urp"], 2)
        votes.append(
            VoteRow(
                battle_id=f"b{drawn.getrandbits(128):032x}",
                voter=drawn.choice(PSEUDONYMS),
                left=left,
                right=right,
                preference=drawn.choices(list(Preference), (5, 3, 1, 1))[0],
                blind=True,
                language="en",
                at=NOON + timedelta(hours=number),
                dwell_ms=4321,
                flags=("too_fast",) if number % 10 == 0 else (),
                verdict=drawn.choice(list(Preference)),
                rewards=(drawn.random(), drawn.random()),
                lengths=(drawn.randrange(200), drawn.randrange(200)),
            )
        )
    return votes


def numbers_of(votes, **filters):
    board = bradley_terry(votes, filters=Filters(**filters), settings=Settings(fits=60))
    assert board.status is Status.RANKED
    return board.model_dump(exclude={"vote_set"})


def test_the_board_of_a_public_file_has_the_same_numbers_to_the_last_digit():
    votes = made_votes()
    public = list(public_rows(votes))

    assert numbers_of(public) == numbers_of(votes)
    some = {"admit": ("too_fast",)}
    assert numbers_of(public, **some) == numbers_of(votes, **some)
    assert numbers_of(public, **some) != numbers_of(public)


def test_a_public_file_holds_no_name_of_a_person_or_battle_and_no_time_of_the_day():
    votes = made_votes()
    text = "\n".join(row.model_dump_json() for row in public_rows(votes))

    assert not [name for vote in votes for name in (vote.voter, vote.battle_id) if name in text]
    assert "12:34" not in text
    assert {row.dwell_ms for row in public_rows(votes)} == {None}
    assert {row.at.hour for row in public_rows(votes)} == {0}
    assert [row.battle_id for row in public_rows(votes)] == [f"b{n:03}" for n in range(1, 151)]


def test_the_order_of_the_rows_says_nothing():
    votes = made_votes()

    assert list(public_rows(votes[::-1])) == list(public_rows(votes))
