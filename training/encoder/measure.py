"""How near an encoder comes to its teacher, and how much faster it is."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr

from compeer_core.stats import Estimate, estimate
from training.encoder.texts import Replies

Pairs = NDArray[np.int64]


def pairs_between(replies: Replies, count: int, rng: np.random.Generator) -> Pairs:
    """Return numbers of two replies of different dialogues, shape (count, 2)."""
    return _drawn(replies, count, rng, same=False)


def pairs_within(replies: Replies, count: int, rng: np.random.Generator) -> Pairs:
    """Return numbers of two replies of one dialogue, shape (count, 2); none if no dialogue has two."""
    dialogues = np.asarray(replies.dialogues)
    if len(np.unique(dialogues)) == len(dialogues):
        return np.empty((0, 2), dtype=np.int64)
    return _drawn(replies, count, rng, same=True)


def _drawn(replies: Replies, count: int, rng: np.random.Generator, *, same: bool) -> Pairs:
    dialogues = np.asarray(replies.dialogues)
    found = np.empty((0, 2), dtype=np.int64)
    while len(found) < count:
        tried = rng.integers(len(dialogues), size=(max(2 * count, 64), 2))
        together = dialogues[tried[:, 0]] == dialogues[tried[:, 1]]
        fits = together & (tried[:, 0] != tried[:, 1]) if same else ~together
        found = np.concatenate([found, tried[fits]])
    return found[:count]


def agreement(
    ours: ArrayLike,
    theirs: ArrayLike,
    pairs: Pairs,
    replies: Replies,
    *,
    resamples: int = 500,
    seed: int = 0,
) -> Estimate:
    """Return Spearman's correlation of the cosines of pairs, with a bootstrap over dialogues.

    A dialogue drawn n times counts its pairs n times; a pair of two dialogues n x m times.

    Args:
        ours: Embeddings of the replies, shape (replies, any).
        theirs: The teacher's.
        pairs: Which replies are compared, shape (pairs, 2).
        replies: Whose dialogues are drawn.
        resamples: How often.
        seed: Of the draws.
    """
    one, other = cosines(ours, pairs), cosines(theirs, pairs)
    where = np.asarray(replies.dialogues)[pairs]
    within = bool((where[:, 0] == where[:, 1]).all())
    count = max(replies.dialogues) + 1
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        times = np.bincount(rng.integers(count, size=count), minlength=count)
        weight = times[where[:, 0]] if within else times[where[:, 0]] * times[where[:, 1]]
        rows = np.repeat(np.arange(len(pairs)), weight)
        if len(rows) > 2:
            drawn.append(_spearman(one[rows], other[rows]))
    value = _spearman(one, other)
    if np.isnan(value) or np.isnan(drawn).all():
        return Estimate(value=value, low=value, high=value, n=len(pairs))
    return estimate(np.array([value, *drawn]), len(pairs))


def cosines(vectors: ArrayLike, pairs: Pairs) -> NDArray[np.float64]:
    """Return the cosine of each pair; 0 where a vector is zero."""
    rows = np.asarray(vectors, dtype=np.float64)
    lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    unit = rows / lengths
    result: NDArray[np.float64] = (unit[pairs[:, 0]] * unit[pairs[:, 1]]).sum(axis=1)
    return result


def _spearman(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")  # of one pair alone, for example
    return float(spearmanr(first, second).statistic)


@dataclass(frozen=True)
class Speed:
    """Texts a second of two encoders, timed in turn.

    Attributes:
        ours: Median over the rounds, with the slowest and the fastest.
        theirs: The teacher's.
        times: How many times as fast ours is; the median of the rounds' own ratios.
    """

    ours: Estimate
    theirs: Estimate
    times: Estimate


def speed(
    ours: Callable[[Sequence[str]], object],
    theirs: Callable[[Sequence[str]], object],
    texts: Sequence[str],
    rounds: int,
) -> Speed:
    """Time both on the same texts, one after the other, so that other work slows both alike.

    It is the time of the process that is taken, not that of the clock: on one thread it is what the
    clock would tell on a machine that does nothing else.
    """
    ours(texts[:8]), theirs(texts[:8])  # what is set up at the first call is not timed
    fast, slow = [], []
    for _ in range(rounds):
        fast.append(len(texts) / _seconds(ours, texts))
        slow.append(len(texts) / _seconds(theirs, texts))
    ratios = [one / other for one, other in zip(fast, slow, strict=True)]
    return Speed(_range(fast), _range(slow), _range(ratios))


def _seconds(encode: Callable[[Sequence[str]], object], texts: Sequence[str]) -> float:
    started = time.process_time()
    encode(texts)
    return max(time.process_time() - started, 1e-9)


def _range(values: Sequence[float]) -> Estimate:
    middle = statistics.median(values)
    return Estimate(value=middle, low=min(values), high=max(values), n=len(values))
