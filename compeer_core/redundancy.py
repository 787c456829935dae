"""Redundancy-aware reweighting of rewards (COMPEER, Eq. 5 to 7).

A policy trained by reinforcement tends to repeat itself, across seekers and within a conversation.
So a reply's reward falls with its similarity to the other replies of its group and to the history:

    Eq. 5   r' = r / ((1 + tau s_in) (1 + tau s_hi))
    Eq. 6   s_in = mean cosine with the other replies of the group
            s_hi = mean cosine with the utterances of the history
    Eq. 7   tau  = 1 / (1 + exp(-alpha (L - beta))),   L the mean length of the group's replies

Only replies are compared, not whole turns: with the reasoning included all turns look alike, and tau
is always 1. Cosines are clamped to [0, 1]: a reply that says the opposite of another does not repeat
it, and -1 would divide by zero.

As printed, Eq. 5 has a flaw for negative rewards: dividing by more than 1 moves them towards zero, so
a bad turn is *paid* for repeating itself. `Form` lists the printed form and alternatives.

The first part of this module is the arithmetic; `reweighted` applies it to texts:

```python
candidates = reweighted([3.0, 1.0], replies, history, load_encoder(), Settings())
candidates[0].weighted, candidates[0].s_in, candidates[0].s_hi, candidates[0].tau
```
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.encoder import SentenceEncoder, Vectors

Floats = NDArray[np.float64]

Form = Literal["paper", "signed", "subtract", "off"]
"""
- paper: Eq. 5 as printed.
- signed (default): as printed for rewards of at least 0; negative rewards are multiplied instead, so
  that repetition always costs.
- subtract: r - w tau (s_in + s_hi) / 2. Independent of the zero of the scale; with a weight up to 2 it
  never costs more than one verdict.
- off: the unchanged reward.
"""
FORMS: tuple[Form, ...] = get_args(Form)

ALPHA = 0.5
"""Steepness of Eq. 7. Paper: alpha = 0.5."""
BETA = 5.0
"""Threshold of Eq. 7, in words. Paper: beta = 5, without a unit for L."""


def length_gate(mean_length: float, alpha: float = ALPHA, beta: float = BETA) -> float:
    """Return tau of Eq. 7, in (0, 1): near 0 for short replies, which may well be similar.

    Args:
        mean_length: Mean length of the group's replies, in words; at least 0.
        alpha: Steepness, above 0.
        beta: The length at which tau is 0.5.

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
        replies: Embeddings, shape (G, dimension); need not be normalised.

    Returns:
        Shape (G,), in [0, 1]; 0 for a group of one.
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
        history: Embeddings of the utterances, shape (H, dimension); may be empty.

    Returns:
        Shape (G,), in [0, 1]; 0 without a history.
    """
    utterances = np.asarray(history, dtype=np.float64)
    if utterances.size == 0:
        return np.zeros(len(np.asarray(replies)))
    result: Floats = _cosines(replies, utterances).mean(axis=1)
    return result


def reweight(
    rewards: ArrayLike,
    in_group: ArrayLike,
    history: ArrayLike,
    tau: float,
    form: Form = "signed",
    weight: float = 1.0,
) -> Floats:
    """Return the rewards of a group after Eq. 5 or another form.

    Args:
        rewards: Shape (G,). An unknown reward (NaN) stays NaN.
        in_group: s_in, shape (G,), in [0, 1].
        history: s_hi, shape (G,), in [0, 1].
        tau: Eq. 7, in [0, 1].
        form: See `Form`.
        weight: For the form `subtract`, in [0, 2].

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
    """Return all cosines, clamped to [0, 1]; those of a zero vector (an empty text) are 0."""
    return np.clip(_unit(first) @ _unit(second).T, 0.0, 1.0)


def _unit(vectors: ArrayLike) -> Floats:
    rows = np.atleast_2d(np.asarray(vectors, dtype=np.float64))
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    result: Floats = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0)
    return result


# --- from texts ----------------------------------------------------------------------------------

LETTERS_PER_WORD = 1.5
"""For scripts without spaces between words: Chinese words have one or two characters."""

_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_LETTER = re.compile(r"\w")


class Settings(FrozenModel):
    """Settings of reweighting."""

    form: Form = "signed"
    """See `Form`; `paper` is Eq. 5 as printed."""
    alpha: float = Field(default=ALPHA, gt=0)
    """Steepness of Eq. 7. Paper: "alpha = 0.5"."""
    beta: float = Field(default=BETA, ge=0)
    """Mean length of a group's replies at which tau is 0.5, in words. Paper: "beta = 5", no unit."""
    weight: float = Field(default=1.0, ge=0, le=2)
    """For `subtract`: the cost of two full similarities. One verdict is worth 2."""


@dataclass(frozen=True)
class Group:
    """The candidates for one turn.

    Attributes:
        rewards: NaN if unknown.
        replies: One per reward; empty if a candidate has none.
        history: The texts of the earlier utterances.
    """

    rewards: Sequence[float]
    replies: Sequence[str]
    history: Sequence[str] = ()

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.replies):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.replies)} replies")


@dataclass(frozen=True)
class Reweighted:
    """A candidate's reward before and after reweighting.

    Attributes:
        reward: The original reward; NaN if unknown.
        s_in: Mean cosine with the other replies of the group, in [0, 1].
        s_hi: Mean cosine with the utterances of the history, in [0, 1].
        tau: Eq. 7, the same for the whole group.
        weighted: The reward after Eq. 5; NaN if the reward is.
    """

    reward: float
    s_in: float
    s_hi: float
    tau: float
    weighted: float


def reply_length(text: str) -> float:
    """Return the length of a reply in words, the L of Eq. 7.

    Words are separated by white space; scripts without it count by characters.

    Example:
        >>> reply_length("I am here - with you."), reply_length("我在这里陪你。")
        (5.0, 4.0)
    """
    unspaced = len(_UNSPACED.findall(text))
    spaced = sum(1 for part in _UNSPACED.sub(" ", text).split() if _LETTER.search(part))
    return spaced + unspaced / LETTERS_PER_WORD


def reweighted(
    rewards: Sequence[float],
    replies: Sequence[str],
    history: Sequence[str],
    encoder: SentenceEncoder,
    settings: Settings | None = None,
) -> tuple[Reweighted, ...]:
    """Return a record for each candidate of one group, in order.

    A candidate with an unknown reward keeps it, and still counts among the "other replies". An
    utterance without text, such as an image alone, is not part of the history; an empty reply has
    similarity 0.

    Args:
        rewards: Shape (G,); NaN if unknown.
        replies: The replies alone, without reasoning.
        history: The texts of the earlier utterances.
        encoder: Computes the embeddings of Eq. 6.
        settings: Form and constants.

    Raises:
        ValueError: The numbers of rewards and replies differ.
    """
    return reweighted_groups([Group(rewards, replies, history)], encoder, settings)[0]


def reweighted_groups(
    groups: Sequence[Group], encoder: SentenceEncoder, settings: Settings | None = None
) -> list[tuple[Reweighted, ...]]:
    """Return the result of `reweighted` for each group, with a single call of the encoder.

    Each distinct text is encoded once.
    """
    settings = settings or Settings()
    texts = dict.fromkeys(
        text for group in groups for text in (*group.replies, *group.history) if text.strip()
    )
    places = {text: number for number, text in enumerate(texts, start=1)}
    vectors = encoder.encode(["", *texts])  # the first row is for empty texts
    return [
        _reweighted_group(
            group,
            vectors[[places.get(reply, 0) for reply in group.replies]],
            vectors[[places[text] for text in group.history if text in places]],
            settings,
        )
        for group in groups
    ]


def _reweighted_group(
    group: Group, replies: Vectors, history: Vectors, settings: Settings
) -> tuple[Reweighted, ...]:
    if not group.replies:
        return ()
    tau = length_gate(
        sum(map(reply_length, group.replies)) / len(group.replies), settings.alpha, settings.beta
    )
    s_in = _capped(in_group_similarity(replies))
    s_hi = _capped(history_similarity(replies, history))
    weighted = reweight(group.rewards, s_in, s_hi, tau, settings.form, settings.weight)
    columns = (np.asarray(group.rewards, dtype=np.float64), s_in, s_hi, weighted)
    return tuple(
        Reweighted(reward, in_group, to_history, tau, after)
        for reward, in_group, to_history, after in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


def _capped(similarities: Floats) -> Floats:
    """Cap at 1 a mean of ones that rounding has left above it."""
    return np.minimum(similarities, 1.0)
