"""Redundancy-aware reweighting of rewards (COMPEER, Eq. 5 to 7).

A policy that is trained by reinforcement tends to say the same again: to every seeker, and to the same
one twice. So a reply is worth less the more it resembles the other replies of its group and what was
said before:

    Eq. 5   r' = r / ((1 + tau s_in) (1 + tau s_hi))
    Eq. 6   s_in = mean cosine with the other replies of the group
            s_hi = mean cosine with the utterances of the history
    Eq. 7   tau  = 1 / (1 + exp(-alpha (L - beta))),   L the mean length of the group's replies

Replies are compared, not whole turns: with the reasoning around them all turns look alike, and tau is
always 1. Cosines are clamped to [0, 1]: a reply that says the opposite of another does not repeat it,
and -1 would divide by zero.

As printed, Eq. 5 has a flaw where a reward is negative: dividing by more than 1 brings it nearer to
zero, so the worse of two turns is *paid* for repeating itself. `Form` names the printed form and what
may stand in its place.
"""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

Form = Literal["paper", "signed", "subtract", "off"]
"""
- paper: Eq. 5 as printed.
- signed: as printed for rewards of 0 and more; a negative one is multiplied instead, so that repetition
  always costs. The default.
- subtract: r - w tau (s_in + s_hi) / 2. Does not depend on where the scale has its zero, and with a
  weight up to 2 never takes more than one verdict is worth.
- off: the reward as it is.
"""
FORMS: tuple[Form, ...] = get_args(Form)

ALPHA = 0.5
"""Steepness of Eq. 7. Paper: alpha = 0.5."""
BETA = 5.0
"""Threshold of Eq. 7, in words. Paper: beta = 5; it does not say what L counts."""


def length_gate(mean_length: float, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Return tau of Eq. 7, in (0, 1): near 0 for short replies, which may well be alike.

    Args:
        mean_length: Of the group's replies, in words; at least 0.
        alpha: Steepness, above 0.
        beta: The length at which tau is one half.

    Raises:
        ValueError: A value is out of its range.

    Example:
        >>> round(length_gate(5), 3), round(length_gate(7), 3), round(length_gate(1), 3)
        (0.5, 0.731, 0.119)
    """
    if not mean_length >= 0:
        raise ValueError(f"a length must be 0 or more, got {mean_length}")
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    # 1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2, which does not overflow
    return float(0.5 * (1.0 + np.tanh(alpha * (mean_length - beta) / 2)))


def in_group_similarity(replies: ArrayLike) -> Floats:
    """Return s_in of Eq. 6 for each reply of a group.

    Args:
        replies: Embeddings, shape (G, dimension); their lengths do not matter.

    Returns:
        Shape (G,), in [0, 1]. A group of one has no other replies: 0.
    """
    cosines = _cosines(replies, replies)
    size = len(cosines)
    if size < 2:
        return np.zeros(size)
    np.fill_diagonal(cosines, 0.0)
    result: Floats = cosines.sum(axis=1) / (size - 1)
    return result


def history_similarity(replies: ArrayLike, history: ArrayLike) -> Floats:
    """Return s_hi of Eq. 6 for each reply.

    Args:
        replies: Embeddings, shape (G, dimension).
        history: Embeddings of the utterances, shape (H, dimension); may have no rows.

    Returns:
        Shape (G,), in [0, 1]. With no history: 0.
    """
    said = np.asarray(history, dtype=np.float64)
    if said.size == 0:
        return np.zeros(len(np.asarray(replies)))
    result: Floats = _cosines(replies, said).mean(axis=1)
    return result


def reweight(
    rewards: ArrayLike,
    in_group: ArrayLike,
    history: ArrayLike,
    tau: float,
    form: Form = "signed",
    weight: float = 1.0,
) -> Floats:
    """Return the rewards of a group after Eq. 5, or what stands in its place.

    Args:
        rewards: Shape (G,). A reward that is not known (NaN) stays so.
        in_group: s_in, shape (G,), in [0, 1].
        history: s_hi, shape (G,), in [0, 1].
        tau: Eq. 7, in [0, 1].
        form: See `Form`.
        weight: Of the form `subtract`, in [0, 2].

    Raises:
        ValueError: Shapes differ, a value is out of its range, or the form is unknown.

    Example:
        >>> reweight([4.0, -4.0], [1.0, 1.0], [0.0, 0.0], tau=1.0).tolist()
        [2.0, -8.0]
    """
    r, s_in, s_hi = (
        np.asarray(values, dtype=np.float64) for values in (rewards, in_group, history)
    )
    if not r.shape == s_in.shape == s_hi.shape:
        raise ValueError(f"shapes differ: {r.shape}, {s_in.shape}, {s_hi.shape}")
    for name, values in (("in_group", s_in), ("history", s_hi), ("tau", np.asarray(tau))):
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{name} must lie in [0, 1], got {values}")
    factor: Floats = (1 + tau * s_in) * (1 + tau * s_hi)
    match form:
        case "paper":
            return r / factor
        case "signed":
            return np.where(r < 0, r * factor, r / factor)
        case "subtract":
            if not 0 <= weight <= 2:
                raise ValueError(f"weight must lie in [0, 2], got {weight}")
            return r - weight * tau * (s_in + s_hi) / 2
        case "off":
            return r.copy()
        case _:
            raise ValueError(f"unknown form {form!r}; the forms are {', '.join(FORMS)}")


def _cosines(first: ArrayLike, second: ArrayLike) -> Floats:
    """Return all cosines clamped to [0, 1]; with a vector of zeros (an empty text) they are 0."""
    one, other = _unit(first), _unit(second)
    return np.clip(one @ other.T, 0.0, 1.0)


def _unit(vectors: ArrayLike) -> Floats:
    rows = np.atleast_2d(np.asarray(vectors, dtype=np.float64))
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    result: Floats = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return result
