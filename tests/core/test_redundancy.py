"""Eq. 5 to 7: by hand, then the four groups on which the printed form misleads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.redundancy import (
    FORMS,
    history_similarity,
    in_group_similarity,
    length_gate,
    reweight,
)

# alpha 0.5, beta 5, L 7: tau = 1 / (1 + exp(-1)) = 0.7310586
TAU = 0.7310586
REWARDS, IN_GROUP, HISTORY = [3.0, 1.0, -1.0], [0.6, 0.3, 0.5], [0.2, 0.4, 0.1]
# f1 = (1 + 0.4386352) (1 + 0.1462117) = 1.6489805
# f2 = (1 + 0.2193176) (1 + 0.2924234) = 1.5758746
# f3 = (1 + 0.3655293) (1 + 0.0731059) = 1.4653575


def test_tau_by_hand():
    assert length_gate(7) == pytest.approx(TAU)
    # The paper's values at other lengths: 1 word, 10, 20 (and far beyond either end)
    assert length_gate(1) == pytest.approx(0.1192029)
    assert length_gate(10) == pytest.approx(0.9241418)
    assert length_gate(20) == pytest.approx(0.9994472)
    assert length_gate(0, alpha=1000.0) == pytest.approx(0.0)
    assert length_gate(1e6) == 1.0


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("paper", [3 / 1.6489805, 1 / 1.5758746, -1 / 1.4653575]),
        ("signed", [3 / 1.6489805, 1 / 1.5758746, -1.4653575]),
        # 3 - 0.731 * 0.8 / 2, 1 - 0.731 * 0.7 / 2, -1 - 0.731 * 0.6 / 2
        ("subtract", [2.7075766, 0.7441295, -1.2193176]),
        ("off", REWARDS),
    ],
)
def test_each_form_by_hand(form, expected):
    found = reweight(REWARDS, IN_GROUP, HISTORY, TAU, form=form)

    assert found == pytest.approx(expected, abs=1e-6)


def test_similarities_by_hand():
    # Unit vectors at 0, 60 and 90 degrees (any length): cosines 0.5, 0, and cos 30 = 0.8660254.
    replies = [[2.0, 0.0], [0.5, np.sqrt(3) / 2], [0.0, 7.0]]
    assert in_group_similarity(replies) == pytest.approx(
        [(0.5 + 0) / 2, (0.5 + 0.8660254) / 2, (0 + 0.8660254) / 2]
    )
    # With a history at 0 degrees and at 180: the opposite is no repetition, and counts 0.
    history = [[1.0, 0.0], [-3.0, 0.0]]
    assert history_similarity(replies, history) == pytest.approx([0.5, 0.25, 0.0])


def test_what_has_nothing_to_be_compared_with_repeats_nothing():
    assert in_group_similarity([[1.0, 2.0]]).tolist() == [0.0]
    assert history_similarity([[1.0, 2.0], [2.0, 1.0]], []).tolist() == [0.0, 0.0]
    assert history_similarity([[1.0, 2.0]], np.empty((0, 2))).tolist() == [0.0]
    # An empty text has no direction.
    assert in_group_similarity([[0.0, 0.0], [1.0, 0.0]]).tolist() == [0.0, 0.0]


# --- the groups on which the printed form misleads -----------------------------------------------


def test_a_bad_group_is_paid_for_repeating_itself_in_the_printed_form_only():
    # All four are equally bad; the last one alone is new.
    rewards, s_in, s_hi = [-3.0] * 4, [0.9, 0.9, 0.8, 0.2], [0.8, 0.7, 0.5, 0.1]

    printed = reweight(rewards, s_in, s_hi, 1.0, form="paper")
    signed = reweight(rewards, s_in, s_hi, 1.0, form="signed")
    subtracted = reweight(rewards, s_in, s_hi, 1.0, form="subtract")

    assert printed.argmin() == 3
    assert signed.argmax() == 3
    assert subtracted.argmax() == 3


def test_the_printed_form_depends_on_where_the_scale_begins_and_subtracting_does_not():
    # A repeating reply with 3 against a new one with 1.
    s_in, s_hi = [0.9, 0.1], [0.8, 0.1]

    def leads(rewards, form):
        return int(reweight(rewards, s_in, s_hi, 1.0, form=form).argmax())

    # 3 / 3.42 = 0.877 beats 1 / 1.21 = 0.826, but 13 / 3.42 = 3.80 loses to 11 / 1.21 = 9.09.
    assert (leads([3.0, 1.0], "paper"), leads([13.0, 11.0], "paper")) == (0, 1)
    assert leads([3.0, 1.0], "subtract") == leads([13.0, 11.0], "subtract")
    shifted = reweight([13.0, 11.0], s_in, s_hi, 1.0, form="subtract")
    plain = reweight([3.0, 1.0], s_in, s_hi, 1.0, form="subtract")
    assert shifted - plain == pytest.approx([10.0, 10.0])


def test_where_all_repeat_alike_the_ranking_is_untouched():
    # A collapsed policy gets no signal to be different: every reply has the same factor.
    rewards = np.array([5.0, 3.0, 1.0, 1.0])
    for form in ("paper", "signed"):
        found = reweight(rewards, [0.95] * 4, [0.95] * 4, 1.0, form=form)
        assert found / rewards == pytest.approx([1 / 1.95**2] * 4)


def test_equal_rewards_with_tiny_differences_in_similarity_stay_nearly_equal():
    # What GRPO then makes of them is `group_advantages`' business (its std_floor).
    found = reweight([1.0] * 4, [0.500, 0.501, 0.502, 0.503], [0.0] * 4, 1.0)

    assert np.ptp(found) < 0.002


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.sampled_from([form for form in FORMS if form != "paper"]),
)
def test_repeating_never_pays_but_in_the_printed_form(rows, tau, form):
    rewards, s_in, s_hi = map(list, zip(*rows, strict=True))

    found = reweight(rewards, s_in, s_hi, tau, form=form)
    less = reweight(rewards, [s / 2 for s in s_in], s_hi, tau, form=form)

    assert (found <= np.array(rewards) + 1e-9).all()
    assert (found <= less + 1e-9).all()


@given(st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=1, max_size=6))
def test_similarities_lie_between_0_and_1(vectors):
    assert ((in_group_similarity(vectors) >= 0) & (in_group_similarity(vectors) <= 1)).all()
    found = history_similarity(vectors, vectors)
    assert ((found >= 0) & (found <= 1 + 1e-12)).all()


def test_a_reward_that_is_not_known_stays_so():
    found = reweight([np.nan, 1.0], [0.5, 0.5], [0.0, 0.0], 1.0)

    assert np.isnan(found[0])
    assert found[1] == pytest.approx(1 / 1.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1.0], [0.5, 0.5], [0.0], 1.0), "shapes differ"),
        (([1.0], [1.5], [0.0], 1.0), r"in_group must lie in \[0, 1\]"),
        (([1.0], [0.5], [-0.1], 1.0), r"history must lie in"),
        (([1.0], [0.5], [0.1], 2.0), r"tau must lie in"),
        (([1.0], [0.5], [0.1], 1.0, "papr"), "unknown form 'papr'; the forms are paper, signed"),
        (([1.0], [0.5], [0.1], 1.0, "subtract", 3.0), r"weight must lie in \[0, 2\]"),
    ],
)
def test_values_out_of_range_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        reweight(*arguments)


def test_a_length_gate_needs_sound_numbers():
    with pytest.raises(ValueError, match="length must be 0 or more"):
        length_gate(-1)
    with pytest.raises(ValueError, match="alpha must be above 0"):
        length_gate(3, alpha=0)
