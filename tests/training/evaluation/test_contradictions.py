"""Contradictions between verdicts, and their rates by chance."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.taxonomy import Preference
from training.evaluation.contradictions import (
    CONTRADICTIONS,
    Table,
    Verdicts,
    against_itself,
    broken_promise,
    holds,
    rates,
)

FIRST, SECOND, BOTH, NEITHER = Preference
T, F = True, False


def table(*rows):
    """Return a table from rows of three step verdicts, preference, and whether the reply follows."""
    return Table.of(
        [Verdicts(steps=row[:3], preference=row[3]) for row in rows], [row[4] for row in rows]
    )


def unit_weights(rows):
    return np.ones((1, len(rows.follows)))


BY_HAND = table(
    (T, T, T, FIRST, F),  # strategy correct, accepted, not carried out; all correct and better
    (T, T, T, SECOND, F),  # rejected; all correct and worse
    (F, T, T, BOTH, F),  # strategy correct, accepted, not carried out
    (T, T, F, FIRST, F),  # strategy wrong; a wrong step and better
    (T, T, F, NEITHER, F),
    (T, F, T, FIRST, T),  # carried out; a wrong step and better
    (T, T, T, SECOND, T),  # carried out; all correct and worse
    (T, T, T, NEITHER, T),
)


def test_broken_promises_by_hand():
    result = rates(broken_promise(BY_HAND), unit_weights(BY_HAND))

    assert holds(broken_promise(BY_HAND)).tolist() == [T, F, T, F, F, F, F, F]
    assert result.seen.item() == pytest.approx(2 / 8)
    # 5 of 8 do not carry out their strategy; of these 3 are correct and 3 accepted: 3/5 * 3/5 * 5/8
    assert result.by_chance.item() == pytest.approx(9 / 40)
    assert result.difference.item() == pytest.approx(1 / 40)


def test_steps_against_replies_by_hand():
    result = rates(against_itself(BY_HAND), unit_weights(BY_HAND))

    assert holds(against_itself(BY_HAND)).tolist() == [F, T, F, T, F, T, T, F]
    assert result.seen.item() == pytest.approx(4 / 8)
    # all correct 4/8, worse 2/8; a wrong step 4/8, better 3/8: 8/64 + 12/64
    assert result.by_chance.item() == pytest.approx(20 / 64)


def test_rates_with_weights():
    weights = np.array(
        [[1, 1, 1, 1, 1, 1, 1, 1], [8, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 8]]
    )
    result = rates(broken_promise(BY_HAND), weights.astype(float))

    assert result.seen.tolist() == [0.25, 1.0, 0.0]
    assert result.by_chance.tolist() == pytest.approx([9 / 40, 1.0, 0.0])


def test_rate_without_turns_is_nan():
    result = rates(against_itself(BY_HAND), np.zeros((1, 8)))

    assert np.isnan([result.seen, result.by_chance, result.difference]).all()


ROWS = st.lists(
    st.tuples(*[st.booleans()] * 3, st.sampled_from(Preference), st.booleans()),
    min_size=1,
    max_size=5,
)


@given(ROWS, st.sampled_from(sorted(CONTRADICTIONS)))
def test_rate_by_chance_is_the_mean_over_all_permutations(rows, name):
    of = CONTRADICTIONS[name]
    seen, by_chance = [], []
    # Verdicts are permuted among turns that do (or do not) carry out the strategy, or among all.
    kinds = [row[4] for row in rows] if of is broken_promise else [T] * len(rows)
    for order in permutations(range(len(rows))):
        if any(kinds[place] != kinds[other] for place, other in enumerate(order)):
            continue
        permuted = table(
            *((*row[:3], rows[other][3], row[4]) for row, other in zip(rows, order, strict=True))
        )
        result = rates(of(permuted), unit_weights(permuted))
        seen.append(result.seen.item())
        by_chance.append(result.by_chance.item())

    expected = rates(of(table(*rows)), unit_weights(table(*rows))).by_chance.item()
    assert by_chance == pytest.approx([expected] * len(by_chance))
    assert np.mean(seen) == pytest.approx(expected)


@given(ROWS, st.sampled_from([(T, T, T), (F, F, F), (T, T, F)]), st.integers(0, 2**32 - 1))
def test_constant_step_verdicts_have_no_difference(rows, steps, seed):
    constant = table(*((*steps, row[3], row[4]) for row in rows))
    weights = np.random.default_rng(seed).multinomial(len(rows), [1 / len(rows)] * len(rows), 5)

    for of in CONTRADICTIONS.values():
        result = rates(of(constant), weights.astype(float))
        assert result.seen == pytest.approx(result.by_chance)


@given(ROWS, st.sampled_from(Preference))
def test_constant_reply_verdicts_have_no_difference(rows, preference):
    constant = table(*((*row[:3], preference, row[4]) for row in rows))

    for of in CONTRADICTIONS.values():
        assert rates(of(constant), unit_weights(constant)).difference == pytest.approx(0)


def test_coherent_judge_is_below_chance():
    rows = [(*[good] * 3, FIRST if good else SECOND, T) for good in (T, F) * 10]
    rows += [(*[good] * 3, SECOND if good else FIRST, F) for good in (T, F) * 10]
    coherent = table(*rows)

    # by chance 1/2 correct * 1/2 accepted * 1/2 of all turns; observed none
    assert rates(
        broken_promise(coherent), unit_weights(coherent)
    ).difference.item() == pytest.approx(-1 / 8)
