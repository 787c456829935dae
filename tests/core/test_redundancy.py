"""Eq. 5 to 7 by hand, on numbers and on texts, and the groups on which the printed form misleads."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.config import load_toml
from compeer_core.errors import ConfigError
from compeer_core.redundancy import (
    FORMS,
    Group,
    Reweighted,
    Settings,
    history_similarity,
    in_group_similarity,
    length_gate,
    reply_length,
    reweight,
    reweighted,
    reweighted_groups,
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


# --- from texts --------------------------------------------------------------------------------


class Compass:
    """An encoder that points each text in a direction of the plane, given in degrees."""

    name = "compass"

    def __init__(self, degrees: Mapping[str, float], length: float = 1.0) -> None:
        self._degrees = degrees
        self._length = length
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.calls.append(list(texts))
        angles = [math.radians(self._degrees[text]) if text else math.nan for text in texts]
        found = np.array([[math.cos(angle), math.sin(angle)] for angle in angles])
        return np.nan_to_num(self._length * found).astype(np.float32)


FIRST, SECOND, THIRD = (
    "That sounds really hard to carry alone.",  # 7 words
    "I hear how tired you are of this.",  # 8
    "What would help you tonight, of all things?",  # 8
)
ASKED, TOLD = "How was your day?", "I cannot sleep."
DEGREES = {FIRST: 0, SECOND: 60, THIRD: 45, ASKED: 30, TOLD: 75}


def by_hand(form: str) -> tuple[Reweighted, ...]:
    return reweighted(
        [3.0, 1.0, -1.0],
        [FIRST, SECOND, THIRD],
        [ASKED, TOLD],
        Compass(DEGREES, length=2.5),
        Settings(form=form, alpha=0.4, beta=6.0, weight=1.5),
    )


def test_a_group_by_hand():
    # L = (7 + 8 + 8) / 3 = 7.6667, so tau = 1 / (1 + exp(-0.4 x 1.6667)) = 1 / (1 + 0.513417)
    tau = 0.660757
    # cos 60 = 0.5, cos 45 = 0.707107, cos 15 = 0.965926, cos 30 = 0.866025, cos 75 = 0.258819
    s_in = [(0.5 + 0.707107) / 2, (0.5 + 0.965926) / 2, (0.707107 + 0.965926) / 2]
    s_hi = [
        (0.866025 + 0.258819) / 2,  # 30 and 75 degrees away
        (0.866025 + 0.965926) / 2,  # 30 and 15
        (0.965926 + 0.866025) / 2,  # 15 and 30
    ]

    found = by_hand("signed")

    assert [one.reward for one in found] == [3.0, 1.0, -1.0]
    assert [one.tau for one in found] == pytest.approx([tau] * 3, abs=1e-6)
    assert [one.s_in for one in found] == pytest.approx(s_in, abs=1e-6)
    assert [one.s_hi for one in found] == pytest.approx(s_hi, abs=1e-6)
    # f1 = (1 + 0.398805) (1 + 0.371622) = 1.918632
    # f2 = (1 + 0.484310) (1 + 0.605237) = 2.382669
    # f3 = (1 + 0.552734) (1 + 0.605237) = 2.492506
    expected = [3 / 1.918632, 1 / 2.382669, -2.492506]
    assert [one.weighted for one in found] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("paper", [3 / 1.918632, 1 / 2.382669, -1 / 2.492506]),
        # 1.5 x 0.660757 / 2 = 0.495568, times s_in + s_hi = 1.165976, 1.648939, 1.752493
        ("subtract", [3 - 0.577820, 1 - 0.817161, -1 - 0.868480]),
        ("off", [3.0, 1.0, -1.0]),
    ],
)
def test_the_other_forms_by_hand(form, expected):
    assert [one.weighted for one in by_hand(form)] == pytest.approx(expected, abs=1e-5)


# --- the groups on which the printed form misleads -----------------------------------------------

WORDS = "so many words that the gate of the length is quite open here"  # 13: tau = 0.98
PARROT_1, PARROT_2, NEAR, NEW = (f"{WORDS} {number}" for number in range(4))
HEARD = "what was said before"
BAD_GROUP = Compass({PARROT_1: 0, PARROT_2: 2, NEAR: 20, NEW: 85, HEARD: 1})


# --- what may be absent --------------------------------------------------------------------------


def test_a_reward_that_is_not_known_stays_so_but_its_reply_counts_for_the_others():
    rewards = [3.0, math.nan, -1.0]
    replies = [FIRST, SECOND, THIRD]

    found = reweighted(rewards, replies, [ASKED, TOLD], Compass(DEGREES))
    known = reweighted([3.0, 1.0, -1.0], replies, [ASKED, TOLD], Compass(DEGREES))

    assert math.isnan(found[1].reward)
    assert math.isnan(found[1].weighted)
    assert found[1].s_in == known[1].s_in
    assert [found[0], found[2]] == [known[0], known[2]]


def test_an_empty_reply_resembles_nothing_and_shortens_the_mean_length():
    found = reweighted([3.0, -5.0], [FIRST, "  "], [ASKED], Compass(DEGREES))

    assert (found[1].s_in, found[1].s_hi) == (0.0, 0.0)
    assert found[0].s_in == 0.0
    assert found[0].tau == pytest.approx(1 / (1 + math.exp(-0.5 * (3.5 - 5))))


def test_an_utterance_without_text_is_not_part_of_the_history():
    with_picture = reweighted([1.0, 1.0], [FIRST, SECOND], [ASKED, ""], Compass(DEGREES))

    assert with_picture == reweighted([1.0, 1.0], [FIRST, SECOND], [ASKED], Compass(DEGREES))


def test_a_candidate_alone_without_history_repeats_nothing():
    (found,) = reweighted([3.0], [FIRST], [], Compass(DEGREES))

    assert (found.s_in, found.s_hi, found.weighted) == (0.0, 0.0, 3.0)
    assert reweighted([], [], [ASKED], Compass(DEGREES)) == ()


def test_many_groups_cost_one_call_and_each_text_is_encoded_once():
    encoder = Compass(DEGREES)
    groups = [Group([1.0, 2.0], [FIRST, SECOND], [ASKED]), Group([3.0], [FIRST], [ASKED, TOLD])]

    found = reweighted_groups(groups, encoder)

    assert len(encoder.calls) == 1
    assert sorted(filter(None, encoder.calls[0])) == sorted([FIRST, SECOND, ASKED, TOLD])
    assert found[0] == reweighted([1.0, 2.0], [FIRST, SECOND], [ASKED], encoder)
    assert found[1] == reweighted([3.0], [FIRST], [ASKED, TOLD], encoder)


def test_as_many_rewards_as_replies():
    with pytest.raises(ValueError, match="2 rewards for 1 replies"):
        reweighted([1.0, 2.0], [FIRST], [], Compass(DEGREES))


# --- lengths and settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("", 0.0),
        ("I'm here, always.", 3.0),
        ("well - yes ... :)", 2.0),  # marks are no words
        ("我在这里", 4 / 1.5),
        ("我用 Python 三年了", 5 / 1.5 + 1),
        ("괜찮아요 정말로", 2.0),  # Korean has spaces
    ],
)
def test_lengths_are_in_words(text, length):
    assert reply_length(text) == pytest.approx(length)


def test_a_wrong_form_or_number_is_a_config_error_that_names_it(tmp_path):
    path = tmp_path / "reweighting.toml"
    path.write_text('form = "papr"\nweight = 3\naplha = 1\n', encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        load_toml(path, Settings)

    for name in ("form", "weight", "alpha"):
        assert name in str(caught.value)


# --- what the paper claims ------------------------------------------------------------------------


@given(
    candidates=st.lists(
        st.tuples(st.sampled_from([-5.0, -3.0, -1.0, 1.0, 3.0, 5.0]), st.integers(0, 180)),
        min_size=2,
        max_size=6,
    ),
    history=st.lists(st.integers(0, 180), max_size=4),
    form=st.sampled_from([form for form in FORMS if form != "paper"]),
)
def test_repeating_never_pays_and_order_among_candidates_does_not_matter(candidates, history, form):
    replies = [f"{WORDS} r{number}" for number in range(len(candidates))]
    said = [f"h{number}" for number in range(len(history))]
    angles = [angle for _, angle in candidates]
    encoder = Compass(dict(zip((*replies, *said), (*angles, *history), strict=True)))
    rewards = [reward for reward, _ in candidates]
    settings = Settings(form=form)

    found = reweighted(rewards, replies, said, encoder, settings)
    turned = reweighted(rewards[::-1], replies[::-1], said, encoder, settings)

    assert [one.weighted for one in found] == pytest.approx([one.weighted for one in turned][::-1])
    for one in found:
        assert 0 <= one.s_in <= 1
        assert 0 <= one.s_hi <= 1
        assert one.weighted <= one.reward + 1e-9
    # One candidate turns into a copy of another of the same worth: it gains nothing by it.
    copied = reweighted(rewards, [replies[1], *replies[1:]], said, encoder, settings)
    if copied[0].s_in >= found[0].s_in and copied[0].s_hi >= found[0].s_hi:
        assert copied[0].weighted <= found[0].weighted + 1e-9
