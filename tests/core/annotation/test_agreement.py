"""Agreement and adjudication: published examples, numbers by hand, then what must always hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.annotation.agreement import Consensus, Unsettled, adjudicate, measure_agreement
from compeer_core.taxonomy import Preference


def pairs(cells):
    """Items rated by two people; cells maps (first label, second label) to how many there are."""
    return [{"a": a, "b": b} for (a, b), count in cells.items() for _ in range(count)]


def raw_ratings(rows):
    return [{str(rater): x for rater, x in enumerate(row) if x is not None} for row in rows]


FOUR_RATERS = raw_ratings(
    [
        [1, 1, None, 1],
        [2, 2, 3, 2],
        [3, 3, 3, 3],
        [3, 3, 3, 3],
        [2, 2, 2, 2],
        [1, 2, 3, 4],
        [4, 4, 4, 4],
        [1, 1, 2, 1],
        [2, 2, 2, 2],
        [None, 5, 5, 5],
        [None, None, 1, 1],
        [None, None, 3, None],
    ]
)
"""Four raters, five labels, ratings missing: the data set cac.raw4raters in Gwet's irrCAC."""


def test_four_raters_with_missing_ratings_as_published():
    # https://cran.r-project.org/web/packages/irrCAC/vignettes/overview.html
    found = measure_agreement(FOUR_RATERS, [1, 2, 3, 4, 5])

    assert (found.n_items, found.n_raters, found.n_ratings) == (11, 4, 41)
    assert found.raw.value == pytest.approx(0.8181818, abs=1e-7)
    assert found.ac1.value == pytest.approx(0.775444, abs=1e-5)
    assert found.alpha.value == pytest.approx(0.743421, abs=1e-6)


def test_three_diagnoses_by_two_abstractors_as_published():
    # cont3x3abstractors of the same vignette: raw 0.89, AC1 0.8493305, alpha 0.7972585. By hand:
    # shares 0.13, 0.255, 0.615: p_e = (0.1131 + 0.189975 + 0.236775) / 2 = 0.269925
    # (0.89 - 0.269925) / 0.730075 = 0.849330
    cells = {
        ("ectopic", "ectopic"): 13,
        ("aiu", "aiu"): 20,
        ("aiu", "niu"): 7,
        ("niu", "aiu"): 4,
        ("niu", "niu"): 56,
    }
    found = measure_agreement(pairs(cells), ["ectopic", "aiu", "niu"])

    assert found.raw.value == pytest.approx(0.89)
    assert found.ac1.value == pytest.approx(0.8493305, abs=1e-7)
    assert found.alpha.value == pytest.approx(0.7972585, abs=1e-7)


def test_a_rare_label_pulls_alpha_down_and_not_ac1():
    # 118 both True, 5 + 2 differ. Share of True 243 / 250 = 0.972.
    # AC1: p_e = 2 * 0.972 * 0.028 = 0.054432, (0.944 - 0.054432) / 0.945568 = 0.940776
    # alpha: D_o = 14 / 250; D_e = 2 * 243 * 7 / (250 * 249) = 0.054651; 1 - 0.056 / 0.054651
    cells = {(True, True): 118, (True, False): 5, (False, True): 2}
    found = measure_agreement(pairs(cells), [True, False])

    assert found.raw.value == pytest.approx(0.944)
    assert found.ac1.value == pytest.approx(0.940776, abs=1e-6)
    assert found.alpha.value == pytest.approx(-0.024691, abs=1e-6)
    assert found.shares == {"True": pytest.approx(0.972), "False": pytest.approx(0.028)}
    # Wilson's interval for 118 of 125
    assert (found.raw.low, found.raw.high) == pytest.approx((0.8889, 0.9726), abs=1e-4)


def test_unanimous_ratings_leave_alpha_undefined_and_the_others_not_certain():
    found = measure_agreement(pairs({(True, True): 20}), [True, False])

    assert found.alpha is None
    assert found.ac1.value == 1.0
    assert found.raw.value == 1.0
    assert found.raw.low == pytest.approx(20 / (20 + 1.959964**2), abs=1e-6)  # Wilson at 20 of 20


def test_agreement_by_two_labels_is_one_in_all_three_measures():
    found = measure_agreement(pairs({(True, True): 15, (False, False): 5}), [True, False])

    assert (found.raw.value, found.alpha.value, found.ac1.value) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("ratings", [[], [{}], [{"a": True}, {"b": False}]])
def test_without_two_ratings_of_one_item_nothing_is_defined(ratings):
    found = measure_agreement(ratings, [True, False])

    assert found.n_items == 0
    assert (found.raw, found.alpha, found.ac1) == (None, None, None)


def test_a_label_that_nobody_gave_counts_in_ac1():
    ratings = pairs({("first", "first"): 6, ("second", "second"): 3, ("first", "second"): 1})

    two = measure_agreement(ratings, ["first", "second"])
    four = measure_agreement(ratings, list(Preference))

    # shares 0.65, 0.35: p_e = 0.455 over Q - 1 = 1, and over Q - 1 = 3
    assert two.ac1.value == pytest.approx((0.9 - 0.455) / 0.545)
    assert four.ac1.value == pytest.approx((0.9 - 0.455 / 3) / (1 - 0.455 / 3))
    assert two.alpha == four.alpha


def test_the_same_seed_gives_the_same_intervals_and_others_nearly():
    first, again, other = (
        measure_agreement(FOUR_RATERS, range(1, 6), seed=seed) for seed in (0, 0, 1)
    )

    assert first == again
    assert first.ac1.value == other.ac1.value
    assert first.ac1.low == pytest.approx(other.ac1.low, abs=0.1)


def test_the_interval_of_ac1_holds_the_truth_about_as_often_as_it_says():
    # Both raters see the truth (True with 0.8) and slip with 0.1, each on their own:
    # p_a = 0.82, share of True 0.74, p_e = 0.3848
    truth = (0.82 - 0.3848) / (1 - 0.3848)
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(60):
        label = rng.random(150) < 0.8
        a, b = (label ^ (rng.random(150) < 0.1) for _ in range(2))
        items = [{"a": x, "b": y} for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        found = measure_agreement(items, [True, False])
        held += found.ac1.low <= truth <= found.ac1.high

    assert held >= 51  # fewer of 60 at 95 % would happen in 0.2 % of the runs; the seed is fixed


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz")), max_size=12),
    st.permutations("xyz"),
)
def test_measures_stay_in_range_and_do_not_depend_on_names_or_order(ratings, order):
    found = measure_agreement(ratings, "xyz")
    renamed = measure_agreement(
        [{rater.upper(): label for rater, label in item.items()} for item in ratings[::-1]], order
    )

    for name, least in (("raw", 0.0), ("alpha", -math.inf), ("ac1", -1.0)):
        measure, same = getattr(found, name), getattr(renamed, name)
        assert (measure is None) == (same is None)
        if measure is not None:
            assert measure.value == pytest.approx(same.value)
            assert least <= measure.low <= measure.high <= 1.0 + 1e-12
            assert all(math.isfinite(x) for x in (measure.value, measure.low, measure.high))


def test_an_unknown_label_is_rejected():
    with pytest.raises(ValueError, match="item 1: bo gave 'maybe'"):
        measure_agreement([{"ann": "yes"}, {"bo": "maybe"}], ["yes", "no"])


@pytest.mark.parametrize("labels", [[], ["yes"], ["yes", "yes"]])
def test_labels_must_be_two_different_ones(labels):
    with pytest.raises(ValueError, match="at least two different labels"):
        measure_agreement([], labels)


def test_the_record_survives_json():
    found = measure_agreement(pairs({(True, True): 3, (True, False): 1}), [True, False])

    assert type(found).model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("labels", "outcome"),
    [
        ((True, True), Consensus(True, adjudicated=False)),
        ((False, False), Consensus(False, adjudicated=False)),
        ((True, False), Unsettled.NEEDS_THIRD),
        ((True, False, False), Consensus(False, adjudicated=True)),
        ((True, False, True), Consensus(True, adjudicated=True)),
        (("first", "second", "both"), Unsettled.NO_CONSENSUS),
        (("first", "first", "both"), Consensus("first", adjudicated=False)),
    ],
)
def test_two_equal_labels_settle_an_item(labels, outcome):
    assert adjudicate(*labels) == outcome


LABELS = st.sampled_from(Preference)


@given(LABELS, LABELS, st.none() | LABELS)
def test_the_order_of_the_first_two_does_not_matter_and_a_consensus_has_two_votes(a, b, c):
    outcome = adjudicate(a, b, c)

    assert outcome == adjudicate(b, a, c)
    if isinstance(outcome, Consensus):
        assert [a, b, c].count(outcome.label) >= 2
        assert outcome.adjudicated == (a != b)
    elif c is None:
        assert outcome is Unsettled.NEEDS_THIRD
    else:
        assert outcome is Unsettled.NO_CONSENSUS
        assert len({a, b, c}) == 3
