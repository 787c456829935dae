"""Agreement between annotators, and adjudication where they differ (COMPEER, "Annotation").

Two people label each item independently; a third decides where they differ; without two equal labels the
item is dropped (`adjudicate`). Agreement is measured on the answers of the first two, before adjudication
(`measure_agreement`), by three coefficients, since none of them is sufficient alone:

- **raw**: how often two ratings of one item are equal. High by chance where one label dominates.
- **alpha** (Krippendorff): can be near 0 although people nearly always agree, if one label is rare.
- **AC1** (Gwet): designed not to drop because of a rare label.

See `compeer_core.stats` for the formulas. Intervals resample items, which covers the true value of alpha
more often than Krippendorff's own bootstrap (Zapf, Castell, Morawietz and Karch, 2016, BMC Medical
Research Methodology 16, 93).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np

from compeer_core.config import FrozenModel
from compeer_core.stats import (
    Estimate,
    Floats,
    estimate,
    gwet_ac1,
    krippendorff_alpha,
    raw_agreement,
    wilson,
)

Label = TypeVar("Label", bound=Hashable)

_RESAMPLES = 2000


class Agreement(FrozenModel):
    """Agreement on one question.

    A coefficient is None where it is undefined, and never NaN: all three where no item has two
    ratings, ``alpha`` also where all ratings are alike, so that no disagreement is expected.
    """

    n_items: int
    """Items with at least two ratings."""
    n_raters: int
    """People with at least one rating."""
    n_ratings: int
    """All ratings, including those of items with a single one."""
    shares: Mapping[str, float]
    """Share of each label among all ratings, in [0, 1]; read AC1 instead of alpha if one is rare."""
    raw: Estimate | None
    """In [0, 1]. Wilson interval if the raters of each item either all agree or all differ, else a
    bootstrap over items."""
    alpha: Estimate | None
    """At most 1. Bootstrap over items."""
    ac1: Estimate | None
    """In [-1, 1]. Bootstrap over items. Zero width where all ratings are alike: this sample has no
    disagreement, which does not exclude any; see the interval of ``raw``."""


def measure_agreement(
    ratings: Sequence[Mapping[str, Label]], labels: Sequence[Label], *, seed: int = 0
) -> Agreement:
    """Measure how far raters agree, before adjudication.

    Args:
        ratings: For each item, the label by rater, without those who did not rate it.
        labels: All labels that could have been given, at least two (AC1 depends on their number).
        seed: Of the bootstrap.

    Raises:
        ValueError: A rating is not one of the labels, or ``labels`` has fewer than two or a duplicate.

    Example:
        >>> both = [{"ann": True, "bo": True}] * 8 + [{"ann": True, "bo": False}] * 2
        >>> measured = measure_agreement(both, [True, False])
        >>> measured.raw.value, round(measured.alpha.value, 3), round(measured.ac1.value, 3)
        (0.8, -0.056, 0.756)
    """
    counts = _counts(ratings, labels)
    totals = counts.sum(axis=0)
    paired = counts[counts.sum(axis=1) >= 2]
    raw = alpha = ac1 = None
    if len(paired):
        # Items with the same ratings are alike, so that few patterns stand for many items.
        patterns, times = np.unique(counts[counts.sum(axis=1) > 0], axis=0, return_counts=True)
        rated = int(times.sum())
        drawn = np.random.default_rng(seed).multinomial(rated, times / rated, size=_RESAMPLES)
        weights = np.vstack([times, drawn]).astype(np.float64)
        raw, alpha, ac1 = (
            _estimated(measure(patterns, weights))
            for measure in (raw_agreement, krippendorff_alpha, gwet_ac1)
        )
        equal = (paired.max(axis=1) == paired.sum(axis=1)).sum()
        if raw is not None and np.isclose(raw.value * len(paired), equal):
            raw = wilson(int(equal), len(paired)).model_copy(update={"n": None})
    return Agreement(
        n_items=len(paired),
        n_raters=len({rater for item in ratings for rater in item}),
        n_ratings=int(totals.sum()),
        shares={
            str(label): float(total / max(totals.sum(), 1))
            for label, total in zip(labels, totals, strict=True)
        },
        raw=raw,
        alpha=alpha,
        ac1=ac1,
    )


def _estimated(values: Floats) -> Estimate | None:
    if np.isnan(values[0]) or np.isnan(values[1:]).all():
        return None
    return estimate(values, 1).model_copy(update={"n": None})


class Unsettled(StrEnum):
    """Why an item has no label."""

    NEEDS_FIRST = "needs_first"
    """Nobody has answered."""
    NEEDS_SECOND = "needs_second"
    """Fewer than two people have answered."""
    NEEDS_THIRD = "needs_third"
    """Two people differ, and no third has decided."""
    NO_CONSENSUS = "no_consensus"
    """Three people gave three labels, or two models two; the item is dropped."""


@dataclass(frozen=True)
class Consensus(Generic[Label]):
    """A label given by at least two people."""

    label: Label
    adjudicated: bool
    """The first two differed and the third decided."""


def adjudicate(
    first: Label, second: Label, third: Label | None = None
) -> Consensus[Label] | Unsettled:
    """Settle the label of an item by the paper's rule: two equal labels from two or three people.

    Args:
        first: The label of one annotator.
        second: The label of the other.
        third: The label of the adjudicator, or None. Ignored where the first two agree, since the
            paper adjudicates conflicts only.

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
    """Return how many raters gave each label to each item, shape (items, labels)."""
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
