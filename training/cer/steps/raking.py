"""Drawing rows so that each step is wrong as often as wanted, without touching how steps depend.

A model that labels near chance gives too many wrong steps for a data set. Which rows are taken is
decided by the pattern of their three labels alone, by raking (iterative proportional fitting,
Deming and Stephan, 1940): the table of the 2 x 2 x 2 patterns is scaled along one step after the
other until each step has its target. Raking changes how often each step is wrong and keeps every
odds ratio between the steps, so a dependence that the rows have is neither made nor lost.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.cer.requests.seeding import generator_for

Floats = NDArray[np.float64]
Pattern = tuple[bool, bool, bool]
"""Whether the history, the emotion and the strategy step are right."""

_ROUNDS = 10_000
_CLOSE = 1e-9


class UnreachableError(ValueError):
    """No weights give the targets: a step is right, or wrong, in all rows that have weight."""


def rake(counts: Floats, false_shares: Sequence[float]) -> Floats:
    """Scale a table of patterns to the wanted shares of wrong steps.

    Args:
        counts: Shape (2, 2, 2), axis by step, index 0 for wrong and 1 for right; any unit.
        false_shares: Wanted share of wrong verdicts of each step, in (0, 1).

    Returns:
        Shape (2, 2, 2), sum 1, with the odds ratios of `counts`.

    Raises:
        UnreachableError: There is no such table.

    Example:
        >>> flat = rake(np.ones((2, 2, 2)), [0.4, 0.2, 0.2])
        >>> round(float(flat[1, 1, 1]), 3)  # 0.6 x 0.8 x 0.8
        0.384
    """
    table: Floats = np.asarray(counts, dtype=float)
    if table.sum() <= 0:
        raise UnreachableError("there are no rows")
    table = table / table.sum()
    for _ in range(_ROUNDS):
        for axis, share in enumerate(false_shares):
            margin = table.sum(axis=tuple({0, 1, 2} - {axis}))
            if (margin <= 0).any():
                raise UnreachableError(f"step {axis + 1} is the same in all rows that have weight")
            scale = np.array([share, 1 - share]) / margin
            table = table * np.expand_dims(scale, tuple({0, 1, 2} - {axis}))
        if np.abs(false_shares_of(table) - np.asarray(false_shares)).max() < _CLOSE:
            return table
    raise UnreachableError("the targets contradict the patterns that there are")


def false_shares_of(table: Floats) -> Floats:
    """Return the share of wrong verdicts of each step, shape (3,)."""
    wrong: Floats = np.array([table[0].sum(), table[:, 0].sum(), table[:, :, 0].sum()])
    wrong /= table.sum()
    return wrong


def table_of(patterns: Sequence[Pattern]) -> Floats:
    """Count patterns, shape (2, 2, 2)."""
    table = np.zeros((2, 2, 2))
    for (first, second, third), count in Counter(patterns).items():
        table[int(first), int(second), int(third)] = count
    return table


@dataclass(frozen=True)
class Row:
    """What is known of a row when rows are chosen."""

    id: str
    group: str
    """Rows of one group are answers to the same history."""
    pattern: Pattern


def choose(
    rows: Sequence[Row],
    false_shares: Sequence[float],
    *,
    per_group: int,
    at_most: int | None,
    seed: int,
) -> frozenset[str]:
    """Return the ids of as many rows as can be had with the wanted shares.

    Patterns that are scarce are served first. Among rows of one pattern the order is drawn by seed
    and id, so the order of `rows` does not matter.

    Args:
        rows: With distinct ids.
        false_shares: See `rake`.
        per_group: At most so many rows of one group.
        at_most: At most so many rows in all.
        seed: Of the draws.

    Raises:
        UnreachableError: See `rake`.
        ValueError: An id stands twice.
    """
    if len({row.id for row in rows}) != len(rows):
        raise ValueError("an id stands twice among the rows to choose from")
    counts = table_of([row.pattern for row in rows])
    wanted = rake(counts, false_shares)
    by_pattern: defaultdict[Pattern, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda each: generator_for(seed, "raking", each.id).random()):
        by_pattern[row.pattern].append(row)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(wanted > 0, counts / wanted, np.inf).min()
    high = min(len(rows), math.floor(most + 1e-6), at_most if at_most is not None else len(rows))
    low, best = 0, frozenset[str]()
    while low < high:  # the largest number of rows for which every pattern finds enough
        size = (low + high + 1) // 2
        found = _drawn(by_pattern, _quotas(wanted, size), per_group)
        if found is None:
            high = size - 1
        else:
            low, best = size, found
    return best


def _quotas(wanted: Floats, size: int) -> Mapping[Pattern, int]:
    """Share `size` rows out by largest remainder."""
    exact = {_pattern(index): float(share) * size for index, share in np.ndenumerate(wanted)}
    quotas = {pattern: math.floor(value + 1e-9) for pattern, value in exact.items()}
    by_remainder = sorted(exact, key=lambda p: (quotas[p] - exact[p], p))
    for pattern in by_remainder[: size - sum(quotas.values())]:
        quotas[pattern] += 1
    return quotas


def _pattern(index: tuple[int, ...]) -> Pattern:
    first, second, third = index
    return bool(first), bool(second), bool(third)


def _drawn(
    by_pattern: Mapping[Pattern, Sequence[Row]], quotas: Mapping[Pattern, int], per_group: int
) -> frozenset[str] | None:
    """Return rows that fill all quotas, or None where they cannot be filled in this order."""
    taken: Counter[str] = Counter()
    found: list[str] = []
    for pattern in sorted(quotas, key=lambda p: (_room(by_pattern.get(p, ()), quotas[p]), p)):
        missing = quotas[pattern]
        for row in by_pattern.get(pattern, ()):
            if missing and taken[row.group] < per_group:
                taken[row.group] += 1
                found.append(row.id)
                missing -= 1
        if missing:
            return None
    return frozenset(found)


def _room(rows: Sequence[Row], quota: int) -> float:
    return len(rows) / quota if quota else math.inf


# --- dependence -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dependence:
    """How a step's label goes with whether an earlier step is wrong."""

    wrong_after_wrong: float | None
    """Share of wrong labels where an earlier step is wrong; None where there is no such row."""
    wrong_after_right: float | None
    """The same where all earlier steps are right."""
    phi: float | None
    """Correlation of the two, in [-1, 1]; None where one of them never varies."""
    bits: float
    """Their mutual information."""
    n: int


def dependence(patterns: Sequence[Pattern], step: int) -> Dependence:
    """Measure how the label of a step (1 emotion, 2 strategy) goes with those of earlier steps.

    Example:
        >>> rows = [(True, True, True)] * 3 + [(False, True, False)] * 3 + [(True, True, False)] * 2
        >>> found = dependence(rows, 2)
        >>> found.wrong_after_wrong, found.wrong_after_right, round(found.phi, 3)
        (1.0, 0.4, 0.6)
    """
    table = np.zeros((2, 2))
    for pattern in patterns:
        table[int(not all(pattern[:step])), int(not pattern[step])] += 1
    return Dependence(
        wrong_after_wrong=_share(table[1]),
        wrong_after_right=_share(table[0]),
        phi=_phi(table),
        bits=_mutual_information(table),
        n=len(patterns),
    )


def _share(row: Floats) -> float | None:
    return float(row[1] / row.sum()) if row.sum() else None


def _phi(table: Floats) -> float | None:
    product = float(np.prod(table.sum(axis=0)) * np.prod(table.sum(axis=1)))
    return float(np.linalg.det(table)) / math.sqrt(product) if product > 0 else None


def _mutual_information(table: Floats) -> float:
    if not table.sum():
        return 0.0
    joint = table / table.sum()
    expected = np.outer(joint.sum(axis=1), joint.sum(axis=0))
    there = joint > 0
    return max(0.0, float((joint[there] * np.log2(joint[there] / expected[there])).sum()))
