"""The rewards of a group after Eq. 5 to 7 of COMPEER, from the texts.

`compeer_core.redundancy` is the arithmetic; here it meets replies and an encoder:

```python
found = reweighted([3.0, 1.0], replies, history, load_encoder(), Settings())
found[0].weighted, found[0].s_in, found[0].s_hi, found[0].tau
```

Only replies are compared, never the reasoning before them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.encoder import SentenceEncoder, Vectors
from compeer_core.redundancy import (
    ALPHA,
    BETA,
    Floats,
    Form,
    history_similarity,
    in_group_similarity,
    length_gate,
    reweight,
)

LETTERS_PER_WORD = 1.5
"""Of scripts that put no space between words: Chinese words have one or two letters."""

_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
_LETTER = re.compile(r"\w")


class Settings(FrozenModel):
    """How a reward is reweighted."""

    form: Form = "signed"
    """`paper` is Eq. 5 as printed; `signed`, `subtract` and `off` are described beside `Form`."""
    alpha: float = Field(default=ALPHA, gt=0)
    """Steepness of Eq. 7. Paper: "alpha = 0.5"."""
    beta: float = Field(default=BETA, ge=0)
    """The mean length of a group's replies at which tau is one half, in words. Paper: "beta = 5",
    without a unit."""
    weight: float = Field(default=1.0, ge=0, le=2)
    """Of the form `subtract`: what two full similarities cost. One verdict is worth 2."""


@dataclass(frozen=True)
class Group:
    """The candidates for one turn.

    Attributes:
        rewards: NaN where one is not known.
        replies: One for each reward; empty where a candidate has none.
        history: The texts of the utterances before.
    """

    rewards: Sequence[float]
    replies: Sequence[str]
    history: Sequence[str] = ()

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.replies):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.replies)} replies")


@dataclass(frozen=True)
class Reweighted:
    """A candidate's reward, what it became, and why.

    Attributes:
        reward: As it was; NaN where it is not known.
        s_in: Mean cosine with the other replies of the group, in [0, 1].
        s_hi: Mean cosine with the utterances of the history, in [0, 1].
        tau: Eq. 7, the same for the whole group.
        weighted: The reward after Eq. 5; NaN where the reward is.
    """

    reward: float
    s_in: float
    s_hi: float
    tau: float
    weighted: float


def reply_length(text: str) -> float:
    """Return the length of a reply in words, the L of Eq. 7.

    Words stand between white space. Scripts that put none between words count by letters.

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

    A candidate whose reward is not known stays so, and is one of the "other replies" all the same.
    An utterance without text, such as a picture alone, is not part of the history; an empty reply
    resembles nothing.

    Args:
        rewards: Shape (G,); NaN where one is not known.
        replies: The replies alone, without reasoning.
        history: The texts of the utterances before.
        encoder: What makes the embeddings of Eq. 6.
        settings: The form and its numbers.

    Raises:
        ValueError: There are not as many rewards as replies.
    """
    return reweighted_groups([Group(rewards, replies, history)], encoder, settings)[0]


def reweighted_groups(
    groups: Sequence[Group], encoder: SentenceEncoder, settings: Settings | None = None
) -> list[tuple[Reweighted, ...]]:
    """Return what `reweighted` does for each group, with one call of the encoder for all.

    Each text is encoded once, however often it stands in the groups.
    """
    settings = settings or Settings()
    texts = dict.fromkeys(
        text for group in groups for text in (*group.replies, *group.history) if text.strip()
    )
    places = {text: number for number, text in enumerate(texts, start=1)}
    vectors = encoder.encode(["", *texts])  # the first stands for all that is empty
    return [
        _one(
            group,
            vectors[[places.get(reply, 0) for reply in group.replies]],
            vectors[[places[text] for text in group.history if text in places]],
            settings,
        )
        for group in groups
    ]


def _one(
    group: Group, replies: Vectors, history: Vectors, settings: Settings
) -> tuple[Reweighted, ...]:
    if not group.replies:
        return ()
    tau = length_gate(
        sum(map(reply_length, group.replies)) / len(group.replies), settings.alpha, settings.beta
    )
    s_in = _within(in_group_similarity(replies))
    s_hi = _within(history_similarity(replies, history))
    weighted = reweight(group.rewards, s_in, s_hi, tau, settings.form, settings.weight)
    columns = (np.asarray(group.rewards, dtype=np.float64), s_in, s_hi, weighted)
    return tuple(
        Reweighted(reward, own, said, tau, after)
        for reward, own, said, after in zip(*(column.tolist() for column in columns), strict=True)
    )


def _within(similarities: Floats) -> Floats:
    """Cut off what rounding leaves above 1 in a mean of ones."""
    return np.minimum(similarities, 1.0)
