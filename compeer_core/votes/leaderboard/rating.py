"""Strengths of models from pairwise votes (Bradley and Terry, 1952), fitted by scikit-learn.

Each model has a strength. The log-odds that the left of two is preferred are the difference of their
strengths, plus a position term that all pairs share:

    P(left is preferred) = sigmoid(strength_left - strength_right + position)

This is a logistic regression without an intercept (Bradley and Terry, "Rank analysis of incomplete block
designs", Biometrika 39, 324-345; the position term is that of Davidson and Beaver, 1977, Biometrics 33,
693-702).

**Ties** count as half a vote for either side. Davidson (1970, JASA 65, 317-328) and Rao and Kupper
(1967) give ties a parameter of their own instead. The order of models comes out nearly the same, but
their strengths describe decided votes only, so that two models which tie 98 times and differ twice can
seem far apart. Half votes need no assumption about when people call a tie, and keep a strength readable
as a rate of points. **Neither acceptable** is not a tie: it says something about each reply and nothing
about which is better, so it is never passed to the fit.

**Ridge**: strengths and position have a normal prior around 0, the L2 penalty of the regression. Without
it there is no finite solution as soon as some models never lost to the others (Ford, 1957, American
Mathematical Monthly 64, 28-33), which is common on small boards.

**Intervals** come from resampling raters, each with all of their votes, since votes of one person are
alike. Where nobody ever disagreed all resamples are the same, and a plain bootstrap would claim
certainty. So each resample also draws the centre of its prior from the prior, as in randomised maximum a
posteriori sampling (Bardsley, Solonen, Haario and Laine, 2014, SIAM J. Sci. Comput. 36, A1895-A1910).
With many votes that changes nothing; without any, it returns the prior.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compeer_core.stats import Floats, Z, expanded_errors

Integers = NDArray[np.int64]

POINTS_PER_LOGIT = 400 / np.log(10)
"""Of the Elo scale: with 400 points more, a model is preferred ten times for each time it is not."""

_AT_ONCE = 100
"""Vote sets that are fitted together at most, so that memory stays bounded."""
_SLOPE = 1e-3
"""Slope of a vote set's loss at its solution that the fit aims at, in votes; ten times as much is refused."""
_TOLERANCE = 1e-9
"""Largest slope of the mean loss at the solution; below 1e-10, rounding stops the line search first."""


# --- Fitting -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matches:
    """Pairs of models and their votes, for one or more vote sets.

    Votes about the same two models in the same order are alike to the fit, so it needs only their
    numbers: 10,000 votes about ten models are at most 90 matches.
    """

    models: int
    left: Integers
    """Index of the model on the left, shape (matches,)."""
    right: Integers
    """Index of the model on the right, shape (matches,)."""
    votes: Floats
    """Votes that compare, ties included, shape (sets, matches)."""
    points: Floats
    """Votes for the left model, a tie being half a vote, shape (sets, matches)."""


@dataclass(frozen=True)
class Fit:
    """Parameters in logits, one row for each vote set."""

    strengths: Floats
    """Shape (sets, models), with mean 0 in each row."""
    position: Floats
    """What standing on the left adds, shape (sets,)."""


def fit(matches: Matches, ridge: float, *, prior: Floats | None = None) -> Fit:
    """Find the strengths and the position that maximise the posterior of the votes.

    Args:
        matches: The votes.
        ridge: One over the variance of the prior, in logits; above 0.
        prior: The centre of the prior, shape (sets, models + 1) with the position last; 0 if None.

    Example:
        >>> pair = np.array([0]), np.array([1])
        >>> fitted = fit(Matches(2, *pair, np.array([[80.0]]), np.array([[60.0]])), ridge=1e-6)
        >>> ahead = fitted.strengths[0, 0] - fitted.strengths[0, 1] + fitted.position[0]
        >>> bool(np.isclose(ahead, np.log(60 / 20)))
        True
    """
    sets, models = len(matches.votes), matches.models
    if models < 2 or not (matches.votes.any() or prior is not None):
        return Fit(np.zeros((sets, models)), np.zeros(sets))
    from scipy.linalg import helmert  # slow to import, as is scikit-learn

    # Strengths of mean 0 have one parameter less than there are models: orthonormal contrasts, under
    # which the penalty is the same and no direction is without curvature.
    contrasts: Floats = helmert(models)
    differences = contrasts[:, matches.left] - contrasts[:, matches.right]
    design = np.column_stack([differences.T, np.ones(len(matches.left))])
    won, lost = matches.points, matches.votes - matches.points
    if prior is not None:
        # The penalty is a distance from 0. That from another centre differs by the linear term
        # ridge * centre * parameter, which is the loss of a vote with this weight minus its opposite.
        slopes = ridge * np.column_stack([prior[:, :-1] @ contrasts.T, prior[:, -1]])
        design = np.vstack([design, np.eye(models)])
        won, lost = np.hstack([won, slopes]), np.hstack([lost, -slopes])
    most = float(matches.votes.sum(axis=1).max())
    size = max(1, min(_AT_ONCE, int(_SLOPE / (_TOLERANCE * max(1.0, most)))))
    parameters = np.vstack(
        [
            _solve(design, won[begin : begin + size], lost[begin : begin + size], ridge)
            for begin in range(0, sets, size)
        ]
    )
    return Fit(parameters[:, :-1] @ contrasts, parameters[:, -1])


def _solve(design: Floats, won: Floats, lost: Floats, ridge: float) -> Floats:
    """Return the parameters of some vote sets, fitted together: separate fits take 20 times as long.

    Args:
        design: Shape (matches, parameters).
        won: Points of the left model, shape (sets, matches).
        lost: Points of the right model.
        ridge: As for `fit`.

    Raises:
        ArithmeticError: The posterior of a set is not flat at its parameters.
    """
    from scipy.sparse import csr_array, eye_array, kron, vstack
    from sklearn.linear_model import LogisticRegression

    sets = len(won)
    blocks = kron(eye_array(sets), csr_array(design), format="csr")
    regression = LogisticRegression(
        C=1 / ridge, fit_intercept=False, solver="newton-cg", tol=_TOLERANCE, max_iter=1000
    )
    with warnings.catch_warnings():
        # Next to the solution, rounding can end the line search: the slopes are checked below.
        warnings.filterwarnings("ignore", "The line search algorithm did not converge")
        warnings.filterwarnings("ignore", "Line Search failed")
        regression.fit(
            vstack([blocks, blocks], format="csr"),
            np.repeat([1, 0], blocks.shape[0]),
            sample_weight=np.concatenate([won.ravel(), lost.ravel()]),
        )
    parameters: Floats = regression.coef_.reshape(sets, design.shape[1])
    votes = won + lost
    expected = votes / (1 + np.exp(-parameters @ design.T))
    slopes = np.abs((expected - won) @ design + ridge * parameters).max(axis=1)
    if (slopes > 10 * _SLOPE + 1e-8 * votes.sum(axis=1)).any():
        raise ArithmeticError(f"the fit of the board did not converge (slope {slopes.max():.1e})")
    return parameters


# --- Resampling ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resamples:
    """Resamples of raters, and the centre of each prior."""

    times: Floats
    """How often each rater was drawn, shape (fits, raters)."""
    prior: Floats
    """Standard normal, shape (fits, models + 1)."""


def resample(raters: int, models: int, fits: int, seed: int) -> Resamples:
    """Draw as many raters as there are, with replacement, `fits` times.

    Uses the raw bits of the generator, which numpy promises never to change. It makes no such promise
    for the methods of `Generator` (NEP 19), and a board must be reproducible years later.
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


# --- Ranks ---------------------------------------------------------------------------------------


def ranks(strengths: Floats) -> Integers:
    """Return the rank of each model from 1, shape (..., models); equally strong models share one."""
    rounded = np.round(strengths, 6)
    better = rounded[..., np.newaxis, :] > rounded[..., :, np.newaxis]
    result: Integers = 1 + better.sum(axis=-1)
    return result


def rank_intervals(strengths: Floats, draws: Floats, raters: int) -> list[tuple[int, int]]:
    """Return the best and the worst rank of each model, with 95 % confidence.

    A model ranks below another for certain if the interval of their difference is above 0. All
    differences of one model must hold together, so their intervals are as wide as the largest of the
    standardised deviations requires (Mogstad, Romano, Shaikh and Wilhelm, 2024, Review of Economic
    Studies 91, 476-518). The ranks of the resamples themselves would be too certain: of two equal
    models, nearly every resample puts one in front.

    Args:
        strengths: Shape (models,).
        draws: Strengths of the resamples, shape (fits, models).
        raters: Number of people who were resampled; see `compeer_core.stats.expanded_errors`.
    """
    ahead = strengths[np.newaxis, :] - strengths[:, np.newaxis]
    deviation = draws[:, np.newaxis, :] - draws[:, :, np.newaxis] - ahead
    error = np.maximum(deviation.std(axis=0), 1e-12)
    largest = (np.abs(deviation) / error).max(axis=2, initial=0.0)
    widening = expanded_errors(raters) / Z
    allowed = np.quantile(largest, 0.95, axis=0)[:, np.newaxis] * error * widening
    best = 1 + (ahead > allowed).sum(axis=1)
    worst = len(strengths) - (ahead < -allowed).sum(axis=1)
    return [(int(low), int(high)) for low, high in zip(best, worst, strict=True)]


# --- Connected models ----------------------------------------------------------------------------


def components(models: int, edges: Iterable[tuple[int, int]]) -> Integers:
    """Return for each model the smallest index of a model that it reaches and that reaches it.

    With every edge in both directions these are the connected components. With an edge from each
    model to those that took points from it, they are the strongly connected ones, of which Ford's
    condition for a finite solution without a ridge allows only one.
    """
    reach = np.eye(models, dtype=bool)
    for begin, end in edges:
        reach[begin, end] = True
    for through in range(models):  # Warshall, 1962
        reach |= reach[:, through, np.newaxis] & reach[through]
    mutual = reach & reach.T
    return np.array([np.flatnonzero(row)[0] for row in mutual], dtype=np.int64)
