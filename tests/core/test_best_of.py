"""Best of G: ranked as in training, with the numbers to show for it."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from compeer_core.best_of import gate_formula, rank, weight_formula
from compeer_core.encoder import Vectors, load_encoder
from compeer_core.redundancy import Settings, reweighted


class Known:
    """An encoder with a table."""

    name = "known"
    table = {"": (0, 0), "a": (1, 0), "b": (1, 0), "c": (0, 1), "h": (1, 0)}  # noqa: RUF012

    def encode(self, texts: Sequence[str]) -> Vectors:
        return np.array([self.table[text] for text in texts], dtype=np.float32)


def test_equal_rewards_rank_the_non_repeating_reply_first() -> None:
    # s_in: a = (1 + 0) / 2, b the same, c = 0.  s_hi: a = b = 1, c = 0.
    # L = 1, tau = 1 / (1 + e^2) = 0.1192;  a: 4 / (1.0596 * 1.1192) = 3.373
    found = rank([4.0, 4.0, 4.0], ["a", "b", "c"], ["h"], Known())

    assert found.places == (2, 2, 1)
    assert found.order == (2, 0, 1)
    assert found.members[0].weighted == pytest.approx(3.373, abs=1e-3)
    assert found.members[2].weighted == 4.0
    assert weight_formula(found.members[0], found.settings) == (
        "r' = 4 / ((1 + 0.119 × 0.5) (1 + 0.119 × 1)) = 3.37"
    )
    assert gate_formula(found) == "τ = 1 / (1 + exp(−0.5 × (1 − 5))) = 0.119"


def test_a_negative_reward_costs_more_for_repeating() -> None:
    found = rank([-2.0, -2.0], ["a", "c"], ["h"], Known())

    assert found.places == (2, 1)
    assert weight_formula(found.members[0], found.settings) == (
        "r' = −2 × (1 + 0.119 × 0) (1 + 0.119 × 1) = −2.24"
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("paper", "r' = −2 / ((1 + 0.119 × 0) (1 + 0.119 × 1)) = −1.79"),
        ("subtract", "r' = −2 − 1 × 0.119 × (0 + 1) / 2 = −2.06"),
        ("off", "r' = r = −2"),
    ],
)
def test_the_formula_matches_the_form(form: str, expected: str) -> None:
    settings = Settings.model_validate({"form": form})
    found = rank([-2.0, -2.0], ["a", "c"], ["h"], Known(), settings)

    assert weight_formula(found.members[0], settings) == expected


def test_a_member_without_a_reward_has_no_rank_but_counts_as_another_reply() -> None:
    found = rank([1.0, None, 3.0], ["a", "b", "c"], [], Known())

    assert found.places == (2, None, 1)
    assert found.order == (2, 0, 1)
    assert found.members[0].s_in == 0.5
    assert math.isnan(found.members[1].weighted)
    assert found.is_ranked


def test_without_any_reward_there_is_no_ranking() -> None:
    found = rank([None, None], ["a", "c"], [], Known())

    assert not found.is_ranked
    assert found.order == (0, 1)


def test_replies_that_no_encoder_can_read_are_ranked_by_their_rewards_alone() -> None:
    found = rank([1.0, 3.0], ["甲", "甲"], ["乙"], None)

    assert found.places == (2, 1)
    assert not found.is_reweighted
    assert found.settings.form == "off"
    assert weight_formula(found.members[1], found.settings) == "r' = r = 3"


def test_rankings_use_the_same_numbers_as_training() -> None:
    encoder = load_encoder()
    replies = ["You are not alone in this.", "What happened at work today?", ""]
    rewards, history = [4.0, 2.0, -4.0], ["I cannot go on like this."]

    assert rank(rewards, replies, history, encoder).members == reweighted(
        rewards, replies, history, encoder
    )
