"""Temperature and calibration: by hand, then that a fit finds what was put in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.common.calibration import (
    calibration_error,
    fit_temperature,
    reliability,
    tempered,
)


def test_temperature_two_takes_the_square_root_of_the_odds():
    # 0.8 has odds 4, their root is 2: 2/3. 0.2 mirrors it.
    assert tempered([0.8, 0.2], 2.0) == pytest.approx([2 / 3, 1 / 3])


def test_the_temperature_that_was_put_in_is_found():
    rng = np.random.default_rng(0)
    true = rng.uniform(0.02, 0.98, 40_000)
    label = rng.random(40_000) < true
    overconfident = tempered(true, 1 / 3)

    assert fit_temperature(overconfident.tolist(), label.tolist()) == pytest.approx(3.0, rel=0.05)


def test_a_judge_that_is_right_by_chance_is_made_unsure():
    rng = np.random.default_rng(1)
    label = rng.random(5000) < 0.5
    probability = np.where(rng.random(5000) < 0.5, 0.95, 0.05)

    assert fit_temperature(probability.tolist(), label.tolist()) > 15


def test_calibration_error_by_hand():
    # Bin 0.9: two of three right, mean 0.92: gap 0.2533. Bin 0.2: none of one right: gap 0.25.
    probability, label = [0.9, 0.92, 0.94, 0.25], [True, True, False, False]

    assert calibration_error(probability, label) == pytest.approx((3 * (0.92 - 2 / 3) + 0.25) / 4)
    low, high = reliability(probability, label)
    assert (low.low, low.high, low.count, low.share_true) == (0.2, 0.3, 1, 0.0)
    assert (high.low, high.count) == (0.9, 3)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=50),
    st.floats(0.05, 20),
)
def test_a_temperature_changes_no_verdict_and_bins_hold_every_row(rows, temperature):
    probability, label = map(list, zip(*rows, strict=True))

    after = tempered(probability, temperature)

    for before, now in zip(probability, after, strict=True):
        assert 0 <= now <= 1
        if abs(before - 0.5) > 1e-6:
            assert (before > 0.5) == (now > 0.5)
    assert sum(one.count for one in reliability(probability, label)) == len(rows)
    assert 0 <= calibration_error(probability, label) <= 1


def test_fitting_without_data_is_rejected():
    with pytest.raises(ValueError, match="0 probabilities"):
        fit_temperature([], [])
