"""Best of G: several replies to one message, ranked by their reweighted rewards (COMPEER, Eq. 5 to 7).

This applies training's treatment of a group of completions for a person who chooses among them. A
member with an unknown reward has no rank, yet counts as one of the "other replies", as in training.
Without any reward there is no ranking. Without an encoder for the replies' language the rewards are
not reweighted (`form` is then "off").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compeer_core.encoder import SentenceEncoder, Vectors
from compeer_core.redundancy import Reweighted, Settings, reply_length, reweighted

SMALLEST, LARGEST, USUAL = 2, 8, 4
"""Smallest, largest and default number of replies."""


@dataclass(frozen=True)
class Ranking:
    """A ranked group.

    Attributes:
        members: One per reply, in the given order.
        places: Rank of each, 1 the best, ties share a rank; None if the reward is unknown.
        order: Indices of all members, the best first, those without a rank last.
        mean_length: The L of Eq. 7, in words.
        settings: Settings of the reweighting.
        is_reweighted: Whether an encoder was available; otherwise similarities are unknown.
    """

    members: tuple[Reweighted, ...]
    places: tuple[int | None, ...]
    order: tuple[int, ...]
    mean_length: float
    settings: Settings
    is_reweighted: bool

    @property
    def is_ranked(self) -> bool:
        """Whether any reward is known."""
        return any(place is not None for place in self.places)


def rank(
    rewards: Sequence[float | None],
    replies: Sequence[str],
    history: Sequence[str],
    encoder: SentenceEncoder | None,
    settings: Settings | None = None,
) -> Ranking:
    """Rank the replies of a group.

    Args:
        rewards: One per reply, None if unknown.
        replies: One per reward, empty if a member has none.
        history: The texts of the earlier utterances.
        encoder: Computes the embeddings of Eq. 6; None if no encoder reads the language.
        settings: The form of Eq. 5 and its constants.

    Raises:
        ValueError: The numbers of rewards and replies differ.

    Example:
        >>> rank([2.0, None, 4.0], ["a", "b", "c"], [], None).places
        (2, None, 1)
    """
    settings = settings or Settings()
    known = [math.nan if reward is None else float(reward) for reward in rewards]
    if encoder is None:
        settings = settings.model_copy(update={"form": "off"})
    with np.errstate(invalid="ignore"):
        members = reweighted(known, replies, history, encoder or _NullEncoder(), settings)
    values = [member.weighted for member in members]
    scored = sorted(
        (number for number, value in enumerate(values) if math.isfinite(value)),
        key=lambda number: -values[number],
    )
    places: list[int | None] = [None] * len(values)
    for number in scored:
        places[number] = 1 + sum(values[other] > values[number] for other in scored)
    rest = [number for number, place in enumerate(places) if place is None]
    return Ranking(
        members=members,
        places=tuple(places),
        order=(*scored, *rest),
        mean_length=sum(map(reply_length, replies)) / max(1, len(replies)),
        settings=settings,
        is_reweighted=encoder is not None,
    )


class _NullEncoder:
    """Replaces an absent encoder: all similarities are 0."""

    name = "none"

    def encode(self, texts: Sequence[str]) -> Vectors:
        return np.zeros((len(texts), 1), dtype=np.float32)


# --- formulas with numbers -------------------------------------------------------------------------


def weight_formula(member: Reweighted, settings: Settings) -> str:
    """Return Eq. 5, or another form, with a member's numbers filled in.

    Example:
        >>> weight_formula(Reweighted(3.0, 0.5, 0.25, 0.8, 1.7857), Settings(form="paper"))
        "r' = 3 / ((1 + 0.8 × 0.5) (1 + 0.8 × 0.25)) = 1.79"
    """
    r, tau = _number(member.reward), _number(member.tau)
    s_in, s_hi, after = _number(member.s_in), _number(member.s_hi), _number(member.weighted)
    factor = f"(1 + {tau} × {s_in}) (1 + {tau} × {s_hi})"
    match settings.form:
        case "off":
            return f"r' = r = {r}"
        case "subtract":
            weight = _number(settings.weight)
            return f"r' = {r} − {weight} × {tau} × ({s_in} + {s_hi}) / 2 = {after}"
        case "signed" if member.reward < 0:
            return f"r' = {r} × {factor} = {after}"
        case _:
            return f"r' = {r} / ({factor}) = {after}"


def gate_formula(ranking: Ranking) -> str:
    """Return Eq. 7 with the group's numbers filled in.

    Example:
        >>> from compeer_core.redundancy import Settings
        >>> member = Reweighted(1.0, 0.0, 0.0, 0.7310586, 1.0)
        >>> gate_formula(Ranking((member,), (1,), (0,), 7.0, Settings(), True))
        'τ = 1 / (1 + exp(−0.5 × (7 − 5))) = 0.731'
    """
    settings = ranking.settings
    alpha, beta = _number(settings.alpha), _number(settings.beta)
    tau = _number(ranking.members[0].tau) if ranking.members else "–"
    return f"τ = 1 / (1 + exp(−{alpha} × ({_number(ranking.mean_length)} − {beta}))) = {tau}"


def _number(value: float) -> str:
    """Format with three significant digits and a typographic minus sign."""
    return f"{value:.3g}".replace("-", "−") if math.isfinite(value) else "?"
