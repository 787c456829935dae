"""How good models are, from pairs between which people chose (Bradley and Terry, 1952).

Each model has a strength, and the odds that the left of two is preferred are the exponential of
the difference of their strengths, plus a position term that all pairs share:

    P(left is preferred) = sigmoid(strength_left - strength_right + position)

(Bradley and Terry, "Rank analysis of incomplete block designs", Biometrika 39, 324-345; the term for
the order of presentation is that of Davidson and Beaver, 1977, Biometrics 33, 693-702.)

**Ties** count as half a vote for either side. Davidson (1970, JASA 65, 317-328) and Rao and Kupper
(1967) give ties a parameter of their own instead; the order of models comes out nearly the same, but
their strengths speak of the odds among decided votes only, so that two models which tie 98 times
and differ twice can seem far apart. Halves need no assumption about when people call a tie, and
keep a strength readable as a rate of points. **Neither acceptable** is no tie: it says something
about each reply and nothing about which is better, so it never comes here.

**Ridge**: strengths and position have a normal prior around 0. Without one there is no finite
solution as soon as some models never lost to the others (Ford, 1957, American Mathematical Monthly
64, 28-33), which is what small boards are like.

**Intervals** come from drawing raters anew, each with all of their votes, since votes of one person
are alike. Where nobody ever disagreed all resamples are the same, and a plain bootstrap would claim
certainty; so each resample also draws the centre of its prior from the prior, as in
randomised maximum a posteriori sampling (Bardsley, Solonen, Haario and Laine, 2014, SIAM J. Sci.
Comput. 36, A1895-A1910). With many votes that changes nothing; without any, it gives back the prior.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from compeer_core.config import FrozenModel

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

POINTS_PER_LOGIT = 400 / np.log(10)
"""Of the Elo scale: with 400 points more, a model is preferred ten times for each time it is not."""
FEW_RATERS = 5
"""With fewer people than this, drawing them anew says too little about how they vary."""

_Z = 1.959963984540054
_AT_ONCE = 2_000_000
"""Numbers in the curvature matrices that are solved in one go: 16 MB."""


class Estimate(FrozenModel):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


# --- Fitting -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matches:
    """Who met whom, and how it went, as often as there are vote sets to fit.

    Votes about the same two models in the same order are alike to the fit, so it sees only their
    numbers; 10,000 votes about ten models are at most 90 of them.
    """

    models: int
    left: Integers
    """Number of the model on the left, shape (matches,)."""
    right: Integers
    votes: Floats
    """Comparing votes, shape (sets, matches)."""
    points: Floats
    """Those for the left model, a tie being a half, shape (sets, matches)."""


@dataclass(frozen=True)
class Fit:
    """Parameters in logits, one row for each vote set."""

    strengths: Floats
    """Shape (sets, models), with mean 0 in each row."""
    position: Floats
    """What standing on the left adds, shape (sets,)."""
    parameters: Floats
    """Both before centring, to begin another fit with."""


def fit(
    matches: Matches, ridge: float, *, prior: Floats | None = None, start: Floats | None = None
) -> Fit:
    """Find the strengths and the position that make the votes and the prior most likely.

    Newton's method on all vote sets at once, each step halved until it improves on the last.

    Args:
        matches: The votes.
        ridge: One over the variance of the prior, in logits; above 0.
        prior: The centre of the prior, shape (sets, models + 1) with the position last; 0 if None.
        start: Where to begin, of the same shape; 0 if None.

    Example:
        >>> one = np.array([0]), np.array([1])
        >>> found = fit(Matches(2, *one, np.array([[80.0]]), np.array([[60.0]])), ridge=1e-9)
        >>> ahead = found.strengths[0, 0] - found.strengths[0, 1] + found.position[0]
        >>> bool(np.isclose(ahead, np.log(60 / 20)))
        True
    """
    shape = (len(matches.votes), matches.models + 1)
    centre = np.zeros(shape) if prior is None else prior
    begin = np.broadcast_to(0.0 if start is None else start, shape)
    design = _design(matches)
    size = max(1, _AT_ONCE // shape[1] ** 2)
    solved = [
        _newton(design, matches.votes[some], matches.points[some], ridge, centre[some], begin[some])
        for some in (slice(first, first + size) for first in range(0, shape[0], size))
    ]
    parameters = np.concatenate(solved)
    strengths = parameters[:, :-1]
    if matches.models:
        strengths = strengths - strengths.mean(axis=1, keepdims=True)
    return Fit(strengths, parameters[:, -1], parameters)


def _design(matches: Matches) -> Floats:
    rows = np.arange(len(matches.left))
    design = np.zeros((len(rows), matches.models + 1))
    design[rows, matches.left] += 1
    design[rows, matches.right] -= 1
    design[:, -1] = 1
    return design


def _newton(
    design: Floats, votes: Floats, points: Floats, ridge: float, centre: Floats, start: Floats
) -> Floats:
    size = design.shape[1]
    outer = (design[:, :, np.newaxis] * design[:, np.newaxis, :]).reshape(len(design), size**2)

    def loss(parameters: Floats) -> Floats:
        logits = parameters @ design.T
        likelihood = (points * logits - votes * np.logaddexp(0.0, logits)).sum(axis=1)
        result: Floats = ridge / 2 * ((parameters - centre) ** 2).sum(axis=1) - likelihood
        return result

    parameters = start.copy()
    now = loss(parameters)
    for _ in range(100):
        chance = (1 + np.tanh(parameters @ design.T / 2)) / 2
        slope = (points - votes * chance) @ design - ridge * (parameters - centre)
        curvature = ((votes * chance * (1 - chance)) @ outer).reshape(-1, size, size)
        curvature += ridge * np.eye(size)
        step = np.linalg.solve(curvature, slope[:, :, np.newaxis])[:, :, 0]
        # The last steps are smaller than what the loss can show of them.
        allowed = now + 1e-12 * (1 + np.abs(now))
        while (worse := (then := loss(parameters + step)) > allowed).any():
            step[worse] /= 2
        parameters, now = parameters + step, then
        if np.abs(step).max(initial=0.0) < 1e-7:  # the error is of the order of its square
            return parameters
    raise ArithmeticError("the fit did not settle in 100 steps")


# --- Resampling ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resamples:
    """Raters drawn anew, and the centre of each prior."""

    times: Floats
    """How often each rater was drawn, shape (fits, raters)."""
    prior: Floats
    """Standard normal, shape (fits, models + 1)."""


def resample(raters: int, models: int, fits: int, seed: int) -> Resamples:
    """Draw as many raters as there are, with replacement, `fits` times.

    Made of the generator's raw bits, which numpy promises never to change; it makes no such promise
    for the methods of `Generator` (NEP 19), and a board must come out the same in later years.
    """
    bits = np.random.PCG64(seed)

    def uniform(rows: int, columns: int) -> Floats:
        raw: NDArray[np.uint64] = bits.random_raw((rows, columns))
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)

    drawn = (uniform(fits, raters) * raters).astype(np.int64)
    flat = drawn + raters * np.arange(fits)[:, np.newaxis]
    times = np.bincount(flat.ravel(), minlength=fits * raters).reshape(fits, raters)
    radius = np.sqrt(-2 * np.log1p(-uniform(fits, models + 1)))  # Box and Muller, 1958
    return Resamples(
        times.astype(np.float64), radius * np.cos(2 * np.pi * uniform(fits, models + 1))
    )


def expanded(raters: int) -> float:
    """Return how many standard errors an interval reaches to either side, 1.96 for many raters.

    Percentiles of a bootstrap are too narrow for few: the resamples spread as if divided by n and
    not n - 1, and as if their spread were known. This is the expanded percentile interval of
    Hesterberg (2015, The American Statistician 69, 371-386).

    Example:
        >>> [round(expanded(raters), 2) for raters in (5, 10, 30, 1000)]
        [3.1, 2.38, 2.08, 1.96]
    """
    from scipy.special import stdtrit  # slow to load, for those who only vote

    return float(np.sqrt(raters / (raters - 1)) * stdtrit(raters - 1, 0.975))


def interval(value: float, draws: Floats, raters: int) -> Estimate:
    """Return a value with the interval that the resamples of so many raters (two or more) give."""
    tail = NormalDist().cdf(-expanded(raters))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(value=value, low=min(float(low), value), high=max(float(high), value))


def share(part: Floats, whole: Floats, times: Floats) -> Estimate | None:
    """Return what part of the votes are such, from 0 to 1; None without votes.

    The interval is that of the resamples. They show nothing if few people voted, or all resamples
    are alike because everybody voted the same. Then it is Wilson's (1927, JASA 22, 209-212) for as
    many votes as there are raters: the votes of one person then count as one.

    Args:
        part: Such votes of each rater, shape (raters,).
        whole: All votes of each rater, shape (raters,).
        times: How often each rater was drawn, shape (fits, raters).
    """
    if not whole.any():
        return None
    value = float(part.sum() / whole.sum())
    raters = int((whole > 0).sum())
    of = times @ whole
    draws = (times @ part)[of > 0] / of[of > 0]
    if raters >= FEW_RATERS and draws.size and np.ptp(draws) > 1e-12:
        return interval(value, draws, raters)
    spread = _Z / (1 + _Z**2 / raters)
    spread *= np.sqrt(value * (1 - value) / raters + (_Z / (2 * raters)) ** 2)
    middle = (value + _Z**2 / (2 * raters)) / (1 + _Z**2 / raters)
    return Estimate(
        value=value,
        low=float(np.clip(middle - spread, 0.0, value)),
        high=float(np.clip(middle + spread, value, 1.0)),
    )


# --- Ranks ---------------------------------------------------------------------------------------


def ranks(strengths: Floats) -> Integers:
    """Return the rank of each model, from 1; equally strong ones share it. Shape (..., models)."""
    rounded = np.round(strengths, 6)
    better = rounded[..., np.newaxis, :] > rounded[..., :, np.newaxis]
    result: Integers = 1 + better.sum(axis=-1)
    return result


def rank_intervals(strengths: Floats, draws: Floats, raters: int) -> list[tuple[int, int]]:
    """Return between which ranks each model is, with 95 % confidence.

    A model is below another for certain if the interval of their difference is above 0. All the
    differences of one model are to hold together, so that their intervals are as wide as the largest
    of the standardised deviations asks for (Mogstad, Romano, Shaikh and Wilhelm, 2024, Review of
    Economic Studies 91, 476-518). The ranks of the resamples themselves would be too sure: of two
    equal models, nearly every resample has one in front.

    Args:
        strengths: Shape (models,).
        draws: Those of the resamples, shape (fits, models).
        raters: How many people the resamples are drawn from; with few, intervals are `expanded`.
    """
    ahead = strengths[np.newaxis, :] - strengths[:, np.newaxis]
    deviation = draws[:, np.newaxis, :] - draws[:, :, np.newaxis] - ahead
    error = np.maximum(deviation.std(axis=0), 1e-12)
    largest = (np.abs(deviation) / error).max(axis=2, initial=0.0)
    allowed = np.quantile(largest, 0.95, axis=0)[:, np.newaxis] * error * expanded(raters) / _Z
    best = 1 + (ahead > allowed).sum(axis=1)
    worst = len(strengths) - (ahead < -allowed).sum(axis=1)
    return [(int(low), int(high)) for low, high in zip(best, worst, strict=True)]


# --- Who was compared with whom -------------------------------------------------------------------


def components(models: int, edges: Iterator[tuple[int, int]] | list[tuple[int, int]]) -> Integers:
    """Return for each model the smallest number of a model that it can be reached from and can reach.

    With every edge in both directions these are the connected parts; with an edge from each model to
    those that took points from it, the strongly connected parts, of which Ford's condition for a
    finite solution without a ridge allows only one.
    """
    reach = np.eye(models, dtype=bool)
    for begin, end in edges:
        reach[begin, end] = True
    for through in range(models):  # Warshall, 1962
        reach |= reach[:, through, np.newaxis] & reach[through]
    mutual = reach & reach.T
    return np.array([np.flatnonzero(row)[0] for row in mutual], dtype=np.int64)
