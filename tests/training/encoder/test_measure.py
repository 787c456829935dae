"""Agreement with a teacher, and relative speed."""

import numpy as np
import pytest

from training.encoder.measure import agreement, cosines, pairs_between, pairs_within, speed
from training.encoder.texts import Replies

REPLIES = Replies(tuple(f"t{n}" for n in range(60)), tuple(n // 3 for n in range(60)))


def test_pairs_are_from_different_dialogues_or_from_one():
    rng = np.random.default_rng(0)
    between, within = pairs_between(REPLIES, 500, rng), pairs_within(REPLIES, 500, rng)

    where = np.asarray(REPLIES.dialogues)
    assert between.shape == within.shape == (500, 2)
    assert (where[between[:, 0]] != where[between[:, 1]]).all()
    assert (where[within[:, 0]] == where[within[:, 1]]).all()
    assert (within[:, 0] != within[:, 1]).all()
    assert len(pairs_within(Replies(("a", "b"), (0, 1)), 5, rng)) == 0


def test_agreement_by_hand():
    # Angles to the first vector: teacher 20, 50, 70, 100 degrees; ours 10, 60, 40, 90.
    # Ranks 1 2 3 4 against 1 3 2 4: rho = 1 - 6 (0 + 1 + 1 + 0) / (4 x 15) = 0.8
    def at(*degrees):
        return np.stack([(np.cos(a), np.sin(a)) for a in np.radians([0, *degrees])])

    replies = Replies(("a", "b", "c", "d", "e"), (0, 1, 2, 3, 4))
    pairs = np.array([[0, n] for n in range(1, 5)])

    estimate = agreement(at(10, 60, 40, 90), at(20, 50, 70, 100), pairs, replies, resamples=20)

    assert estimate.value == pytest.approx(0.8)
    assert estimate.n == 4


def test_interval_resamples_dialogues():
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(60, 5))
    ours = theirs + 0.5 * rng.normal(size=(60, 5))
    for drawn in (pairs_between, pairs_within):
        pairs = drawn(REPLIES, 400, rng)
        estimate = agreement(ours, theirs, pairs, REPLIES, resamples=100)
        assert estimate.low < estimate.value < estimate.high < 1


def test_cosine_with_a_zero_vector_is_zero():
    assert cosines([[0.0, 0.0], [1.0, 2.0]], np.array([[0, 1]])).tolist() == [0.0]


def test_speed_is_relative_to_the_teacher():
    def work(times):
        def encode(texts):
            return [sum(range(times)) for _ in texts]

        return encode

    estimate = speed(work(200), work(200_000), ["a"] * 20, rounds=3)

    assert estimate.times.n == 3
    assert estimate.times.value > 50
    assert estimate.ours.value > estimate.theirs.value
