"""Statistics with 95 % confidence intervals: the only place that computes them.

Shares come with Wilson intervals, everything else with a bootstrap. A bootstrap draws the units that
are independent of each other (dialogues, people), never rows that belong to one unit. Resamples are
rows of weights: how often each example was drawn, with the sample itself in row 0, so that a measure of
a thousand resamples is one matrix product:

    weights = bootstrap_weights(dialogue_ids)
    accuracy = estimate(weighted_mean(weights, is_correct), n=len(is_correct))

Agreement between raters takes weights too: `cohen_kappa`, `gwet_ac1` and `krippendorff_alpha` return
one value for each resample. scikit-learn's `cohen_kappa_score` takes one resample at a time, which
is 400 times slower; a test compares the two.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from compeer_core.config import FrozenModel

Floats = NDArray[np.float64]

RESAMPLES = 1000
FEW_CLUSTERS = 5
"""With fewer clusters than this, resampling them says too little about how they vary."""
Z = NormalDist().inv_cdf(0.975)
"""Standard errors that a 95 % interval of a normal distribution extends to either side."""


class Estimate(FrozenModel):
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float
    n: int | None = Field(default=None, exclude_if=lambda n: n is None)
    """Number of examples behind the value; None where the surrounding record has it."""

    def mapped(self, transform: Callable[[float], float]) -> "Estimate":
        """Return the estimate on another scale; `transform` must be increasing."""
        return Estimate(
            value=transform(self.value),
            low=transform(self.low),
            high=transform(self.high),
            n=self.n,
        )


# --- Shares --------------------------------------------------------------------------------------


def wilson(successes: float, trials: int) -> Estimate:
    """Return a share in [0, 1] with its Wilson interval (Wilson, 1927, JASA 22, 209-212).

    Args:
        successes: In [0, trials]. May be fractional, unlike in `scipy.stats.binomtest`, whose interval
            is the same otherwise: the share of clustered votes is no multiple of 1 / clusters.
        trials: Number of independent trials, at least 1.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> share = wilson(95, 100)
        >>> share.value, round(share.low, 3), round(share.high, 3)
        (0.95, 0.888, 0.978)
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"a share needs 0 <= successes <= trials, got {successes} of {trials}")
    share = successes / trials
    shrink = 1 + Z**2 / trials
    centre = (share + Z**2 / (2 * trials)) / shrink
    half_width = Z / shrink * math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2)
    return Estimate(
        value=share,
        low=min(max(centre - half_width, 0.0), share),
        high=max(min(centre + half_width, 1.0), share),
        n=trials,
    )


def clustered_share(successes: Floats, trials: Floats, weights: Floats) -> Estimate | None:
    """Return a share of votes in [0, 1], with an interval over the people who voted.

    The interval is the expanded percentile interval. Where fewer than `FEW_CLUSTERS` people voted, or
    all resamples are alike because everybody has the same share, it is the Wilson interval for as many
    votes as there are people.

    Args:
        successes: Per person, shape (people,).
        trials: Per person, shape (people,); 0 for those who did not vote.
        weights: Resamples of people, shape (resamples, people).

    Returns:
        None where nobody voted.
    """
    if not trials.any():
        return None
    value = float(successes.sum() / trials.sum())
    voters = int((trials > 0).sum())
    resampled = weights @ trials
    draws = (weights @ successes)[resampled > 0] / resampled[resampled > 0]
    if voters >= FEW_CLUSTERS and draws.size and np.ptp(draws) > 1e-12:
        return expanded_interval(value, draws, voters)
    return wilson(value * voters, voters).model_copy(update={"value": value, "n": None})


# --- Bootstrap -----------------------------------------------------------------------------------


def bootstrap_weights(
    clusters: Sequence[Any],
    resamples: int = RESAMPLES,
    seed: int | Sequence[int] = 0,
) -> Floats:
    """Draw whole clusters with replacement.

    Args:
        clusters: The cluster of each example, such as its dialogue, of one type that can be sorted;
            `range(n)` makes each example a cluster of its own.
        resamples: Number of resamples.
        seed: Of the draws.

    Returns:
        How often each example was drawn, shape (1 + resamples, n); row 0 is the sample itself.
    """
    place = {cluster: number for number, cluster in enumerate(sorted(set(clusters)))}
    member = np.array([place[cluster] for cluster in clusters])
    count = len(place)
    rng = np.random.default_rng(seed)
    times = rng.multinomial(count, np.full(count, 1 / count), size=resamples)
    return np.vstack([np.ones(len(member)), times[:, member]]).astype(np.float64)


def weighted_mean(weights: Floats, values: ArrayLike) -> Floats:
    """Return the mean of the known values under each row of weights.

    Args:
        weights: Shape (rows, n), as `bootstrap_weights` returns them.
        values: Shape (n,); NaN for an unknown value.

    Returns:
        Shape (rows,); NaN for a row without a known value.

    Example:
        >>> weighted_mean(np.array([[1, 1, 1], [0, 2, 1]]), [1.0, 4.0, float("nan")]).tolist()
        [2.5, 4.0]
    """
    numbers = np.asarray(values, dtype=np.float64)
    known_weights = weights * ~np.isnan(numbers)
    return ratio(known_weights @ np.nan_to_num(numbers), known_weights.sum(axis=1))


def estimate(values: Floats, n: int) -> Estimate:
    """Return the first value with the percentile interval of the others.

    Args:
        values: A measure of the sample, then of each resample, shape (1 + resamples,); NaN where it
            is undefined. Such resamples are left out.
        n: Number of examples.

    Raises:
        ValueError: The measure is undefined for the sample, or for all resamples.
    """
    draws = values[1:][~np.isnan(values[1:])]
    if math.isnan(values[0]) or not len(draws):
        raise ValueError("the measure is undefined for these rows")
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(value=float(values[0]), low=float(low), high=float(high), n=n)


def expanded_errors(clusters: int) -> float:
    """Return how many standard errors an interval extends to either side; 1.96 for many clusters.

    A percentile interval is too narrow for few clusters: resamples spread as if divided by n instead
    of n - 1, and as if their spread were known (Hesterberg, 2015, The American Statistician 69,
    371-386).

    Args:
        clusters: At least 2.

    Example:
        >>> [round(expanded_errors(clusters), 2) for clusters in (5, 10, 30, 1000)]
        [3.1, 2.38, 2.08, 1.96]
    """
    from scipy.special import stdtrit  # slow to import

    return float(np.sqrt(clusters / (clusters - 1)) * stdtrit(clusters - 1, 0.975))


def expanded_interval(value: float, draws: Floats, clusters: int) -> Estimate:
    """Return a value with the percentile interval of its draws, expanded for few clusters.

    Args:
        value: Of the sample.
        draws: Of the resamples, shape (resamples,), without NaN.
        clusters: Number of clusters in the sample, at least 2.
    """
    tail = NormalDist().cdf(-expanded_errors(clusters))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(value=value, low=min(float(low), value), high=max(float(high), value))


def bootstrap_p(draws: Floats, clusters: int) -> float:
    """Return the two-sided p-value of a difference: the level at which `expanded_interval` just excludes 0.

    Args:
        draws: Of the resamples, shape (resamples,), without NaN.
        clusters: Number of clusters in the sample, at least 2.

    Returns:
        In (0, 1]; never 0, since half a resample is added to either tail.
    """
    from scipy.special import ndtri, stdtr  # slow to import

    tails = ((draws <= 1e-12).sum(), (draws >= -1e-12).sum())  # sums of equal values are rounded
    beyond = (min(tails) + 0.5) / (len(draws) + 1)
    errors = float(ndtri(min(beyond, 0.5))) * math.sqrt((clusters - 1) / clusters)
    return float(2 * stdtr(clusters - 1, errors))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979, Scand. J. Statist. 6, 65-70), in their order.

    The correction holds for dependent tests too. scipy has only those of the false discovery rate.

    Example:
        >>> holm([0.04, 0.01, 0.03])
        [0.06, 0.03, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def jackknife(values: Floats, n: int) -> Estimate:
    """Return the first value with a normal interval from leaving out each part in turn.

    For measures of diversity: a resample holds texts twice, which makes any set look less diverse.

    Args:
        values: A measure of all n parts, then without each of them, shape (1 + n,).
        n: Number of parts. A single part has an interval of zero width.
    """
    whole, without = float(values[0]), values[1:]
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    return Estimate(value=whole, low=whole - 1.96 * error, high=whole + 1.96 * error, n=n)


# --- Agreement -----------------------------------------------------------------------------------


def cohen_kappa(tables: Floats) -> Floats:
    """Return Cohen's kappa of two raters (1960, Educ. Psychol. Meas. 20, 37-46), at most 1.

    Args:
        tables: Weighted counts, shape (tables, labels of one rater, labels of the other).

    Returns:
        Shape (tables,); NaN where both raters always give the same single label.
    """
    total = tables.sum(axis=(1, 2))
    by_chance = (tables.sum(axis=1) * tables.sum(axis=2)).sum(axis=1)
    hits = np.trace(tables, axis1=1, axis2=2) * total
    return ratio(hits - by_chance, total**2 - by_chance)


def raw_agreement(counts: Floats, weights: Floats) -> Floats:
    """Return the mean over items of the share of equal pairs of ratings, in [0, 1].

    Args:
        counts: How many raters gave each label to each item, shape (items, labels).
        weights: How often each item counts, shape (rows, items).

    Returns:
        Shape (rows,); NaN for a row without an item that has two ratings.
    """
    ratings = counts.sum(axis=1)
    pairs = ratings * (ratings - 1)
    return weighted_mean(weights, ratio((counts * (counts - 1)).sum(axis=1), pairs))


def gwet_ac1(counts: Floats, weights: Floats) -> Floats:
    """Return Gwet's AC1, in [-1, 1] (2008, Br. J. Math. Stat. Psychol. 61, 29-48).

    ``(p_a - p_e) / (1 - p_e)`` with the raw agreement ``p_a`` and
    ``p_e = sum_q pi_q (1 - pi_q) / (Q - 1)`` over the Q labels, ``pi_q`` being the mean share of
    label q. Every rated item counts in ``pi_q``, as in Gwet's handbook.

    Args:
        counts: How many raters gave each label to each item, shape (items, labels), with a column for
            each of the two or more labels that could have been given.
        weights: How often each item counts, shape (rows, items).

    Returns:
        Shape (rows,); NaN for a row without an item that has two ratings.
    """
    ratings = counts.sum(axis=1)
    rated = weights * (ratings > 0)
    shares = rated @ (counts / np.maximum(ratings, 1)[:, np.newaxis])
    shares = shares / np.maximum(rated.sum(axis=1), 1e-300)[:, np.newaxis]
    by_chance = (shares * (1 - shares)).sum(axis=1) / (counts.shape[1] - 1)
    result: Floats = (raw_agreement(counts, weights) - by_chance) / (1 - by_chance)
    return result


def krippendorff_alpha(counts: Floats, weights: Floats) -> Floats:
    """Return Krippendorff's alpha for nominal labels, at most 1 (2018, Content Analysis, ch. 12).

    ``1 - D_o / D_e``: the observed disagreement, divided by that of the same labels dealt out at
    random. Items with a single rating do not count.

    Args:
        counts: How many raters gave each label to each item, shape (items, labels).
        weights: How often each item counts, shape (rows, items).

    Returns:
        Shape (rows,); NaN for a row whose ratings are all alike, where no disagreement is expected.
    """
    ratings = counts.sum(axis=1)
    paired = counts * (ratings >= 2)[:, np.newaxis]
    unequal = (paired * (ratings[:, np.newaxis] - paired)).sum(axis=1) / np.maximum(ratings - 1, 1)
    labels = weights @ paired
    total = labels.sum(axis=1)
    return 1 - ratio((total - 1) * (weights @ unequal), total**2 - (labels**2).sum(axis=1))


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Divide element by element; NaN where the denominator is 0."""
    undefined = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    result: Floats = np.divide(numerator, denominator, out=undefined, where=denominator != 0)
    return result
