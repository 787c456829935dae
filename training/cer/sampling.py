"""Gaussian sparse sampling of rounds (COMPEER, Eq. 1).

Neighbouring rounds of a dialogue share most of their history. A few rounds are therefore sampled
from each dialogue of ``n`` rounds, more often from its middle than from its ends:

    p(i) = exp(-(i - mu)^2 / (2 sigma^2)) / sum_j exp(-(j - mu)^2 / (2 sigma^2)),   i = 1 .. n

with ``mu = n / 2`` and ``sigma = n / 4``. As printed, the peak lies at ``n / 2`` and not at the
centre ``(n + 1) / 2`` of 1 .. n: round ``i`` is as likely as round ``n - i``, and the last round is
the least likely. The code follows the printed formula.

The paper asks for unique rounds and does not say how they are drawn. Here it is successive sampling:
one round by ``p``, then one of the others by the renormalised ``p``, and so on. This is done without
a loop, as a race: round ``i`` arrives after a time ``E_i / p(i)`` with ``E_i`` standard exponential,
and the first ``k`` arrivals are selected. Round ``i`` is first with probability ``p(i)``, and since
exponential times have no memory, the race among the rest starts anew; so the distribution is exactly
the same (Efraimidis and Spirakis, 2006).

Rounds are returned as indices from 0: index 0 is round 1 of Eq. 1.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]


def round_probabilities(n: int) -> Floats:
    """Return the probability of each round to be the first one drawn (Eq. 1).

    Args:
        n: Rounds of the dialogue, at least 0.

    Returns:
        Shape (n,), in (0, 1], sum 1 (empty for ``n = 0``); element 0 is round 1.

    Raises:
        ValueError: ``n`` is negative.

    Example:
        >>> round_probabilities(4).round(4)
        array([0.2583, 0.4258, 0.2583, 0.0576])
    """
    _check(n, 0)
    if n == 0:
        return np.empty(0)
    rounds = np.arange(1, n + 1)
    mu, sigma = n / 2, n / 4
    weights: Floats = np.exp(-((rounds - mu) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    return weights


def sample_rounds(n: int, k: int, rng: np.random.Generator) -> Positions:
    """Return ``k`` distinct rounds of a dialogue in their original order.

    Args:
        n: Rounds of the dialogue, at least 0.
        k: Rounds to sample, at least 0; all are returned if ``k >= n``.
        rng: Provides ``n`` numbers for every ``k``.

    Returns:
        Positions from 0 to ``n - 1``, ascending, shape (min(n, k),).

    Raises:
        ValueError: ``n`` or ``k`` is negative.

    Example:
        >>> sample_rounds(10, 3, np.random.default_rng(0))
        array([2, 3, 4])
    """
    _check(n, k)
    arrivals = rng.standard_exponential(n) / round_probabilities(n)
    rounds: Positions = np.sort(np.argsort(arrivals, kind="stable")[:k])
    return rounds


def _check(n: int, k: int) -> None:
    if n < 0 or k < 0:
        raise ValueError(f"the numbers of rounds must not be negative, got {n=}, {k=}")
