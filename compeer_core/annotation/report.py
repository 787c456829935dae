"""Agreement at the annotation desk, by question and by pair of annotators.

The figures describe the independent answers of two people, before adjudication. See
`compeer_core.annotation.agreement` for the three coefficients.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from compeer_core.annotation.agreement import Agreement, Consensus, Unsettled
from compeer_core.annotation.annotations import (
    QUESTIONS,
    Annotation,
    agreement,
    opinions,
    pair_agreement,
)
from compeer_core.config import FrozenModel
from compeer_core.reasoning import Part

SKEWED = 0.9
"""If one answer has at least this share, alpha says little: read AC1."""


class Question(FrozenModel):
    """The answers to one question."""

    agreement: Agreement
    settled: int
    """Number of items with two equal answers."""
    adjudicated: int
    """Number of these that a third person decided."""
    waiting: int
    """Number of items that wait for a third person."""
    no_consensus: int
    """Number of items with three different answers, which are dropped."""
    skewed: str | None
    """The dominant answer, if there is one (`SKEWED`)."""


class Pair(FrozenModel):
    """The agreement of two people."""

    names: tuple[str, str]
    questions: Mapping[Part, Agreement]


class Dropped(FrozenModel):
    """A question about an item with three different answers."""

    number: int
    """Position of the item in the queue, from 1."""
    item_id: str
    question: Part
    answers: tuple[str, ...]
    """In the order of answering, without names; preferences in the item's order."""


class Report(FrozenModel):
    """The agreement at the desk.

    It covers items with two answers only, so that it reveals nothing about open ones.
    """

    items: int
    """Number of items in the queue."""
    answered: int
    """Number of items answered by two people."""
    seed: int
    questions: Mapping[Part, Question]
    pairs: tuple[Pair, ...]
    dropped: tuple[Dropped, ...]


def report(
    answers: Mapping[str, Sequence[Annotation]],
    numbers: Mapping[str, int],
    with_replies: Collection[str],
    *,
    seed: int = 0,
) -> Report:
    """Measure the agreement at the desk.

    Args:
        answers: All answers about each item that two people have answered.
        numbers: Position of each item of the queue.
        with_replies: Items with two replies to compare.
        seed: Of the bootstrap.
    """
    everything = list(chain.from_iterable(answers.values()))
    measured = agreement(everything, seed=seed)
    dropped: list[Dropped] = []
    questions: dict[Part, Question] = {}
    for part in QUESTIONS:
        settled = adjudicated = waiting = no_consensus = 0
        for item in sorted(answers, key=numbers.__getitem__):
            if part is Part.REPLY and item not in with_replies:
                continue
            item_opinions = opinions(answers[item], part)
            outcome = item_opinions.outcome
            if isinstance(outcome, Consensus):
                settled += 1
                adjudicated += outcome.adjudicated
            elif outcome is Unsettled.NEEDS_THIRD:
                waiting += 1
            elif outcome is Unsettled.NO_CONSENSUS:
                no_consensus += 1
                given = tuple(str(answer) for answer in item_opinions.latest.values())
                dropped.append(
                    Dropped(number=numbers[item], item_id=item, question=part, answers=given)
                )
        questions[part] = Question(
            agreement=measured[part],
            settled=settled,
            adjudicated=adjudicated,
            waiting=waiting,
            no_consensus=no_consensus,
            skewed=_skewed(measured[part]),
        )
    return Report(
        items=len(numbers),
        answered=len(answers),
        seed=seed,
        questions=questions,
        pairs=tuple(
            Pair(names=names, questions=of_pair)
            for names, of_pair in pair_agreement(everything, seed=seed).items()
        ),
        dropped=tuple(sorted(dropped, key=lambda each: each.number)),
    )


def _skewed(measured: Agreement) -> str | None:
    if not measured.n_ratings:
        return None
    label, share = max(measured.shares.items(), key=lambda pair: pair[1])
    return label if share >= SKEWED else None
