"""Eq. 1: numbers worked out by hand, then samples against the exact probabilities."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.cer.sampling import round_probabilities, sample_rounds


def by_enumeration(n, k):
    """Inclusion probabilities by enumeration of every order in which k rounds can be drawn."""
    p = round_probabilities(n)
    included = np.zeros(n)
    for order in itertools.permutations(range(n), k):
        probability, left = 1.0, 1.0
        for i in order:
            probability *= p[i] / left
            left -= p[i]
        included[list(order)] += probability
    return included


def test_eq_1_by_hand_for_few_rounds():
    assert round_probabilities(0).shape == (0,)
    assert round_probabilities(1) == pytest.approx([1.0])
    # mu = 1, sigma = 1/2: weights 1 and exp(-2)
    assert round_probabilities(2) == pytest.approx([0.880797, 0.119203], abs=1e-6)


@given(st.integers(2, 300))
def test_middle_rounds_are_the_most_likely_and_the_last_the_least(n):
    p = round_probabilities(n)

    assert p.sum() == pytest.approx(1.0)
    assert (p > 0).all()
    assert p.argmax() + 1 in {n // 2, n // 2 + 1}
    assert p.argmin() == n - 1
    assert p[: n - 1] == pytest.approx(p[: n - 1][::-1])  # p(i) = p(n - i)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (6, 3)])
def test_rounds_are_drawn_as_often_as_successive_sampling_says(n, k):
    draws = 20_000
    rng = np.random.default_rng(1)
    rounds = np.concatenate([sample_rounds(n, k, rng) for _ in range(draws)])
    counted = np.bincount(rounds, minlength=n)

    expected = by_enumeration(n, k)
    assert expected.sum() == pytest.approx(k)
    # Each count is binomial. Beyond 4.5 standard deviations lies 7e-6, times 10 rounds in all.
    deviation = np.abs(counted - draws * expected) / np.sqrt(draws * expected * (1 - expected))
    assert deviation.max() < 4.5


def test_two_of_four_rounds_by_hand():
    # pi(4) = p4 + sum over j of pj * p4 / (1 - pj)
    #       = 0.057629 * (1 + 2 * 0.258274 / 0.741726 + 0.425822 / 0.574178) = 0.1405
    assert by_enumeration(4, 2)[3] == pytest.approx(0.1405, abs=1e-4)


@given(n=st.integers(0, 80), k=st.integers(0, 90), seed=st.integers(0, 2**32))
def test_rounds_are_distinct_in_order_and_of_the_dialogue(n, k, seed):
    rounds = sample_rounds(n, k, np.random.default_rng(seed))

    assert rounds.shape == (min(n, k),)
    assert (np.diff(rounds) > 0).all()
    assert set(rounds.tolist()) <= set(range(n))
    assert rounds.tolist() == sample_rounds(n, k, np.random.default_rng(seed)).tolist()


@pytest.mark.parametrize(("n", "k"), [(-1, 2), (3, -1)])
def test_negative_numbers_are_refused(n, k):
    with pytest.raises(ValueError, match=f"n={n}, k={k}"):
        sample_rounds(n, k, np.random.default_rng(0))
