"""How well annotators agree, and what is done where they do not (COMPEER, "Annotation").

Two people label each item on their own; a third decides where they differ; without two equal
labels the item is dropped (`adjudicate`). Agreement is measured on what the first two said,
before anyone decided (`measure_agreement`), three ways, since none of them is enough on its own:

- **raw**: how often two ratings of one item are equal. Easily high by chance.
- **alpha** (Krippendorff, 2018, nominal): 1 - D_o / D_e, the disagreement seen, divided by the
  one expected if the same labels were dealt out at random. Where one label is rare, alpha can be
  near 0 although people agree nearly always.
- **AC1** (Gwet, 2008, "Computing inter-rater reliability and its variance in the presence of high
  agreement", British Journal of Mathematical and Statistical Psychology 61, 29-48), made so that
  a rare label does not pull it down: ``(p_a - p_e) / (1 - p_e)`` with the raw agreement ``p_a``
  and ``p_e = sum_q pi_q (1 - pi_q) / (Q - 1)`` over the ``Q`` labels, ``pi_q`` being the mean
  share of label ``q``.

Where ratings are missing, the raw agreement is the mean over items with at least two ratings of
the share of equal pairs of ratings; every rated item counts in ``pi_q``, as in Gwet's handbook.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from compeer_core.config import FrozenModel

Label = TypeVar("Label", bound=Hashable)
Floats = NDArray[np.float64]

_RESAMPLES = 2000
_ITEMS_AT_ONCE = 1_000_000
"""Items drawn in one go by the bootstrap: some 20 MB."""


class Coefficient(FrozenModel):
    """A measure of agreement and its 95 % interval."""

    value: float
    low: float
    high: float


class Agreement(FrozenModel):
    """What is known about the agreement on one question.

    A coefficient is None where it is not defined, and never NaN: all three where no item has two
    ratings, ``alpha`` also where all ratings are alike (then no disagreement can be expected).
    """

    n_items: int
    """Items with at least two ratings."""
    n_raters: int
    """People who rated anything."""
    n_ratings: int
    """Ratings in all, those of items with a single one included."""
    shares: Mapping[str, float]
    """How much of all ratings each label has, in [0, 1]; read AC1 and not alpha if one is rare."""
    raw: Coefficient | None
    """In [0, 1]. Wilson's interval if each item is either agreed on or not (two ratings each),
    else a bootstrap over items."""
    alpha: Coefficient | None
    """At most 1. The interval is Krippendorff's own bootstrap, which draws pairs of ratings anew
    and keeps the expected disagreement."""
    ac1: Coefficient | None
    """In [-1, 1]. Bootstrap over items; of no width where all ratings are alike, which says that
    this sample has no disagreement and not that there is none: see ``raw`` there."""


def measure_agreement(
    ratings: Sequence[Mapping[str, Label]], labels: Sequence[Label], *, seed: int = 0
) -> Agreement:
    """Measure how well raters agree, before anyone adjudicates.

    Args:
        ratings: For each item, the label that each rater gave it; who did not rate is left out.
        labels: All labels that could have been given, at least two (AC1 depends on how many).
        seed: Of the bootstraps.

    Raises:
        ValueError: A rating is not one of the labels, or ``labels`` has fewer than two or one
            of them twice.

    Example:
        >>> both = [{"ann": True, "bo": True}] * 8 + [{"ann": True, "bo": False}] * 2
        >>> found = measure_agreement(both, [True, False])
        >>> found.raw.value, round(found.alpha.value, 3), round(found.ac1.value, 3)
        (0.8, -0.056, 0.756)
    """
    counts = _counts(ratings, labels)
    totals = counts.sum(axis=0)
    paired = int((counts.sum(axis=1) >= 2).sum())
    table = _table(counts)
    return Agreement(
        n_items=paired,
        n_raters=len({rater for item in ratings for rater in item}),
        n_ratings=int(totals.sum()),
        shares={
            str(label): float(total / max(totals.sum(), 1))
            for label, total in zip(labels, totals, strict=True)
        },
        raw=_raw(table, seed) if paired else None,
        alpha=_alpha(counts, seed),
        ac1=_bootstrapped(_ac1, table, seed) if paired else None,
    )


class Unsettled(StrEnum):
    """Why an item has no label."""

    NEEDS_SECOND = "needs_second"
    """Fewer than two people have answered."""
    NEEDS_THIRD = "needs_third"
    """Two people differ; a third has yet to decide."""
    NO_CONSENSUS = "no_consensus"
    """Three people gave three labels; the item is dropped and counted."""


@dataclass(frozen=True)
class Consensus(Generic[Label]):
    """A label that at least two people gave."""

    label: Label
    adjudicated: bool
    """The first two differed and the third decided."""


def adjudicate(
    first: Label, second: Label, third: Label | None = None
) -> Consensus[Label] | Unsettled:
    """Settle the label of one item by the paper's rule: two equal labels of two or three people.

    Args:
        first: One annotator's label.
        second: The other's.
        third: The label of the one who decides, None if nobody has. Not looked at where the first
            two agree, since the paper asks a third only about conflicts.

    Example:
        >>> adjudicate("True", "False")
        <Unsettled.NEEDS_THIRD: 'needs_third'>
        >>> adjudicate("True", "False", "False")
        Consensus(label='False', adjudicated=True)
        >>> adjudicate("first", "second", "both")
        <Unsettled.NO_CONSENSUS: 'no_consensus'>
    """
    if first == second:
        return Consensus(first, adjudicated=False)
    if third is None:
        return Unsettled.NEEDS_THIRD
    if third in (first, second):
        return Consensus(third, adjudicated=True)
    return Unsettled.NO_CONSENSUS


def _counts(ratings: Sequence[Mapping[str, Label]], labels: Sequence[Label]) -> Floats:
    """Return how often each item was given each label, shape (items, labels)."""
    column = {label: number for number, label in enumerate(labels)}
    if len(column) < 2 or len(column) < len(labels):
        raise ValueError(f"at least two different labels are needed, got {list(labels)}")
    counts = np.zeros((len(ratings), len(labels)))
    for row, item in enumerate(ratings):
        for rater, label in item.items():
            if label not in column:
                raise ValueError(
                    f"item {row}: {rater} gave {label!r}, which is none of {list(labels)}"
                )
            counts[row, column[label]] += 1
    return counts


def _table(counts: Floats) -> Floats:
    """Return for each rated item: its raw agreement, whether it has one, its share of each label.

    Both measures are ratios of the column sums of this table, shape (items, 2 + labels).
    """
    rated = counts[counts.sum(axis=1) > 0]
    n = rated.sum(axis=1, keepdims=True)
    pairs = (n * (n - 1))[:, 0]
    has_pair = pairs > 0
    equal = (rated * (rated - 1)).sum(axis=1) / np.where(has_pair, pairs, 1)
    return np.column_stack([equal, has_pair, rated / n])


def _raw_of(sums: Floats) -> Floats:
    result: Floats = sums[:, 0] / sums[:, 1]
    return result


def _ac1(sums: Floats) -> Floats:
    """Return Gwet's AC1 for rows of column sums; its denominator is at least 1 - 1 / Q."""
    share = sums[:, 2:] / sums[:, 2:].sum(axis=1, keepdims=True)
    by_chance = (share * (1 - share)).sum(axis=1) / (share.shape[1] - 1)
    result: Floats = (_raw_of(sums) - by_chance) / (1 - by_chance)
    return result


def _raw(table: Floats, seed: int) -> Coefficient:
    equal = table[table[:, 1] > 0, 0]
    if not np.isin(equal, (0.0, 1.0)).all():
        return _bootstrapped(_raw_of, table, seed)
    from scipy.stats import binomtest  # a second, which no one who only votes should wait for

    interval = binomtest(int(equal.sum()), len(equal)).proportion_ci(method="wilson")
    return Coefficient(
        value=float(equal.mean()), low=float(interval.low), high=float(interval.high)
    )


def _bootstrapped(measure: Callable[[Floats], Floats], table: Floats, seed: int) -> Coefficient:
    """Return a measure of column sums with its percentile interval over items drawn anew."""
    rng = np.random.default_rng(seed)
    n = len(table)
    at_once = max(1, _ITEMS_AT_ONCE // n)
    sums = []
    for begin in range(0, _RESAMPLES, at_once):
        resamples = np.arange(min(at_once, _RESAMPLES - begin))[:, np.newaxis]
        rows = rng.integers(n, size=(len(resamples), n)) + n * resamples
        times = np.bincount(rows.ravel(), minlength=rows.size).reshape(rows.shape)
        sums.append(times @ table)
    drawn = np.concatenate(sums)
    low, high = np.quantile(measure(drawn[drawn[:, 1] > 0]), [0.025, 0.975])
    value = measure(table.sum(axis=0, keepdims=True))[0]
    return Coefficient(value=float(value), low=float(low), high=float(high))


def _alpha(counts: Floats, seed: int) -> Coefficient | None:
    paired = counts[counts.sum(axis=1) >= 2].astype(np.int64)
    if (paired.sum(axis=0) > 0).sum() < 2:
        return None
    import pandas as pd  # slow to load, as evalica is
    from evalica import alpha_bootstrap

    # Who gave a rating does not matter to alpha: ratings stand in columns from the left.
    most = int(paired.sum(axis=1).max())
    placed = np.full((len(paired), most), np.nan)
    codes = np.arange(paired.shape[1], dtype=float)
    for row, item in enumerate(paired):
        placed[row, : item.sum()] = np.repeat(codes, item)
    found = alpha_bootstrap(
        pd.DataFrame(placed.T), "nominal", n_resamples=_RESAMPLES, random_state=seed
    )
    return Coefficient(value=found.alpha, low=found.low, high=found.high)
