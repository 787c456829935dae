"""Sample rows so that each step is wrong at a given rate, without changing how steps depend.

A model that labels near chance produces too many wrong steps for a data set. Which rows are selected
depends only on the pattern of their three labels, by raking (iterative proportional fitting, Deming
and Stephan, 1940): the table of the 2 x 2 x 2 patterns is scaled along one step after the other until
each step has its target. Raking changes the marginal rates and preserves every odds ratio between the
steps, so it neither creates nor removes a dependence.
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
    """No weights reach the targets: a step has the same label in all rows with weight."""


def rake(counts: Floats, false_shares: Sequence[float]) -> Floats:
    """Scale a table of patterns to target shares of wrong steps.

    Args:
        counts: Shape (2, 2, 2), axis by step, index 0 for wrong and 1 for right; any unit.
        false_shares: Target share of wrong verdicts of each step, in (0, 1).

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
                raise UnreachableError(
                    f"step {axis + 1} has the same label in all rows with weight"
                )
            scale = np.array([share, 1 - share]) / margin
            table = table * np.expand_dims(scale, tuple({0, 1, 2} - {axis}))
        if np.abs(false_shares_of(table) - np.asarray(false_shares)).max() < _CLOSE:
            return table
    raise UnreachableError("the targets contradict the existing patterns")


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
    """The part of a row that selection depends on."""

    id: str
    group: str
    """Rows of one group answer the same history."""
    pattern: Pattern


def choose(
    rows: Sequence[Row],
    false_shares: Sequence[float],
    *,
    per_group: int,
    seed: int,
) -> frozenset[str]:
    """Return the ids of the largest selection of rows with the target shares.

    Scarce patterns are filled first. Among rows of one pattern the order is drawn by seed and id, so
    the order of `rows` does not matter.

    Args:
        rows: Rows with distinct ids.
        false_shares: See `rake`.
        per_group: The most rows of one group.
        seed: The seed of the draws.

    Raises:
        UnreachableError: See `rake`.
        ValueError: An id occurs twice.
    """
    if len({row.id for row in rows}) != len(rows):
        raise ValueError("an id occurs twice among the rows to choose from")
    counts = table_of([row.pattern for row in rows])
    wanted = rake(counts, false_shares)
    by_pattern: defaultdict[Pattern, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda each: generator_for(seed, "raking", each.id).random()):
        by_pattern[row.pattern].append(row)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(wanted > 0, counts / wanted, np.inf).min()
    high = min(len(rows), math.floor(most + 1e-6))
    low, best = 0, frozenset[str]()
    while low < high:  # the largest size for which every pattern has enough rows
        size = (low + high + 1) // 2
        selection = _drawn(by_pattern, _quotas(wanted, size), per_group)
        if selection is None:
            high = size - 1
        else:
            low, best = size, selection
    return best


def _quotas(wanted: Floats, size: int) -> Mapping[Pattern, int]:
    """Distribute `size` rows over the patterns by largest remainder."""
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
    """Return the ids of rows that fill all quotas, or None if that fails in this order."""
    used: Counter[str] = Counter()
    selected: list[str] = []
    for pattern in sorted(quotas, key=lambda p: (_room(by_pattern.get(p, ()), quotas[p]), p)):
        missing = quotas[pattern]
        for row in by_pattern.get(pattern, ()):
            if missing and used[row.group] < per_group:
                used[row.group] += 1
                selected.append(row.id)
                missing -= 1
        if missing:
            return None
    return frozenset(selected)


def _room(rows: Sequence[Row], quota: int) -> float:
    return len(rows) / quota if quota else math.inf


# --- dependence -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dependence:
    """How a step's label depends on whether an earlier step is wrong."""

    wrong_after_wrong: float | None
    """Share of wrong labels if an earlier step is wrong; None without such rows."""
    wrong_after_right: float | None
    """The same if all earlier steps are right."""
    phi: float | None
    """Correlation of the two, in [-1, 1]; None if one of them is constant."""
    bits: float
    """Their mutual information."""
    n: int


def dependence(patterns: Sequence[Pattern], step: int) -> Dependence:
    """Measure how the label of a step (1 emotion, 2 strategy) depends on the earlier steps.

    Example:
        >>> rows = [(True, True, True)] * 3 + [(False, True, False)] * 3 + [(True, True, False)] * 2
        >>> measured = dependence(rows, 2)
        >>> measured.wrong_after_wrong, measured.wrong_after_right, round(measured.phi, 3)
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
