"""Cases a preference study needs: by hand, against a simulation, and the inverse."""

import numpy as np
import pytest

from training.evaluation.preference_power import cases_needed, power_table, smallest_difference


def test_cases_needed_by_hand():
    # (1.95996 * sqrt(0.7) + 0.84162 * sqrt(0.69))^2 / 0.01 = (1.63982 + 0.69910)^2 / 0.01 = 547.05
    assert cases_needed(0.10, ties=0.3) == 548
    # without ties and with a difference of 1 the second root vanishes: 1.95996^2 = 3.84
    assert cases_needed(1.0, ties=0.0) == 4


@pytest.mark.parametrize(("difference", "ties"), [(0.10, 0.0), (0.15, 0.3), (0.10, 0.6)])
def test_the_formula_agrees_with_a_simulation(difference, ties):
    cases = cases_needed(difference, ties)
    wins = (1 - ties + difference) / 2
    drawn = np.random.default_rng(0).multinomial(
        cases, [wins, wins - difference, ties], size=20_000
    )
    won, lost = drawn[:, 0], drawn[:, 1]
    # McNemar's test at 5 %
    found = np.abs(won - lost) > 1.959964 * np.sqrt(won + lost)

    assert found.mean() == pytest.approx(0.8, abs=0.02)


def test_a_difference_needs_fewer_cases_where_more_of_them_are_ties():
    assert cases_needed(0.1, ties=0.6) < cases_needed(0.1, ties=0.3) < cases_needed(0.1, ties=0.0)


@pytest.mark.parametrize("ties", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("cases", [50, 200, 1000])
def test_smallest_difference_is_the_inverse(cases, ties):
    difference = smallest_difference(cases, ties)

    assert difference is not None
    assert cases_needed(difference * (1 + 1e-9), ties) == cases


def test_few_cases_show_nothing():
    assert smallest_difference(3, ties=0.5) is None
    # (1.63982 + 0.84162 * sqrt(0.7 - 0.16477^2))^2 / 0.16477^2 = 200
    assert smallest_difference(200, ties=0.3) == pytest.approx(0.16477, abs=1e-5)


@pytest.mark.parametrize(("difference", "ties"), [(0.0, 0.3), (0.8, 0.3), (0.1, 1.0)])
def test_impossible_differences_are_refused(difference, ties):
    with pytest.raises(ValueError, match="above 0 and at most 1 - ties"):
        cases_needed(difference, ties)


def test_the_table_has_a_row_for_each_share_of_ties():
    lines = power_table(200).splitlines()

    assert lines[2] == "| ties | 5 points | 10 points | 15 points | 200 cases show |"
    assert lines[4] == "| 0% | 3,138 | 783 | 347 | 19.7 points |"
    assert len(lines) == 8
