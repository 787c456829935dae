"""Eq. 1: numbers worked out by hand, then what is drawn against the exact probabilities."""

import itertools
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.cer.sampling import (
    inclusion_probabilities,
    round_probabilities,
    sample_many,
    sample_rounds,
)


def by_enumeration(n, k):
    """Inclusion probabilities by walking through every order in which k rounds can be drawn."""
    p = round_probabilities(n)
    included = np.zeros(n)
    for order in itertools.permutations(range(n), k):
        probability, left = 1.0, 1.0
        for i in order:
            probability *= p[i] / left
            left -= p[i]
        included[list(order)] += probability
    return included


def test_eq_1_by_hand_for_four_rounds():
    # mu = 2, sigma = 1: weights exp(-1/2), 1, exp(-1/2), exp(-2)
    # = 0.606531, 1, 0.606531, 0.135335, sum 2.348397
    assert round_probabilities(4) == pytest.approx(
        [0.258274, 0.425822, 0.258274, 0.057629], abs=1e-6
    )


def test_eq_1_by_hand_for_few_rounds():
    assert round_probabilities(0).shape == (0,)
    assert round_probabilities(1) == pytest.approx([1.0])
    # mu = 1, sigma = 1/2: weights 1 and exp(-2)
    assert round_probabilities(2) == pytest.approx([0.880797, 0.119203], abs=1e-6)


@given(st.integers(2, 300))
def test_the_middle_is_likeliest_and_the_last_round_least_likely(n):
    p = round_probabilities(n)

    assert p.sum() == pytest.approx(1.0)
    assert (p > 0).all()
    assert p.argmax() + 1 in {n // 2, n // 2 + 1}
    assert p.argmin() == n - 1
    assert p[: n - 1] == pytest.approx(p[: n - 1][::-1])  # p(i) = p(n - i)


def test_two_of_four_rounds_by_hand():
    # pi(4) = p4 + sum over j of pj * p4 / (1 - pj)
    #       = 0.057629 * (1 + 2 * 0.258274 / 0.741726 + 0.425822 / 0.574178) = 0.1405
    p = round_probabilities(4)
    last = p[3] * (1 + sum(p[j] / (1 - p[j]) for j in range(3)))

    assert inclusion_probabilities(4, 2)[3] == pytest.approx(last, abs=1e-12)
    assert last == pytest.approx(0.1405, abs=1e-4)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2), (5, 2), (6, 3), (7, 5), (8, 4)])
def test_inclusion_equals_the_sum_over_all_orders(n, k):
    assert inclusion_probabilities(n, k) == pytest.approx(by_enumeration(n, k), abs=1e-11)


@pytest.mark.parametrize(("n", "k"), [(30, 5), (60, 10)])
def test_inclusion_sums_to_the_number_drawn(n, k):
    included = inclusion_probabilities(n, k)

    assert included.sum() == pytest.approx(k, abs=1e-10)
    assert ((included > 0) & (included < 1)).all()


def test_inclusion_at_the_edges():
    assert inclusion_probabilities(0, 3).shape == (0,)
    assert (inclusion_probabilities(5, 0) == 0).all()
    assert (inclusion_probabilities(5, 5) == 1).all()
    assert (inclusion_probabilities(1, 7) == 1).all()
    assert inclusion_probabilities(9, 1) == pytest.approx(round_probabilities(9), abs=1e-11)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (11, 3), (30, 5)])
def test_rounds_are_drawn_as_often_as_they_should_be(n, k):
    draws = 200_000
    sampled = sample_many(np.full(draws, n), k, np.random.default_rng(1))
    counted = np.bincount(sampled.positions, minlength=n)

    expected = inclusion_probabilities(n, k)
    # Each count is binomial. Beyond 4.5 standard deviations lies 7e-6, times 45 rounds in all.
    deviation = np.abs(counted - draws * expected) / np.sqrt(draws * expected * (1 - expected))
    assert deviation.max() < 4.5


def test_pairs_are_drawn_as_often_as_successive_sampling_says():
    n, draws = 4, 200_000
    p = round_probabilities(n)
    sampled = sample_many(np.full(draws, n), 2, np.random.default_rng(2)).positions.reshape(-1, 2)

    for i, j in itertools.combinations(range(n), 2):
        expected = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        counted = ((sampled[:, 0] == i) & (sampled[:, 1] == j)).mean()
        assert abs(counted - expected) < 4.5 * np.sqrt(expected * (1 - expected) / draws)


@given(n=st.integers(0, 80), k=st.integers(0, 90), seed=st.integers(0, 2**32))
def test_rounds_are_distinct_in_order_and_of_the_dialogue(n, k, seed):
    rounds = sample_rounds(n, k, np.random.default_rng(seed))

    assert rounds.shape == (min(n, k),)
    assert (np.diff(rounds) > 0).all()
    assert set(rounds.tolist()) <= set(range(n))
    assert rounds.tolist() == sample_rounds(n, k, np.random.default_rng(seed)).tolist()


def test_all_rounds_are_returned_where_as_many_are_wanted():
    rng = np.random.default_rng(0)

    assert sample_rounds(3, 3, rng).tolist() == sample_rounds(3, 9, rng).tolist() == [0, 1, 2]
    assert sample_rounds(1, 1, rng).tolist() == [0]
    assert sample_rounds(0, 2, rng).tolist() == sample_rounds(5, 0, rng).tolist() == []


@given(
    lengths=st.lists(st.integers(0, 12), max_size=20),
    k=st.integers(0, 6),
    seed=st.integers(0, 2**32),
    cut=st.integers(0, 20),
)
def test_a_batch_equals_its_dialogues_one_by_one_however_it_is_cut(lengths, k, seed, cut):
    whole = sample_many(lengths, k, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    parts = [sample_many(lengths[:cut], k, rng), sample_many(lengths[cut:], k, rng)]
    rng = np.random.default_rng(seed)
    one_by_one = [sample_rounds(n, k, rng).tolist() for n in lengths]

    assert [whole.of(i).tolist() for i in range(len(whole))] == one_by_one
    assert [part.of(i).tolist() for part in parts for i in range(len(part))] == one_by_one


def test_batches_longer_than_one_chunk_are_the_same(monkeypatch):
    lengths = np.random.default_rng(0).integers(0, 30, 200)
    whole = sample_many(lengths, 4, np.random.default_rng(3))
    monkeypatch.setattr("training.cer.sampling._CHUNK_ROUNDS", 17)  # some dialogues are longer

    chunked = sample_many(lengths, 4, np.random.default_rng(3))

    assert chunked.positions.tolist() == whole.positions.tolist()
    assert chunked.starts.tolist() == whole.starts.tolist()


@pytest.mark.parametrize(("n", "k"), [(-1, 2), (3, -1)])
def test_negative_numbers_are_refused(n, k):
    with pytest.raises(ValueError, match=f"n={n}, k={k}"):
        sample_rounds(n, k, np.random.default_rng(0))
    with pytest.raises(ValueError, match=f"n={n}, k={k}"):
        inclusion_probabilities(n, k)
    with pytest.raises(ValueError, match="fewer than none"):
        sample_many([n], k, np.random.default_rng(0))


def test_lengths_must_be_a_row_of_whole_numbers():
    with pytest.raises(ValueError, match="float64"):
        sample_many([2.5], 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        sample_many([[2, 3]], 1, np.random.default_rng(0))
    with pytest.raises(IndexError, match="dialogue 1 of 1"):
        sample_many([2], 1, np.random.default_rng(0)).of(1)


def test_a_million_dialogues_are_sampled_and_timed(capsys):
    lengths = np.random.default_rng(0).integers(1, 31, 1_000_000)
    begin = time.perf_counter()
    sampled = sample_many(lengths, 5, np.random.default_rng(1))
    seconds = time.perf_counter() - begin
    with capsys.disabled():
        sys.stdout.write(f" [1,000,000 dialogues of 1 to 30 rounds: {seconds:.2f} s]")

    assert len(sampled) == 1_000_000
    assert len(sampled.positions) == np.minimum(lengths, 5).sum()
