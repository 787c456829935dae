"""How many cases a preference study needs, and which difference a given number can show.

A case is won, lost or tied. The test of equal win rates looks at the decided cases only (McNemar), and its
sample size for a difference d of win rates and a share psi of decided cases is

    n = (z_a sqrt(psi) + z_b sqrt(psi - d^2))^2 / d^2

(Connor, 1987, "Sample size for testing differences in proportions for the paired-sample design", Biometrics 43,
207-211). A test compares it with a simulation.

Several raters per case help less than as many cases, since their answers are alike: with k raters whose answers
correlate by r, the factor is (1 + (k - 1) r) / k (the design effect of Kish, 1965, Survey Sampling).
"""

import math
from statistics import NormalDist

DIFFERENCES = (0.05, 0.10, 0.15)
TIES = (0.0, 0.2, 0.4, 0.6)
POWER = 0.8
"""Probability that the test finds the difference."""
LEVEL = 0.05
"""Probability that the two-sided test finds one where there is none."""
_AT_LEVEL, _AT_POWER = NormalDist().inv_cdf(1 - LEVEL / 2), NormalDist().inv_cdf(POWER)


def cases_needed(difference: float, ties: float) -> int:
    """Return the number of cases that shows a difference of two win rates.

    Args:
        difference: Between the win rates of the two models, in (0, 1 - ties].
        ties: Share of cases without a winner, in [0, 1).

    Raises:
        ValueError: The difference is larger than the share of decided cases, or an argument is out of range.

    Example:
        >>> [cases_needed(difference, ties=0.3) for difference in (0.05, 0.10, 0.15)]
        [2196, 548, 242]
    """
    decided = 1 - ties
    if not 0 <= ties < 1 or not 0 < difference <= decided:
        raise ValueError(
            f"a difference is above 0 and at most 1 - ties, got {difference=} with {ties=}"
        )
    errors = _AT_LEVEL * math.sqrt(decided) + _AT_POWER * math.sqrt(decided - difference**2)
    return math.ceil(errors**2 / difference**2)


def smallest_difference(cases: int, ties: float) -> float | None:
    """Return the smallest difference of win rates that so many cases show; None if there is none.

    The inverse of `cases_needed`; see there for the arguments.

    Example:
        >>> round(smallest_difference(200, ties=0.3), 3)
        0.165
    """
    decided = 1 - ties
    # d sqrt(n) - z_a sqrt(psi) = z_b sqrt(psi - d^2), squared, is a quadratic equation in d.
    shift = _AT_LEVEL * math.sqrt(decided)
    square = cases + _AT_POWER**2
    rest = shift**2 - _AT_POWER**2 * decided
    root = shift**2 * cases - square * rest
    difference = (shift * math.sqrt(cases) + math.sqrt(root)) / square if root >= 0 else math.inf
    return difference if difference <= decided else None


def power_table(cases: int) -> str:
    """Return the numbers of cases that are needed, as Markdown, and what `cases` cases can show."""
    head = ["ties", *(f"{100 * each:.0f} points" for each in DIFFERENCES), f"{cases:,} cases show"]
    lines = [
        f"Cases needed to see a difference of win rates ({POWER:.0%} power, two-sided level {LEVEL:.0%};"
        " Connor, 1987):",
        "",
        f"| {' | '.join(head)} |",
        f"|{' ---: |' * len(head)}",
    ]
    for share in TIES:
        needed = [f"{cases_needed(each, share):,}" for each in DIFFERENCES]
        seen = smallest_difference(cases, share)
        shown = "nothing" if seen is None else f"{100 * seen:.1f} points"
        lines.append(f"| {' | '.join([f'{share:.0%}', *needed, shown])} |")
    return "\n".join(lines)
