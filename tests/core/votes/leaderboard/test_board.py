"""The board: numbers by hand, what does not matter, and what is said where there is too little."""

import math
import random
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.taxonomy import Preference
from compeer_core.votes.leaderboard.board import (
    ALL_FLAGS,
    Board,
    Filters,
    LeftOut,
    Settings,
    Status,
    bradley_terry,
)
from compeer_core.votes.leaderboard.text import (
    command,
    remarks,
    sentence,
    to_csv,
    to_json,
    to_markdown,
)
from compeer_core.votes.rows import VoteRow

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
FIRST, SECOND, BOTH, NEITHER = Preference
FREE = Settings(ridge=1e-9)
"""Next to no ridge, for what can be worked out by hand."""
FEW_FITS = Settings(fits=50)
"""For what does not depend on the number of resamples."""


def vote(number, left="a", right="b", preference=FIRST, *, voter=None, **more):
    return VoteRow(
        battle_id=f"battle-{number}",
        voter=f"rater-{number % 8}" if voter is None else voter,
        left=left,
        right=right,
        preference=preference,
        **{"blind": True, "language": "en", "at": NOON + timedelta(seconds=number)} | more,
    )


def votes_of(*groups, **more):
    """Votes of groups (left, right, preference, how many), spread evenly over eight raters."""
    votes = []
    for left, right, preference, many in groups:
        votes += [vote(len(votes) + i, left, right, preference, **more) for i in range(many)]
    return votes


def drawn_votes(number, raters=12, strengths=(0.8, 0.3, 0.0, -0.9), seed=0, position=0.2):
    """Votes as the model says they are made, with ties and votes for neither."""
    rng = np.random.default_rng(seed)
    votes = []
    for i in range(number):
        left, right = rng.choice(len(strengths), 2, replace=False)
        chance = 1 / (1 + math.exp(strengths[right] - strengths[left] - position))
        preference = FIRST if rng.random() < chance else SECOND
        odd = rng.random()
        preference = NEITHER if odd < 0.1 else BOTH if odd < 0.25 else preference
        verdict = preference if rng.random() < 0.5 else list(Preference)[rng.integers(4)]
        votes.append(
            vote(
                i,
                f"m{left}",
                f"m{right}",
                preference,
                voter=f"rater-{rng.integers(raters)}",
                verdict=verdict,
                rewards=(float(rng.normal()), float(rng.normal())),
                lengths=(int(rng.integers(200)), int(rng.integers(200))),
            )
        )
    return votes


def row_of(board, name):
    return next(row for row in board.models if row.model == name)


# --- By hand -------------------------------------------------------------------------------------


def test_two_models_have_the_scores_of_their_odds():
    # a on the left: 30 wins, 10 losses, 20 ties = 40 of 60 points, odds 2.
    # b on the left: 24 wins, 16 losses = 24 of 40 points, odds 1.5. Half the difference of the logs:
    # (log 2 - log 1.5) / 2 = 0.1438 logits, which are 0.1438 * 400 / log 10 = 24.99 points
    # apart; the position is worth (log 2 + log 1.5) / 2 = log sqrt 3, a share of 0.634
    board = bradley_terry(
        votes_of(
            ("a", "b", FIRST, 30),
            ("a", "b", SECOND, 10),
            ("a", "b", BOTH, 20),
            ("b", "a", FIRST, 24),
            ("b", "a", SECOND, 16),
            ("a", "b", NEITHER, 25),
        ),
        settings=FREE,
    )

    assert board.status is Status.RANKED
    assert [row.model for row in board.models] == ["a", "b"]
    first, second = board.models
    assert first.score.value == pytest.approx(1000 + 24.99 / 2, abs=0.06)
    assert second.score.value == pytest.approx(1000 - 24.99 / 2, abs=0.06)
    assert (first.votes, first.wins, first.losses, first.ties, first.neither) == (
        125,
        46,
        34,
        20,
        25,
    )
    assert first.win_share.value == 0.575  # 46 of 80 decided
    assert first.unacceptable_share.value == second.unacceptable_share.value == 0.2  # 25 of 125
    assert board.effects.left_share.value == pytest.approx(
        math.sqrt(3) / (1 + math.sqrt(3)), abs=1e-4
    )
    assert (board.votes, board.comparing, board.raters) == (125, 100, 8)


def test_votes_for_neither_leave_scores_as_they_are():
    compared = votes_of(("a", "b", FIRST, 30), ("b", "a", FIRST, 20))
    unacceptable = [vote(100 + i, "a", "b", NEITHER) for i in range(40)]

    plain, more = bradley_terry(compared), bradley_terry(compared + unacceptable)

    assert [row.score for row in more.models] == [row.score for row in plain.models]
    assert row_of(more, "a").unacceptable_share.value == pytest.approx(40 / 90, abs=1e-4)
    assert row_of(plain, "a").unacceptable_share.value == 0


def test_the_pair_table_counts_from_the_first():
    board = bradley_terry(
        votes_of(
            ("a", "b", FIRST, 9),
            ("b", "a", FIRST, 4),
            ("b", "a", SECOND, 3),
            ("a", "b", BOTH, 2),
            ("b", "a", NEITHER, 1),
            ("a", "c", FIRST, 5),
        )
    )

    pair = next(pair for pair in board.pairs if {pair.first, pair.second} == {"a", "b"})
    assert (pair.first, pair.wins, pair.losses, pair.ties, pair.neither) == ("a", 12, 4, 2, 1)
    assert pair.votes == 19
    assert pair.win_share.value == 0.75
    assert {(pair.first, pair.second) for pair in board.pairs} == {("a", "b"), ("a", "c")}


def test_the_judge_is_compared_on_the_four_answers():
    # A person's answers in rows, the judge's in columns: 20 and 5, 10 and 15 of 50.
    # Same answer 35 / 50 = 0.7. By chance (25 * 30 + 25 * 20) / 2500 = 0.5, so kappa is 0.4.
    # AC1: shares 0.55 and 0.45, by chance 2 * 0.2475 / 3 = 0.165, so (0.7 - 0.165) / 0.835 = 0.6407
    board = bradley_terry(
        votes_of(("a", "b", FIRST, 20), verdict=FIRST)
        + [vote(100 + i, preference=FIRST, verdict=NEITHER) for i in range(5)]
        + [vote(200 + i, preference=NEITHER, verdict=FIRST) for i in range(10)]
        + [vote(300 + i, preference=NEITHER, verdict=NEITHER) for i in range(15)]
        + [vote(400 + i, preference=SECOND) for i in range(7)]
    )

    judge = board.judge
    assert (judge.votes, judge.raters) == (50, 8)
    assert judge.table[FIRST][NEITHER] == 5
    assert judge.table[NEITHER][FIRST] == 10
    assert sum(sum(inner.values()) for inner in judge.table.values()) == 50
    assert judge.raw.value == 0.7
    assert judge.kappa.value == pytest.approx(0.4)
    assert judge.ac1.value == pytest.approx(0.6407, abs=1e-4)
    assert judge.kappa.low < 0.4 < judge.kappa.high


def test_rewards_and_lengths_are_set_beside_decided_votes():
    board = bradley_terry(
        [vote(i, rewards=(3.0, 1.0), lengths=(10, 20)) for i in range(6)]
        + [vote(10 + i, rewards=(1.0, 1.0), lengths=(20, 10)) for i in range(2)]
        + [vote(20 + i, rewards=(None, 1.0), lengths=(10, 10)) for i in range(8)]
        + [vote(30, preference=SECOND, rewards=(0.0, 2.0)), vote(31, rewards=(0.0, 2.0))]
        + [vote(40, preference=BOTH, rewards=(1.0, 2.0), lengths=(10, 20))]
    )

    # agreed: 6, half of 2, and 1 of 2, out of 10
    assert (board.judge.reward_share.value, board.judge.reward_votes) == (0.8, 10)
    # the longer one won 2 of the 8 votes whose lengths are known and differ
    assert (board.effects.longer_share.value, board.effects.longer_votes) == (0.25, 8)


def test_the_head_sentence_is_about_the_best_and_whom_it_met_most():
    board = bradley_terry(
        votes_of(
            ("urp", "base", FIRST, 15),
            ("base", "urp", SECOND, 15),
            ("urp", "base", SECOND, 5),
            ("base", "urp", FIRST, 5),
            ("urp", "base", BOTH, 7),
            ("urp", "sft", FIRST, 6),
            ("sft", "urp", SECOND, 6),
            ("sft", "base", FIRST, 6),
            ("base", "sft", SECOND, 6),
        )
    )

    assert board.headline.model == "urp"
    assert (board.headline.against, board.headline.votes, board.headline.raters) == ("base", 40, 8)
    assert sentence(board).startswith("urp is preferred to base in 75 % of decided votes (95 % CI ")
    assert sentence(board).endswith(", 40 votes, 8 raters).")


def test_the_first_can_have_lost_to_the_one_it_met_most():
    # Nearly always on the right, where 8 of 20 is much, since the left wins 18 of 20 otherwise.
    board = bradley_terry(
        votes_of(
            ("b", "a", FIRST, 24),
            ("b", "a", SECOND, 16),
            ("c", "b", FIRST, 18),
            ("c", "b", SECOND, 2),
            ("b", "c", FIRST, 18),
            ("b", "c", SECOND, 2),
        )
    )

    assert board.models[0].model == "a"
    assert sentence(board).startswith(
        "a ranks first after correction for position, but won 40 % of decided votes against b (95 % CI "
    )


def test_what_can_be_chance_is_called_so():
    board = bradley_terry(votes_of(("a", "b", FIRST, 21), ("b", "a", FIRST, 20)))

    assert board.headline.win_share.low < 0.5
    assert "This may be chance" in sentence(board)
    assert board.models[0].rank_high == 2
    assert board.models[1].rank_low == 1


# --- What does not matter, and what does ---------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_the_order_of_votes_changes_no_byte(seed, order):
    votes = drawn_votes(60, seed=seed)
    shuffled = random.Random(order).sample(votes, len(votes))

    boards = (bradley_terry(each, settings=FEW_FITS) for each in (votes, shuffled))
    assert len({to_json(board) for board in boards}) == 1


def test_the_seed_moves_intervals_and_nothing_else():
    votes = drawn_votes(200)

    first, other = (bradley_terry(votes, settings=Settings(seed=seed)) for seed in (1, 2))

    assert [row.score.value for row in first.models] == [row.score.value for row in other.models]
    assert [row.score.low for row in first.models] != [row.score.low for row in other.models]
    assert first.vote_set == other.vote_set


def test_the_hash_is_that_of_the_counted_votes():
    votes = drawn_votes(40)
    plain = bradley_terry(votes)

    assert bradley_terry([*votes, vote(99, blind=False)]).vote_set == plain.vote_set
    for changed in (
        votes[:-1],
        [*votes[:-1], votes[-1].model_copy(update={"dwell_ms": 1})],
        [*votes[:-1], votes[-1].model_copy(update={"voter": "other"})],
    ):
        assert bradley_terry(changed).vote_set != plain.vote_set


# --- Ridge and coverage --------------------------------------------------------------------------


def test_intervals_hold_the_truth_where_raters_differ():
    # Ten raters with a taste of their own give 20 votes each: an interval over votes would be too
    # narrow. What is true of all possible raters is to lie inside in 95 % of boards.
    rng = np.random.default_rng(5)
    inside_score, inside_share, wide = [], [], []
    for board_number in range(100):
        votes = []
        for rater in range(10):
            taste = rng.normal(scale=1.0)
            for i in range(20):
                ahead = rng.random() < 1 / (1 + math.exp(-taste))
                left = bool(i % 2)
                votes.append(
                    vote(
                        rater * 20 + i,
                        *(("a", "b") if left else ("b", "a")),
                        FIRST if ahead == left else SECOND,
                        voter=f"r{rater}",
                    )
                )
        row = row_of(bradley_terry(votes, settings=Settings(seed=board_number, fits=200)), "a")
        inside_score.append(row.score.low <= 1000 <= row.score.high)
        inside_share.append(row.win_share.low <= 0.5 <= row.win_share.high)
        wide.append(row.win_share.high - row.win_share.low)

    assert np.mean(inside_score) > 0.9
    assert np.mean(inside_share) > 0.9
    # 200 votes taken as independent would give an interval of 0.14
    assert np.mean(wide) > 0.22


def test_rank_intervals_hold_the_true_ranks():
    inside = []
    for seed in range(40):
        board = bradley_terry(
            drawn_votes(250, raters=20, strengths=(0.9, 0.2, 0.0, -0.8), seed=seed),
            settings=Settings(fits=200, seed=seed),
        )
        inside += [
            row.rank_low <= true <= row.rank_high
            for true, name in enumerate(["m0", "m1", "m2", "m3"], start=1)
            for row in [row_of(board, name)]
        ]

    assert np.mean(inside) > 0.95


# --- Too little, or too odd ----------------------------------------------------------------------


def test_without_votes_there_is_a_board_that_says_so():
    board = bradley_terry([])

    assert board.status is Status.NOT_ENOUGH_VOTES
    assert (board.comparing, board.needed) == (0, 20)
    assert sentence(board) == "Not enough votes to rank models: 0 of 20 needed."
    assert board.models == board.pairs == ()
    assert board.judge.raw is board.judge.kappa is board.headline is board.influence is None
    assert "0 votes of 0 raters" in to_markdown(board)
    assert to_csv(board) == ""
    assert Board.model_validate_json(to_json(board)) == board


def test_votes_for_neither_do_not_make_enough():
    board = bradley_terry(votes_of(("a", "b", FIRST, 19), ("a", "b", NEITHER, 100)))

    assert board.status is Status.NOT_ENOUGH_VOTES
    assert sentence(board) == "Not enough votes to rank models: 19 of 20 needed."
    assert {row.rank for row in board.models} == {None}
    assert {row.score for row in board.models} == {None}
    assert row_of(board, "a").wins == 19


def test_many_votes_of_few_people_are_not_enough():
    board = bradley_terry([vote(i, voter=f"r{i % 4}") for i in range(100)])

    assert board.status is Status.NOT_ENOUGH_RATERS
    assert sentence(board) == "Not enough people to rank models: 4 of 5 needed, with 100 votes."
    # 100 of 100, but of four people: Wilson's interval of 4 out of 4
    assert row_of(board, "a").win_share.low == pytest.approx(0.5101, abs=1e-4)


def test_models_that_never_met_are_not_ranked():
    board = bradley_terry(
        votes_of(("a", "b", FIRST, 20), ("b", "a", FIRST, 9), ("c", "d", FIRST, 15))
    )

    assert board.status is Status.DISCONNECTED
    assert board.parts == (("a", "b"), ("c", "d"))
    assert sentence(board) == (
        "No ranks: nobody compared a model of one group with one of another (a, b; c, d)."
    )
    assert {row.rank for row in board.models} == {None}
    assert board.headline is board.influence is None
    assert len(board.pairs) == 2


def test_a_vote_for_neither_connects_nothing_and_disconnects_nothing():
    ranked = votes_of(("a", "b", FIRST, 20), ("b", "a", FIRST, 9))
    board = bradley_terry([*ranked, vote(90, "c", "a", NEITHER), vote(91, "d", "c", NEITHER)])

    assert board.status is Status.RANKED
    assert [row.model for row in board.models] == ["a", "b", "c", "d"]
    assert [row.rank for row in board.models] == [1, 2, None, None]
    assert row_of(board, "c").unacceptable_share.value == 1.0
    assert row_of(board, "c").win_share is None


def test_who_always_wins_is_ranked_with_a_wide_interval_and_a_word():
    board = bradley_terry(
        votes_of(
            ("a", "b", FIRST, 15),
            ("b", "a", SECOND, 15),
            ("b", "c", FIRST, 15),
            ("c", "b", FIRST, 15),
        )
    )

    best = row_of(board, "a")
    assert (best.rank, best.rank_low, best.rank_high) == (1, 1, 1)
    assert board.never_lost == ("a",)
    assert best.score.high - best.score.low > 150
    assert best.win_share.value == best.win_share.high == 1
    assert best.win_share.low == pytest.approx(0.6756, abs=1e-4)  # Wilson, 8 out of 8
    assert any("Never lost" in remark for remark in remarks(board))


def test_a_board_of_ties_prefers_nobody():
    board = bradley_terry(votes_of(("a", "b", BOTH, 40)))

    assert [row.rank for row in board.models] == [1, 1]
    assert {row.score.value for row in board.models} == {1000.0}
    assert board.headline is None
    assert sentence(board) == "Every vote was a tie: no model is preferred."
    assert {row.win_share for row in board.models} == {None}


def test_a_judge_that_always_agrees_has_no_kappa_where_all_say_the_same():
    alike = bradley_terry([vote(i, verdict=FIRST) for i in range(40)]).judge
    differing = bradley_terry(
        [
            vote(i, preference=preference, verdict=preference)
            for i, preference in enumerate([FIRST, SECOND] * 20)
        ]
    ).judge

    assert alike.kappa is None
    assert alike.ac1.value == alike.raw.value == 1
    assert differing.kappa.value == 1


def test_the_board_states_if_one_person_can_change_the_order():
    votes = [vote(i, preference=SECOND if i % 2 else FIRST, voter=f"r{i % 6}") for i in range(60)]
    votes += [vote(100 + i, preference=FIRST, voter="zealot") for i in range(10)]
    votes += [vote(200 + i, preference=SECOND, voter="other") for i in range(9)]
    board = bradley_terry(votes)
    calm = bradley_terry(votes_of(("a", "b", FIRST, 60), ("b", "a", FIRST, 20)))

    assert not board.influence.order_holds
    assert board.influence.tried == 8
    assert board.influence.largest_shift > 5
    assert any("depends on single raters" in remark for remark in remarks(board))
    assert calm.influence.order_holds


def test_the_most_lopsided_votes_give_finite_numbers_only():
    board = bradley_terry(
        [vote(i, "a", "b") for i in range(5000)] + [vote(9000, "b", "c", SECOND)],
    )

    def numbers(value):
        if isinstance(value, dict):
            return [number for inner in value.values() for number in numbers(inner)]
        if isinstance(value, (list, tuple)):
            return [number for inner in value for number in numbers(inner)]
        return [value] if isinstance(value, float) else []

    values = numbers(board.model_dump())
    assert len(values) > 30
    assert all(math.isfinite(number) for number in values)


# --- Which votes count ---------------------------------------------------------------------------


def test_every_vote_left_out_is_counted_under_its_reason():
    board = bradley_terry(
        [
            *votes_of(("a", "b", FIRST, 20)),
            vote(50, blind=False),
            vote(51, blind=False, flags=("leaked",)),
            vote(52, flags=("leaked",)),
            vote(53, flags=("leaked", "too_fast")),
            vote(54, "a", "a"),
            vote(55, voter="x"),
            vote(55, preference=SECOND, voter="x", at=NOON + timedelta(hours=1)),
        ]
    )

    assert board.votes == 21
    assert board.left_out == LeftOut(superseded=1, same_model=1, other_kind=2, flagged=2)
    assert board.flags == {"leaked": 2, "too_fast": 1}
    assert row_of(board, "b").wins == 1
    assert "left out: superseded 1, same model 1, other kind 2, flagged 2" in to_markdown(board)


@pytest.mark.parametrize(
    ("filters", "battles"),
    [
        (Filters(), {0, 1, 2, 3, 4}),
        (Filters(languages=("zh",)), {1}),
        (Filters(languages=("zh", "en"), topics=("work", "grief")), {2}),
        (Filters(has_image=True), {4}),
        (Filters(has_image=False, with_reasoning=True), {3}),
        (Filters(kind="named"), {5}),
        (Filters(kind="any"), {0, 1, 2, 3, 4, 5}),
        (Filters(admit=("leaked",)), {0, 1, 2, 3, 4, 6}),
        (Filters(admit=("too_fast",)), {0, 1, 2, 3, 4}),
        (Filters(admit=(ALL_FLAGS,)), {0, 1, 2, 3, 4, 6, 7}),
    ],
)
def test_filters_choose_votes(filters, battles):
    votes = [
        vote(0),
        vote(1, language="zh"),
        vote(2, topic="work"),
        vote(3, with_reasoning=True),
        vote(4, has_image=True),
        vote(5, blind=False),
        vote(6, flags=("leaked",)),
        vote(7, flags=("leaked", "too_fast")),
    ]

    chosen = bradley_terry(votes, filters=filters)

    assert chosen.votes == len(battles)
    expected = bradley_terry(
        [votes[number] for number in battles], filters=Filters(kind="any", admit=(ALL_FLAGS,))
    )
    assert chosen.vote_set == expected.vote_set
    assert chosen.filters == filters


def test_later_votes_are_ignored():
    votes = [vote(i) for i in range(30)]

    board = bradley_terry(votes, as_of=NOON + timedelta(seconds=9))

    assert board.votes == 10
    assert board.left_out == LeftOut()
    with pytest.raises(ValueError, match="zone"):
        bradley_terry(votes, as_of=datetime(2026, 11, 21))  # noqa: DTZ001


def test_the_later_vote_of_one_person_counts_in_either_order():
    early = vote(1, voter="x")
    late = early.model_copy(update={"preference": SECOND, "at": NOON + timedelta(days=1)})

    for votes in ([early, late], [late, early]):
        board = bradley_terry(votes)
        assert (row_of(board, "b").wins, board.left_out.superseded) == (1, 1)


# --- Files ---------------------------------------------------------------------------------------

SPITEFUL = "=1+1|<b>*x*\n`rm`\u202e"


def test_names_break_neither_table():
    board = bradley_terry(votes_of((SPITEFUL, "b", FIRST, 30), ("b", SPITEFUL, FIRST, 5)))

    lines = to_markdown(board).split("\n")
    table = [line for line in lines if line.startswith("|")]
    for line in table:
        assert line.replace("\\|", "").count("|") in {10, 12}
    assert "<b>" not in to_markdown(board).replace("\\<b\\>", "")
    assert all("`rm`" not in line.replace("\\`rm\\`", "") for line in lines)
    assert "'=1+1" in to_csv(board)
    assert Board.model_validate_json(to_json(board)) == board


def test_tables_hold_what_the_board_holds():
    board = bradley_terry(drawn_votes(120))

    models = to_csv(board).splitlines()
    assert models[0].startswith("rank,rank_low,rank_high,model,score,score_low,score_high,votes,")
    assert len(models) == 5
    best = board.models[0]
    assert models[1].startswith(
        f"1,{best.rank_low},{best.rank_high},{best.model},{best.score.value},{best.score.low},"
    )
    assert len(to_csv(board, "pairs").splitlines()) == 1 + len(board.pairs)
    judge = to_csv(board, "judge").splitlines()
    assert len(judge) == 17
    assert sum(int(line.split(",")[2]) for line in judge[1:]) == board.judge.votes


def test_the_command_names_what_differs_from_the_default():
    board = bradley_terry(
        drawn_votes(30),
        filters=Filters(kind="any", languages=("zh", "en"), has_image=False, admit=("*",)),
        settings=Settings(seed=4, ridge=0.5),
        as_of=NOON + timedelta(days=1),
    )

    assert command(board) == (
        "python -m compeer_core.votes board --as-of 2026-11-22T12:00:00Z --seed 4 --ridge 0.5 "
        "--kind any --language=zh --language=en '--admit=*' --image without"
    )
