"""Calibration of a judge's probabilities: temperature, calibration error, reliability.

A temperature T divides the log-odds of a verdict: T above 1 makes a judge less confident. It changes no
verdict and is fitted on the validation split, which is not reported (Guo et al. 2017,
https://arxiv.org/abs/1706.04599).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit

from compeer_core.stats import Floats

_SMALLEST = 1e-6
"""Probabilities are kept this far from 0 and 1, where log-odds would be infinite."""
BINS = 10


@dataclass(frozen=True)
class Bin:
    """The verdicts whose probability of True lies between two bounds."""

    low: float
    high: float
    count: int
    mean_probability: float
    share_true: float


def fit_temperature(probability_true: Sequence[float], label: Sequence[bool]) -> float:
    """Return the temperature that minimises the log loss, in [0.05, 20].

    Args:
        probability_true: The judge's probabilities, in [0, 1].
        label: Whether True is correct.

    Raises:
        ValueError: There are no labels, or lengths differ.
    """
    odds, truth = _log_odds(probability_true), np.asarray(label, dtype=bool)
    if len(odds) != len(truth) or not len(odds):
        raise ValueError(f"{len(odds)} probabilities and {len(truth)} labels")

    def loss(log_temperature: float) -> float:
        scaled = odds / np.exp(log_temperature)
        return float(np.logaddexp(0.0, np.where(truth, -scaled, scaled)).mean())

    optimum = minimize_scalar(loss, bounds=(np.log(0.05), np.log(20.0)), method="bounded")
    return float(np.exp(optimum.x))


def tempered(probability_true: ArrayLike, temperature: float) -> Floats:
    """Return probabilities with their log-odds divided by the temperature.

    Example:
        >>> tempered([0.9, 0.5], 2.0).round(3)  # odds 9 become 3
        array([0.75, 0.5 ])
    """
    result: Floats = expit(_log_odds(probability_true) / temperature)
    return result


def reliability(probability_true: ArrayLike, label: Sequence[bool]) -> tuple[Bin, ...]:
    """Return the bins of equal width, without empty ones."""
    probability, truth = np.asarray(probability_true, dtype=float), np.asarray(label, dtype=bool)
    number = np.minimum((probability * BINS).astype(int), BINS - 1)
    return tuple(
        Bin(
            low=place / BINS,
            high=(place + 1) / BINS,
            count=int(held.sum()),
            mean_probability=float(probability[held].mean()),
            share_true=float(truth[held].mean()),
        )
        for place in range(BINS)
        if (held := number == place).any()
    )


def calibration_error(probability_true: ArrayLike, label: Sequence[bool]) -> float:
    """Return the expected calibration error: the mean gap between probability and accuracy.

    Example:
        >>> calibration_error([0.75] * 4, [True, True, True, False])
        0.0
    """
    bins = reliability(probability_true, label)
    total = sum(group.count for group in bins)
    return (
        sum(group.count * abs(group.mean_probability - group.share_true) for group in bins) / total
    )


def _log_odds(probability_true: ArrayLike) -> Floats:
    result: Floats = logit(np.clip(probability_true, _SMALLEST, 1 - _SMALLEST))
    return result
