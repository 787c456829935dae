"""Best of G: several replies to one message, ranked by their reweighted rewards (COMPEER, Eq. 5 to 7).

What training does with a group of completions is done here for a person who chooses among them. A
member whose reward is not known has no place, yet counts as one of the "other replies", as in
training. Without any reward there is no ranking, and without an encoder that can read the replies
the rewards stay as they are (`form` is then "off").
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compeer_core.encoder import SentenceEncoder, Vectors
from compeer_core.redundancy import Reweighted, Settings, reply_length, reweighted

SMALLEST, LARGEST, USUAL = 2, 8, 4
"""How many replies may be asked for, and how many are unless somebody says so."""


@dataclass(frozen=True)
class Ranking:
    """A group in order.

    Attributes:
        members: One for each reply, in the order in which they came.
        places: The place of each, 1 the best, equals together; None where the reward is not known.
        order: The numbers of all members from 0, the best first, those without a place last.
        mean_length: The L of Eq. 7, in words.
        settings: With which it was made.
        is_reweighted: Whether an encoder could read the replies; else similarities are not known.
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
        rewards: Of each reply, None where it is not known.
        replies: One for each reward, empty where a member has none.
        history: The texts of the utterances before.
        encoder: Makes the embeddings of Eq. 6; None if none can read these replies.
        settings: The form of Eq. 5 and its numbers.

    Raises:
        ValueError: There are not as many rewards as replies.

    Example:
        >>> rank([2.0, None, 4.0], ["a", "b", "c"], [], None).places
        (2, None, 1)
    """
    settings = settings or Settings()
    known = [math.nan if reward is None else float(reward) for reward in rewards]
    if encoder is None:
        settings = settings.model_copy(update={"form": "off"})
    with np.errstate(invalid="ignore"):
        members = reweighted(known, replies, history, encoder or _Blind(), settings)
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


class _Blind:
    """Stands for an encoder where none can read the texts: nothing is like anything."""

    name = "none"

    def encode(self, texts: Sequence[str]) -> Vectors:
        return np.zeros((len(texts), 1), dtype=np.float32)


# --- the formulas with their numbers ---------------------------------------------------------------


def weight_formula(member: Reweighted, settings: Settings) -> str:
    """Return Eq. 5, or what stands in its place, with a member's numbers filled in.

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
        >>> one = Reweighted(1.0, 0.0, 0.0, 0.7310586, 1.0)
        >>> gate_formula(Ranking((one,), (1,), (0,), 7.0, Settings(), True))
        'τ = 1 / (1 + exp(−0.5 × (7 − 5))) = 0.731'
    """
    settings = ranking.settings
    alpha, beta = _number(settings.alpha), _number(settings.beta)
    tau = _number(ranking.members[0].tau) if ranking.members else "–"
    return f"τ = 1 / (1 + exp(−{alpha} × ({_number(ranking.mean_length)} − {beta}))) = {tau}"


def _number(value: float) -> str:
    """Three digits that matter, a real minus sign."""
    return f"{value:.3g}".replace("-", "−") if math.isfinite(value) else "?"
