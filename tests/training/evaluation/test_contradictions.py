"""Contradictions between verdicts, and how many there would be by chance."""

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
    """Of rows of three verdicts, the preference, and whether the reply follows its strategy."""
    return Table.of(
        [Verdicts(steps=row[:3], preference=row[3]) for row in rows], [row[4] for row in rows]
    )


def once(rows):
    return np.ones((1, len(rows.follows)))


BY_HAND = table(
    (T, T, T, FIRST, F),  # praised, accepted, not carried out; all right and better
    (T, T, T, SECOND, F),  # rejected; all right and worse
    (F, T, T, BOTH, F),  # praised, accepted, not carried out
    (T, T, F, FIRST, F),  # not praised; a wrong step and better
    (T, T, F, NEITHER, F),
    (T, F, T, FIRST, T),  # carried out; a wrong step and better
    (T, T, T, SECOND, T),  # carried out; all right and worse
    (T, T, T, NEITHER, T),
)


def test_broken_promises_by_hand():
    found = rates(broken_promise(BY_HAND), once(BY_HAND))

    assert holds(broken_promise(BY_HAND)).tolist() == [T, F, T, F, F, F, F, F]
    assert found.seen.item() == pytest.approx(2 / 8)
    # Of the 5 that do not carry out their strategy 3 are praised and 3 accepted: 3/5 * 3/5 * 5/8.
    assert found.by_chance.item() == pytest.approx(9 / 40)
    assert found.difference.item() == pytest.approx(1 / 40)


def test_steps_against_replies_by_hand():
    found = rates(against_itself(BY_HAND), once(BY_HAND))

    assert holds(against_itself(BY_HAND)).tolist() == [F, T, F, T, F, T, T, F]
    assert found.seen.item() == pytest.approx(4 / 8)
    # All right 4/8, worse 2/8; a wrong step 4/8, better 3/8: 8/64 + 12/64.
    assert found.by_chance.item() == pytest.approx(20 / 64)


def test_rows_count_as_often_as_they_are_drawn():
    weights = np.array(
        [[1, 1, 1, 1, 1, 1, 1, 1], [8, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 8]]
    )
    found = rates(broken_promise(BY_HAND), weights.astype(float))

    assert found.seen.tolist() == [0.25, 1.0, 0.0]
    assert found.by_chance.tolist() == pytest.approx([9 / 40, 1.0, 0.0])  # none that could be one


def test_where_no_turn_was_drawn_there_is_no_rate():
    found = rates(against_itself(BY_HAND), np.zeros((1, 8)))

    assert np.isnan([found.seen, found.by_chance, found.difference]).all()


ROWS = st.lists(
    st.tuples(*[st.booleans()] * 3, st.sampled_from(Preference), st.booleans()),
    min_size=1,
    max_size=5,
)


@given(ROWS, st.sampled_from(sorted(CONTRADICTIONS)))
def test_the_rate_by_chance_is_the_mean_over_all_ways_to_deal_the_replies_verdicts(rows, name):
    of = CONTRADICTIONS[name]
    seen, by_chance = [], []
    # Verdicts are dealt among turns that are alike in what their replies do, or among all.
    kinds = [row[4] for row in rows] if of is broken_promise else [T] * len(rows)
    for order in permutations(range(len(rows))):
        if any(kinds[place] != kinds[other] for place, other in enumerate(order)):
            continue
        dealt = table(
            *((*row[:3], rows[other][3], row[4]) for row, other in zip(rows, order, strict=True))
        )
        found = rates(of(dealt), once(dealt))
        seen.append(found.seen.item())
        by_chance.append(found.by_chance.item())

    expected = rates(of(table(*rows)), once(table(*rows))).by_chance.item()
    assert by_chance == pytest.approx([expected] * len(by_chance))
    assert np.mean(seen) == pytest.approx(expected)


@given(ROWS, st.sampled_from([(T, T, T), (F, F, F), (T, T, F)]), st.integers(0, 2**32 - 1))
def test_a_judge_that_says_the_same_of_all_steps_shows_no_coherence(rows, steps, seed):
    alike = table(*((*steps, row[3], row[4]) for row in rows))
    weights = np.random.default_rng(seed).multinomial(len(rows), [1 / len(rows)] * len(rows), 5)

    for of in CONTRADICTIONS.values():
        found = rates(of(alike), weights.astype(float))
        assert found.seen == pytest.approx(found.by_chance)


@given(ROWS, st.sampled_from(Preference))
def test_nor_does_one_that_says_the_same_of_all_replies(rows, preference):
    alike = table(*((*row[:3], preference, row[4]) for row in rows))

    for of in CONTRADICTIONS.values():
        assert rates(of(alike), once(alike)).difference == pytest.approx(0)


def test_a_judge_that_takes_its_verdicts_on_steps_into_account_is_below_chance():
    rows = [(*[good] * 3, FIRST if good else SECOND, T) for good in (T, F) * 10]
    rows += [(*[good] * 3, SECOND if good else FIRST, F) for good in (T, F) * 10]
    coherent = table(*rows)

    # 10 of 20 praised, 10 of 20 accepted, of half of all: 1/2 * 1/2 * 1/2 by chance, none seen.
    assert rates(broken_promise(coherent), once(coherent)).difference.item() == pytest.approx(
        -1 / 8
    )
