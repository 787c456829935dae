"""Statistics: numbers worked out by hand, other libraries, then properties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import cohen_kappa_score

from compeer_core.stats import (
    Estimate,
    bootstrap_p,
    bootstrap_weights,
    clustered_share,
    cohen_kappa,
    estimate,
    expanded_errors,
    expanded_interval,
    gwet_ac1,
    holm,
    jackknife,
    krippendorff_alpha,
    raw_agreement,
    weighted_mean,
    wilson,
)

ONCE = np.ones((1, 1))


# --- Estimates and shares ------------------------------------------------------------------------


def test_an_estimate_without_n_is_written_without_it_and_read_back():
    with_n, without = (Estimate(value=1, low=0, high=2, n=n) for n in (3, None))

    assert without.model_dump_json() == '{"value":1.0,"low":0.0,"high":2.0}'
    for each in (with_n, without):
        assert Estimate.model_validate_json(each.model_dump_json()) == each


def test_an_estimate_is_mapped_with_its_interval():
    doubled = Estimate(value=1, low=0, high=3, n=7).mapped(lambda number: 2 * number)

    assert doubled == Estimate(value=2, low=0, high=6, n=7)


def test_wilson_by_hand():
    # z = 1.96, 95 of 100: centre (0.95 + 1.9207 / 100) / 1.038415, half width 0.0450
    share = wilson(95, 100)
    assert (share.value, round(share.low, 3), round(share.high, 3)) == (0.95, 0.888, 0.978)
    # 1 of 1: from 1 / (1 + z^2) to 1
    assert wilson(1, 1).low == pytest.approx(1 / (1 + 1.959964**2), abs=1e-6)
    assert wilson(1, 1).high == 1.0


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_that_of_scipy(counts):
    found, expected = wilson(*counts), binomtest(*counts).proportion_ci(method="wilson")

    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.n == counts[1]


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_shares_are_refused(successes, trials):
    with pytest.raises(ValueError, match="successes <= trials"):
        wilson(successes, trials)


def test_a_clustered_share_is_as_uncertain_as_people_differ():
    weights = bootstrap_weights(range(40))[1:]
    ten_each = np.full(40, 10.0)
    alike = clustered_share(np.tile([6.0, 6.0], 20), ten_each, weights)
    split = clustered_share(np.tile([10.0, 2.0], 20), ten_each, weights)

    assert alike.value == split.value == 0.6
    # 40 people who give 1.0 or 0.2: the standard error of their mean is 0.4 / sqrt(40) = 0.063
    assert split.low == pytest.approx(0.6 - 1.96 * 0.063, abs=0.02)
    assert split.high == pytest.approx(0.6 + 1.96 * 0.063, abs=0.02)
    # Nobody differs, so that resamples are all alike: the Wilson interval of 24 of 40
    assert (alike.low, alike.high) == pytest.approx((0.4460, 0.7365), abs=1e-4)


def test_votes_of_one_person_count_as_one_in_the_interval():
    found = clustered_share(np.array([50.0]), np.array([50.0]), np.ones((300, 1)))

    assert found.low == pytest.approx(0.2065, abs=1e-4)  # the Wilson interval of 1 of 1
    assert found.value == found.high == 1.0
    assert clustered_share(np.zeros(3), np.zeros(3), np.ones((300, 3))) is None


# --- Bootstrap -----------------------------------------------------------------------------------


def test_a_pair_may_name_a_cluster():
    names = ["a", "b", "a", "c"]
    pairs = [(0, name) for name in names]

    assert np.array_equal(bootstrap_weights(pairs), bootstrap_weights(names))


def test_resamples_draw_whole_clusters():
    weights = bootstrap_weights(["a", "b", "a", "c"], resamples=200)

    assert weights.shape == (201, 4)
    assert (weights[0] == 1).all()
    assert (weights[:, 0] == weights[:, 2]).all()
    per_cluster = weights[1:, [0, 1, 3]]
    assert (per_cluster.sum(axis=1) == 3).all()
    assert per_cluster.std() > 0


def test_a_weighted_mean_by_hand_leaves_out_unknown_values():
    weights = np.array([[1.0, 1.0, 1.0], [0.0, 2.0, 1.0], [0.0, 0.0, 3.0]])

    # (1 + 4) / 2; 2 * 4 / 2; nothing known
    assert weighted_mean(weights, [1.0, 4.0, math.nan]) == pytest.approx(
        [2.5, 4.0, math.nan], nan_ok=True
    )
    assert weighted_mean(weights, [True, False, True]) == pytest.approx([2 / 3, 1 / 3, 1.0])


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    values = np.random.default_rng(0).normal(size=400)

    found = estimate(weighted_mean(bootstrap_weights(range(400), 4000), values), 400)

    error = values.std(ddof=1) / math.sqrt(400)
    assert found.n == 400
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(
        (found.value - 1.96 * error, found.value + 1.96 * error), abs=0.1 * error
    )


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_an_undefined_measure_has_no_estimate(values):
    with pytest.raises(ValueError, match="undefined"):
        estimate(np.array(values), 1)


def test_an_expanded_interval_contains_its_value_and_widens_for_few_clusters():
    draws = np.random.default_rng(0).normal(size=20_000)

    assert expanded_interval(0.9, np.array([0.1, 0.2]), 9).high == 0.9
    assert expanded_interval(0.0, np.array([0.1, 0.2]), 9).low == 0.0
    for clusters in (5, 1000):
        # the draws are standard normal, so that the interval is +- its standard errors
        width = expanded_interval(0.0, draws, clusters).high
        assert width == pytest.approx(
            expanded_errors(clusters), abs=0.25 if clusters == 5 else 0.05
        )


def test_a_bootstrap_p_value_by_hand():
    # 20 of 199 resamples are at most 0: (20 + 0.5) / 200 = 0.1025, which is 1.2673 standard errors.
    # For 5 clusters sqrt(4 / 5) of them, 1.1335, and twice the tail of Student's t with 4 degrees: 0.3203
    draws = np.array([-1.0] * 20 + [1.0] * 179)

    assert bootstrap_p(draws, 5) == pytest.approx(0.3203, abs=1e-4)
    assert bootstrap_p(-draws, 5) == bootstrap_p(draws, 5)
    assert bootstrap_p(draws, 10_000) == pytest.approx(2 * 0.1025, abs=1e-3)
    assert bootstrap_p(np.zeros(50), 9) == 1.0


@given(st.integers(0, 10**6), st.integers(5, 200), st.floats(-4, 4))
@settings(max_examples=50)
def test_a_p_value_is_below_5_percent_where_the_interval_excludes_0(seed, clusters, shift):
    draws = shift + np.random.default_rng(seed).normal(size=4000)
    interval = expanded_interval(shift, draws, clusters)
    p = bootstrap_p(draws, clusters)

    assert 0 < p <= 1
    if not 0.045 < p < 0.055:
        assert (p < 0.05) == (interval.low > 0 or interval.high < 0)


def test_equal_systems_differ_significantly_as_rarely_as_claimed():
    rng = np.random.default_rng(7)
    weights = bootstrap_weights(range(8), 500)[1:]
    small = [bootstrap_p(weighted_mean(weights, rng.normal(size=8)), 8) < 0.05 for _ in range(1000)]

    assert sum(small) < 70  # 50 are expected


def test_holm_by_hand():
    # sorted: 4 * 0.005, 3 * 0.01, 2 * 0.02, 1 * 0.3
    assert holm([0.02, 0.005, 0.3, 0.01]) == pytest.approx([0.04, 0.02, 0.3, 0.03])
    assert holm([0.03, 0.04]) == pytest.approx([0.06, 0.06])  # never below a smaller p-value's
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_lies_between_no_correction_and_bonferroni_and_keeps_the_order(p_values):
    corrected = holm(p_values)

    for p, after in zip(p_values, corrected, strict=True):
        assert p <= after <= min(1.0, len(p_values) * p)
    in_order = [after for _, after in sorted(zip(p_values, corrected, strict=True))]
    assert in_order == sorted(in_order)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.array([1.0, 4.0, 2.0, 7.0])
    without = [np.delete(values, place).mean() for place in range(4)]

    found = jackknife(np.array([values.mean(), *without]), 4)

    assert found.value == 3.5
    assert found.high - found.value == pytest.approx(1.96 * values.std(ddof=1) / math.sqrt(4))
    alone = jackknife(np.array([2.0, 0.0]), 1)
    assert alone.low == alone.value == alone.high


# --- Agreement -----------------------------------------------------------------------------------


def test_kappa_by_hand():
    # 20 and 5, 10 and 15 of 50: equal 0.7; by chance (25 * 30 + 25 * 20) / 2500 = 0.5; 0.2 / 0.5
    assert cohen_kappa(np.array([[[20.0, 5.0], [10.0, 15.0]]])) == pytest.approx([0.4])
    assert np.isnan(cohen_kappa(np.array([[[20.0, 0.0], [0.0, 0.0]]]))).all()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=30).filter(
        lambda rows: len({label for row in rows for label in row}) > 1
    )
)
def test_kappa_is_that_of_scikit_learn(rows):
    table = np.zeros((1, 3, 3))
    np.add.at(table[0], tuple(np.transpose(rows)), 1)

    assert cohen_kappa(table)[0] == pytest.approx(cohen_kappa_score(*zip(*rows, strict=True)))


def test_agreement_of_two_raters_by_hand():
    # 118 items both True, 7 items one of each. Share of True 243 / 250 = 0.972.
    # raw: 118 / 125 = 0.944
    # AC1: p_e = 2 * 0.972 * 0.028 = 0.054432, (0.944 - 0.054432) / 0.945568 = 0.940776
    # alpha: D_o = 14 / 250; D_e = 2 * 243 * 7 / (250 * 249) = 0.054651; 1 - 0.056 / 0.054651
    counts, weights = np.array([[2.0, 0.0], [1.0, 1.0]]), np.array([[118.0, 7.0]])

    assert raw_agreement(counts, weights) == pytest.approx([0.944])
    assert gwet_ac1(counts, weights) == pytest.approx([0.940776], abs=1e-6)
    assert krippendorff_alpha(counts, weights) == pytest.approx([-0.024691], abs=1e-6)


def test_agreement_of_three_raters_with_missing_ratings_by_hand():
    # Ratings a a b, b b, a. raw: (1/3 + 1) / 2 = 2/3. Shares of a: (2/3 + 0 + 1) / 3 = 5/9.
    # AC1: p_e = 2 * 5/9 * 4/9 = 40/81; (54/81 - 40/81) / (41/81) = 14/41
    # alpha: the single rating is left out: a 2, b 3 of 5. Unequal pairs 4 / 2 in the first item.
    # D_o = 2 / 5, D_e = 2 * 2 * 3 / (5 * 4) = 3/5; 1 - 2/3
    counts, once = np.array([[2.0, 1.0], [0.0, 2.0], [1.0, 0.0]]), np.ones((1, 3))

    assert raw_agreement(counts, once) == pytest.approx([2 / 3])
    assert gwet_ac1(counts, once) == pytest.approx([14 / 41])
    assert krippendorff_alpha(counts, once) == pytest.approx([1 / 3])


def test_undefined_agreement_is_nan():
    single, alike = np.array([[1.0, 0.0]]), np.array([[3.0, 0.0]])

    assert np.isnan(raw_agreement(single, ONCE)).all()
    assert np.isnan(gwet_ac1(single, ONCE)).all()
    assert np.isnan(krippendorff_alpha(alike, ONCE)).all()
    assert gwet_ac1(alike, ONCE) == raw_agreement(alike, ONCE) == [1.0]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=10),
    st.randoms(),
)
def test_an_item_of_weight_two_counts_as_two_items(rows, random):
    counts = np.array(rows, dtype=float)
    times = np.array([[random.randint(0, 3) for _ in rows]], dtype=float)
    repeated = np.repeat(counts, times[0].astype(int), axis=0)
    once = np.ones((1, len(repeated)))

    for measure, least in ((raw_agreement, 0.0), (gwet_ac1, -1.0), (krippendorff_alpha, -math.inf)):
        value = measure(counts, times)[0]
        if len(repeated):
            assert value == pytest.approx(measure(repeated, once)[0], nan_ok=True)
        assert math.isnan(value) or least - 1e-9 <= value <= 1 + 1e-9
