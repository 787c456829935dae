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

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

_CHUNK_ROUNDS = 4_000_000
"""Rounds per batch: about 100 MB."""


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
    rounds: Positions = _first(arrivals[np.newaxis], min(n, k))[0]
    return rounds


@dataclass(frozen=True)
class SampledRounds:
    """The rounds sampled from many dialogues, concatenated."""

    positions: Positions
    """The indices of all dialogues, shape (total,), ascending within each."""
    starts: Positions
    """The start of each dialogue in ``positions``, shape (dialogues + 1,)."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, dialogue: int) -> Positions:
        """Return the indices sampled from one dialogue (0 is the first).

        Raises:
            IndexError: There is no such dialogue.
        """
        if not 0 <= dialogue < len(self):
            raise IndexError(f"dialogue {dialogue} of {len(self)}")
        return self.positions[self.starts[dialogue] : self.starts[dialogue + 1]]


def sample_many(lengths: ArrayLike, k: int, rng: np.random.Generator) -> SampledRounds:
    """Sample from millions of dialogues at once.

    The result equals `sample_rounds` called for each dialogue in order with the same generator, so it
    does not depend on the batches.

    Args:
        lengths: Rounds of each dialogue, whole numbers of at least 0, shape (dialogues,).
        k: Rounds to sample from each, at least 0.
        rng: Provides ``sum(lengths)`` numbers.

    Raises:
        ValueError: ``k`` or a length is negative, or ``lengths`` is not one-dimensional or not of integers.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and not np.issubdtype(given.dtype, np.integer)):
        raise ValueError(
            f"lengths must be a 1-d array of integers, got {given.dtype} of shape {given.shape}"
        )
    rounds = given.astype(np.int64)
    _check(int(rounds.min(initial=0)), k)
    taken = np.minimum(rounds, k)
    starts = _starts(taken)
    positions = np.empty(starts[-1], dtype=np.int64)
    ends = np.cumsum(rounds)
    begin = 0
    while begin < len(rounds):
        drawn_before = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, drawn_before + _CHUNK_ROUNDS, side="right"))
        end = max(end, begin + 1)
        _race(rounds[begin:end], k, rng, positions, starts[begin:end])
        begin = end
    return SampledRounds(positions, starts)


def inclusion_probabilities(n: int, k: int) -> Floats:
    """Return the probability of each round to be among the ``k`` that `sample_rounds` returns.

    Round ``i`` is selected if fewer than ``k`` others arrive before it, so

        pi(i) = integral over t > 0 of p(i) exp(-p(i) t) P(fewer than k of the others before t) dt

    where each other round ``j`` has arrived with probability ``1 - exp(-p(j) t)``, independently.
    The number of arrivals is computed exactly; the integral uses the trapezoid rule in ``ln t``,
    which is accurate to about 12 digits here.

    Args:
        n: Rounds of the dialogue, at least 0. Time grows as ``n^2 k``: 30 rounds take
            milliseconds, 300 seconds.
        k: Rounds drawn, at least 0.

    Returns:
        Shape (n,), in [0, 1], sum ``min(n, k)``; not proportional to Eq. 1 unless ``k`` is 1.

    Raises:
        ValueError: ``n`` or ``k`` is negative.

    Example:
        >>> inclusion_probabilities(4, 2).round(4)
        array([0.5555, 0.7484, 0.5555, 0.1405])
    """
    _check(n, k)
    if k == 0 or n == 0:
        return np.zeros(n)
    if k >= n:
        return np.ones(n)
    p = round_probabilities(n)
    step = 0.15
    # Below the first node the integrand is under 1e-17, above the last exp(-p t) is.
    log_t = np.arange(-40.0, np.log(40.0 / p.min()) + step, step)
    t = np.exp(log_t)
    arrived = -np.expm1(-np.outer(p, t))
    # counts[i, c] = P(c of the others than i have arrived by t), shape (n, k, nodes)
    counts = np.zeros((n, k, len(t)))
    counts[:, 0] = 1.0
    for j in range(n):
        others = np.arange(n) != j
        before = counts[others]
        after = before * (1.0 - arrived[j])
        after[:, 1:] += before[:, :-1] * arrived[j]
        counts[others] = after
    density = np.outer(p, t) * (1.0 - arrived) * counts.sum(axis=1)
    total: Floats = density.sum(axis=1) * step
    return total


def _race(
    rounds: Positions, k: int, rng: np.random.Generator, positions: Positions, starts: Positions
) -> None:
    """Write the samples of dialogues of these lengths into ``positions``, from ``starts``."""
    exponential = rng.standard_exponential(int(rounds.sum()))
    offsets = _starts(rounds)[:-1]
    for n in np.unique(rounds):
        taken = min(int(n), k)
        alike = np.flatnonzero(rounds == n)
        arrivals = exponential[offsets[alike, np.newaxis] + np.arange(n)] / round_probabilities(n)
        positions[starts[alike, np.newaxis] + np.arange(taken)] = _first(arrivals, taken)


def _first(arrivals: Floats, k: int) -> Positions:
    """Return the columns of the ``k`` smallest values of each row, ascending, shape (rows, k)."""
    if k == arrivals.shape[1]:
        return np.broadcast_to(np.arange(k), arrivals.shape).copy()
    if k == 0:
        return np.empty((len(arrivals), 0), dtype=np.int64)
    columns: Positions = np.argpartition(arrivals, k - 1, axis=1)[:, :k]
    columns.sort(axis=1)
    return columns


def _starts(sizes: Positions) -> Positions:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def _check(n: int, k: int) -> None:
    if n < 0 or k < 0:
        raise ValueError(f"the numbers of rounds must not be negative, got {n=}, {k=}")
