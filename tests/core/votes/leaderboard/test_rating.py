"""Bradley-Terry: closed forms first, then properties, then degenerate votes."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compeer_core.votes.leaderboard.rating import (
    Matches,
    components,
    fit,
    rank_intervals,
    ranks,
    resample,
)

NO_RIDGE = 1e-9


def matches(models, rows):
    """One vote set of (left, right, votes, points of the left)."""
    left, right, votes, points = zip(*rows, strict=True)
    return Matches(
        models,
        np.array(left),
        np.array(right),
        np.array([votes], float),
        np.array([points], float),
    )


def strengths_of(models, rows, ridge=NO_RIDGE):
    return fit(matches(models, rows), ridge).strengths[0]


# --- By hand -------------------------------------------------------------------------------------


def test_two_models_in_both_orders_have_a_closed_form():
    # On the left, model 0 gets 60 of 80 points: log 3. Model 1 gets 50 of 90: log 1.25.
    #   strength + position = log 3, -strength + position = log 1.25
    # so the strengths are (log 3 - log 1.25) / 2 = 0.438 apart, and the left gains 0.661.
    fitted = fit(matches(2, [(0, 1, 80, 60), (1, 0, 90, 50)]), NO_RIDGE)

    ahead = fitted.strengths[0, 0] - fitted.strengths[0, 1]
    assert ahead == pytest.approx((np.log(3) - np.log(1.25)) / 2, abs=1e-6)
    assert fitted.position[0] == pytest.approx((np.log(3) + np.log(1.25)) / 2, abs=1e-6)
    assert fitted.strengths[0].sum() == pytest.approx(0, abs=1e-12)


def test_a_tie_is_half_a_vote_for_either():
    # 5 wins, 3 losses, 4 ties are 7 of 12 points: log 7/5, whichever stood on the left
    ahead = strengths_of(2, [(0, 1, 12, 7), (1, 0, 12, 5)])

    assert ahead[0] - ahead[1] == pytest.approx(np.log(7 / 5), abs=1e-6)


def test_three_models_whose_odds_multiply_are_found_again():
    # 0 beats 1 with odds 2, 1 beats 2 with odds 3, so 0 beats 2 with odds 6
    rows = [(0, 1, 30, 20), (1, 2, 40, 30), (0, 2, 70, 60)]
    rows += [(b, a, votes, votes - points) for a, b, votes, points in rows]

    strengths = strengths_of(3, rows)

    # mean 0: the strengths are log 2 + log 3, log 3 and 0, less their mean
    mean = (np.log(6) + np.log(3)) / 3
    assert strengths == pytest.approx(np.array([np.log(6), np.log(3), 0]) - mean, abs=1e-6)


def test_the_ridge_draws_towards_even():
    # One vote for 0, ridge 1, d = strength_0 - strength_1 and position g. The slopes are zero where
    # 1 - sigmoid(d + g) = d / 2 = g, so that 1 - sigmoid(1.5 d) = d / 2, solved by d = 0.5865: 0.2932 on either side
    fitted = fit(matches(2, [(0, 1, 1, 1)]), ridge=1.0)

    d = fitted.strengths[0, 0] - fitted.strengths[0, 1]
    assert d == pytest.approx(0.5865, abs=1e-4)
    assert fitted.position[0] == pytest.approx(d / 2, abs=1e-5)


def test_the_prior_is_given_back_where_there_are_no_votes():
    prior = np.array([[1.0, -1.0, 0.3], [0.5, 0.0, -2.0]])

    fitted = fit(
        Matches(2, np.array([0]), np.array([1]), np.zeros((2, 1)), np.zeros((2, 1))),
        0.25,
        prior=prior,
    )

    assert fitted.position == pytest.approx(prior[:, 2], abs=1e-4)
    assert fitted.strengths == pytest.approx(np.array([[1.0, -1.0], [0.25, -0.25]]), abs=1e-4)


def test_a_prior_and_votes_are_weighed_by_the_ridge():
    # One tie, ridge 1, centres 1 and -1 of the strengths: with d = strength_0 - strength_1 and position
    # g, slopes are zero where 1/2 - sigmoid(d + g) = (d - 2) / 2 = g, so that d = 2 + 2g and
    # 1/2 - sigmoid(2 + 3g) = g, solved by g = -0.2679
    tie = Matches(2, np.array([0]), np.array([1]), np.array([[1.0]]), np.array([[0.5]]))

    fitted = fit(tie, ridge=1.0, prior=np.array([[1.0, -1.0, 0.0]]))

    assert fitted.position[0] == pytest.approx(-0.2679, abs=1e-4)
    assert fitted.strengths[0] == pytest.approx([0.7321, -0.7321], abs=1e-4)


# --- Properties ----------------------------------------------------------------------------------


@st.composite
def vote_sets(draw):
    models = draw(st.integers(2, 5))
    pair = st.tuples(st.integers(0, models - 1), st.integers(0, models - 1)).filter(
        lambda two: two[0] != two[1]
    )
    pairs = draw(st.lists(pair, min_size=1, max_size=12, unique=True))
    rows = []
    for left, right in pairs:
        votes = draw(st.integers(1, 500))
        rows.append((left, right, votes, draw(st.integers(0, 2 * votes)) / 2))
    return models, rows


@settings(max_examples=25, deadline=None)
@given(vote_sets(), st.randoms())
def test_renaming_the_models_renames_the_strengths(made, random):
    models, rows = made
    names = list(range(models))
    random.shuffle(names)

    plain = fit(matches(models, rows), 0.25)
    renamed = fit(matches(models, [(names[a], names[b], n, p) for a, b, n, p in rows]), 0.25)

    assert renamed.strengths[0][names] == pytest.approx(plain.strengths[0], abs=1e-5)
    assert renamed.position == pytest.approx(plain.position, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(vote_sets())
@example((2, [(0, 1, 288, 2.0)]))  # rounding ends the first line search
def test_turning_every_vote_round_turns_every_sign(made):
    models, rows = made

    plain = fit(matches(models, rows), 0.25)
    turned = fit(matches(models, [(a, b, n, n - p) for a, b, n, p in rows]), 0.25)

    assert turned.strengths == pytest.approx(-plain.strengths, abs=1e-5)
    assert turned.position == pytest.approx(-plain.position, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(vote_sets())
def test_with_its_mirror_image_a_vote_set_knows_no_position(made):
    models, rows = made
    mirrored = rows + [(b, a, n, n - p) for a, b, n, p in rows]

    fitted = fit(matches(models, mirrored), 0.25)
    again = fit(matches(models, [(b, a, n, p) for a, b, n, p in mirrored]), 0.25)

    assert fitted.position == pytest.approx(0, abs=1e-5)
    assert again.strengths == pytest.approx(-fitted.strengths, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(vote_sets())
def test_at_the_solution_points_are_what_is_expected_of_them(made):
    # The slope of the likelihood is zero: points - expected = ridge * strength, model by model.
    models, rows = made
    fitted = fit(matches(models, rows), 0.25)

    surplus = np.zeros(models)
    for left, right, votes, points in rows:
        logit = fitted.strengths[0, left] - fitted.strengths[0, right] + fitted.position[0]
        expected = votes / (1 + np.exp(-logit))
        surplus[left] += points - expected
        surplus[right] -= points - expected
    assert surplus == pytest.approx(0.25 * fitted.strengths[0], abs=1e-4)


def test_many_vote_sets_are_fitted_as_each_alone():
    rng = np.random.default_rng(3)
    votes = rng.integers(1, 50, size=(7, 4)).astype(float)
    points = np.floor(votes * rng.random((7, 4)))
    left, right = np.array([0, 1, 2, 3]), np.array([1, 2, 3, 0])
    alone = [
        fit(Matches(4, left, right, votes[i : i + 1], points[i : i + 1]), 0.25).strengths[0]
        for i in range(7)
    ]

    together = fit(Matches(4, left, right, votes, points), 0.25)

    assert together.strengths == pytest.approx(np.array(alone), abs=1e-5)


def test_on_well_connected_votes_an_iterative_solution_finds_the_same():
    rng = np.random.default_rng(11)
    true = np.array([0.9, 0.4, 0.0, -0.3, -1.0])
    points = np.zeros((5, 5))  # of the row's model against the column's
    for left, right in np.argwhere(~np.eye(5, dtype=bool)):
        won = rng.binomial(80, 1 / (1 + np.exp(true[right] - true[left])))
        ties = rng.integers(0, 20) / 2
        points[left, right] += won + ties
        points[right, left] += 80 - won + ties
    votes = points + points.T

    # Zermelo's iteration (Hunter, 2004, Annals of Statistics 32, 384-406), which knows no position
    worth = np.ones(5)
    for _ in range(2000):
        worth = points.sum(axis=1) / (votes / (worth[:, np.newaxis] + worth)).sum(axis=1)
    expected = np.log(worth) - np.log(worth).mean()

    # each vote in both orders
    rows = [(a, b, votes[a, b], points[a, b]) for a in range(5) for b in range(5) if a != b]
    assert strengths_of(5, rows) == pytest.approx(expected, abs=1e-5)


# --- Degenerate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.25, 1e-4])
def test_who_always_wins_has_a_finite_strength(ridge):
    strengths = strengths_of(3, [(0, 1, 1000, 1000), (1, 2, 1000, 1000)], ridge)

    assert np.isfinite(strengths).all()
    assert strengths[0] > strengths[1] > strengths[2]


def test_models_that_never_met_are_fitted_each_in_its_part():
    strengths = strengths_of(4, [(0, 1, 10, 8), (1, 0, 10, 2), (2, 3, 10, 8), (3, 2, 10, 2)], 0.25)

    assert strengths == pytest.approx([strengths[0], -strengths[0], strengths[0], -strengths[0]])


def test_one_vote_among_millions_keeps_the_fit_stable():
    strengths = strengths_of(3, [(0, 1, 5_000_000, 2_500_000.5), (1, 2, 1, 1)], 0.25)

    assert np.isfinite(strengths).all()
    assert strengths[1] > strengths[2]


# --- Resamples, ranks ----------------------------------------------------------------------------


def test_resamples_are_reproducible():
    # These numbers may never change: boards of earlier years must come out as they were.
    drawn = resample(raters=4, models=2, fits=2, seed=7)

    assert drawn.times.sum(axis=1).tolist() == [4, 4]
    assert drawn.times.astype(int).tolist() == [[1, 0, 1, 2], [1, 1, 0, 2]]
    assert drawn.prior.round(6).tolist() == [
        [-1.785267, -1.060511, 0.849386],
        [0.213965, -0.551926, 1.082678],
    ]


def test_raters_are_drawn_evenly_and_the_prior_is_standard_normal():
    drawn = resample(raters=50, models=9, fits=4000, seed=1)

    assert drawn.times.mean(axis=0) == pytest.approx(np.ones(50), abs=0.08)
    assert drawn.times.var(axis=0).mean() == pytest.approx(1 - 1 / 50, abs=0.03)
    assert drawn.prior.mean() == pytest.approx(0, abs=0.02)
    assert drawn.prior.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(drawn.prior) > 1.96).mean() == pytest.approx(0.05, abs=0.006)


def test_equal_strengths_share_a_rank():
    assert ranks(np.array([0.5, -1.0, 0.5 + 1e-9, 0.1])).tolist() == [1, 4, 1, 3]


def test_ranks_are_sure_only_where_differences_are():
    rng = np.random.default_rng(2)
    strengths = np.array([3.0, 0.05, 0.0, -3.0])
    draws = strengths + rng.normal(scale=0.2, size=(2000, 4))

    assert rank_intervals(strengths, draws, 500) == [(1, 1), (2, 3), (2, 3), (4, 4)]


def test_equal_models_can_have_any_rank():
    rng = np.random.default_rng(2)

    intervals = [
        rank_intervals(
            (truth := rng.normal(scale=0.2, size=4)),
            truth + rng.normal(scale=0.2, size=(300, 4)),
            500,
        )
        for _ in range(200)
    ]

    # All four are the best; at most one board in twenty may deny it to a given one.
    assert np.mean([of_board[0] == (1, 4) for of_board in intervals]) > 0.9


def test_components_are_named_by_their_first_model():
    both_ways = [(0, 3), (3, 0), (1, 2), (2, 1), (2, 4), (4, 2)]
    assert components(5, both_ways).tolist() == [0, 1, 1, 0, 1]
    # 0 -> 1 -> 2 -> 0 is a circle that 3 does not get back to
    assert components(4, [(0, 1), (1, 2), (2, 0), (2, 3)]).tolist() == [0, 0, 0, 3]
