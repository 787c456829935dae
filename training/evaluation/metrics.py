"""Numbers with their intervals: shares, perplexity, and the report on a reward model.

Intervals are at 95 %: Wilson's for a share of independent trials, percentile bootstrap otherwise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    recall_score,
    roc_auc_score,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float
    n: int
    """How many independent examples are behind it."""


def share(successes: int, trials: int) -> Estimate:
    """Return a share in [0, 1] with Wilson's interval.

    Raises:
        ValueError: There were no trials.

    Example:
        >>> estimate = share(95, 100)
        >>> estimate.value, round(estimate.low, 3), round(estimate.high, 3)
        (0.95, 0.888, 0.978)
    """
    interval = binomtest(successes, trials).proportion_ci(method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high), trials)


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], float], n: int, *, resamples: int = 1000, seed: int = 0
) -> Estimate:
    """Return a statistic with its percentile bootstrap interval.

    Args:
        statistic: Takes row numbers, shape (n,), with repetitions, and returns the statistic of
            these rows; NaN where it is not defined for them (such resamples are left out).
        n: Number of rows.
        resamples: How often rows are drawn anew.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    drawn = [statistic(rng.integers(n, size=n)) for _ in range(resamples)]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(statistic(np.arange(n)), float(low), float(high), n)


def perplexity(losses: Sequence[float], tokens: Sequence[int]) -> Estimate:
    """Return exp of the mean loss per token, with the interval over documents.

    Args:
        losses: Summed negative log-likelihood of each document, in nats.
        tokens: Tokens of each document.

    Example:
        >>> round(perplexity([2.0, 4.0], [1, 2]).value, 3)  # exp(6 / 3)
        7.389
    """
    loss, count = np.asarray(losses), np.asarray(tokens)
    return bootstrap(lambda rows: math.exp(loss[rows].sum() / count[rows].sum()), len(loss))


def reward_model_report(
    correct: Sequence[bool], probability_correct: Sequence[float]
) -> dict[str, Estimate]:
    """Return what is known about verdicts on one step (COMPEER, Table 1, and what it lacks).

    A judge that always says True reaches a high weighted F1 where few steps are wrong. That value
    stands beside the judge's own, as do measures that such a judge cannot pass.

    Args:
        correct: The labels.
        probability_correct: The judge's probability of True, in [0, 1]; its verdict is True where
            it is above 0.5.

    Raises:
        ValueError: Lengths differ, or all labels are alike.
    """
    label = np.asarray(correct, dtype=bool)
    probability = np.asarray(probability_correct, dtype=float)
    if label.shape != probability.shape:
        raise ValueError(f"{len(label)} labels but {len(probability)} probabilities")
    if label.all() or not label.any():
        raise ValueError("all labels are alike, nothing can be told about the judge")
    verdict = probability > 0.5

    def weighted_f1(rows: NDArray[np.int64], given: NDArray[np.bool_]) -> float:
        return float(f1_score(label[rows], given[rows], average="weighted", zero_division=0.0))

    def two_classes(measure: Callable[[NDArray[np.int64]], float]) -> Estimate:
        def statistic(rows: NDArray[np.int64]) -> float:
            chosen = label[rows]
            return measure(rows) if chosen.any() and not chosen.all() else math.nan

        return bootstrap(statistic, len(label))

    always_true = np.ones_like(label)
    return {
        "weighted_f1": bootstrap(lambda rows: weighted_f1(rows, verdict), len(label)),
        "weighted_f1_always_true": bootstrap(
            lambda rows: weighted_f1(rows, always_true), len(label)
        ),
        "recall_false": two_classes(
            lambda rows: float(recall_score(~label[rows], ~verdict[rows], zero_division=0.0))
        ),
        "balanced_accuracy": two_classes(
            lambda rows: float(balanced_accuracy_score(label[rows], verdict[rows]))
        ),
        "auroc": two_classes(lambda rows: float(roc_auc_score(label[rows], probability[rows]))),
    }


def preference_report(labels: Sequence[str], verdicts: Sequence[str]) -> dict[str, Estimate]:
    """Return accuracy and weighted F1 of the four-way preference, beside the commonest label's."""
    label, verdict = np.asarray(labels), np.asarray(verdicts)
    names, counts = np.unique(label, return_counts=True)
    commonest = np.full_like(label, names[counts.argmax()])

    def accuracy(given: NDArray[np.str_]) -> Estimate:
        return bootstrap(lambda rows: float(accuracy_score(label[rows], given[rows])), len(label))

    return {
        "accuracy": accuracy(verdict),
        "accuracy_commonest": accuracy(commonest),
        "weighted_f1": bootstrap(
            lambda rows: float(
                f1_score(label[rows], verdict[rows], average="weighted", zero_division=0.0)
            ),
            len(label),
        ),
    }
