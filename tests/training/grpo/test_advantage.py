"""Eq. 3: by hand, then what must hold of any group."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.grpo.advantage import STD_FLOOR, batch_advantages, group_advantages


def test_advantages_by_hand():
    # mean 1.5; deviations 3.5, 1.5, -0.5, -4.5; squares sum 35; std sqrt(35 / 3) = 3.415650
    found = group_advantages([5.0, 3.0, 1.0, -3.0])

    assert found == pytest.approx([1.024695, 0.439155, -0.146385, -1.317465], abs=1e-6)


def test_tied_rewards_carry_no_signal():
    assert group_advantages([3.0] * 4).tolist() == [0.0] * 4


def test_differences_of_noise_do_not_become_full_advantages():
    # Equal quality, cosines 0.500 to 0.503: rewards 1 / 1.500 .. 1 / 1.503
    rewards = [1 / (1.5 + 0.001 * number) for number in range(4)]

    assert np.abs(group_advantages(rewards)).max() < 0.01
    unfloored = group_advantages(rewards, std_floor=1e-12)
    assert np.abs(unfloored).max() > 1.1


def test_the_floor_touches_no_difference_that_a_verdict_makes():
    # The smallest: one of four members has one verdict more, 2 points; std 1.
    assert group_advantages([1.0, 1.0, 1.0, 3.0]).std(ddof=1) == pytest.approx(1.0)
    assert STD_FLOOR < 0.5


def test_a_member_without_a_reward_does_not_move_the_others():
    # Of 3, 1, -1: mean 1, std 2.
    found = group_advantages([3.0, math.nan, 1.0, -1.0])

    assert found.tolist() == [1.0, 0.0, 0.0, -1.0]
    assert group_advantages([math.nan, 2.0]).tolist() == [0.0, 0.0]
    assert group_advantages([math.nan] * 3).tolist() == [0.0] * 3


@given(st.lists(st.one_of(st.just(math.nan), st.floats(-5, 5)), max_size=8), st.floats(-100, 100))
def test_advantages_sum_to_zero_and_do_not_depend_on_the_zero_of_the_scale(rewards, shift):
    found = group_advantages(rewards)

    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(0.0, abs=1e-9)
    shifted = group_advantages([reward + shift for reward in rewards])
    assert found == pytest.approx(shifted, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "floor", "says"),
    [([1.0, math.inf], 0.1, "finite or NaN"), ([1.0, 2.0], 0.0, "std_floor must be above 0")],
)
def test_values_out_of_range_are_refused(rewards, floor, says):
    with pytest.raises(ValueError, match=says):
        group_advantages(rewards, floor)


# --- several groups ------------------------------------------------------------------------------


def test_groups_stand_alone_or_share_a_scale_by_hand():
    rewards = [5.0, 1.0, 2.0, 2.0]

    # deviations 2, -2, 0, 0; std of the first group 2 sqrt 2, of all rewards sqrt 3
    by_group = batch_advantages(rewards, 2)
    assert by_group == pytest.approx([0.707107, -0.707107, 0.0, 0.0], abs=1e-6)
    by_batch = batch_advantages(rewards, 2, "batch")
    assert by_batch == pytest.approx([1.154701, -1.154701, 0.0, 0.0], abs=1e-6)
    assert batch_advantages(rewards, 2, "none").tolist() == [2.0, -2.0, 0.0, 0.0]


def test_unknown_rewards_are_left_out_of_every_scale():
    rewards = [5.0, 1.0, math.nan, 2.0]

    # known: 5 1 2, std sqrt(13/3) = 2.081666; the last is alone in its group
    found = batch_advantages(rewards, 2, "batch")
    assert found == pytest.approx([0.960769, -0.960769, 0.0, 0.0], abs=1e-6)


def test_a_group_that_is_not_whole_is_refused():
    with pytest.raises(ValueError, match="3 rewards do not form groups of 2"):
        batch_advantages([1.0, 2.0, 3.0], 2)
