"""How well the people of the annotation desk agree, question by question and pair by pair.

The figures are of what two people said on their own, before anybody decided. See
`compeer_core.annotation.agreement` for what each of them means, and why there are three.
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
"""Where one answer has this share or more, alpha says little: read AC1."""


class Question(FrozenModel):
    """How people answered one question."""

    agreement: Agreement
    settled: int
    """Items with two equal answers."""
    adjudicated: int
    """Of these, how many a third person decided."""
    waiting: int
    """Items that wait for a third person."""
    no_consensus: int
    """Items with three different answers, which are dropped."""
    skewed: str | None
    """The answer that nearly everybody gives nearly always, if there is one (`SKEWED`)."""


class Pair(FrozenModel):
    """How well two people agree with each other."""

    names: tuple[str, str]
    questions: Mapping[Part, Agreement]


class Dropped(FrozenModel):
    """A question about an item on which no two people agree."""

    number: int
    """The item's place in the queue, from 1."""
    item_id: str
    question: Part
    answers: tuple[str, ...]
    """In the order in which people answered, without names; preferences in the item's order."""


class Report(FrozenModel):
    """What is known about the agreement at the desk.

    Only about items that two people have answered, so that whoever reads it learns nothing about what
    is still to be answered.
    """

    items: int
    """In the queue, answered or not."""
    answered: int
    """By two people."""
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
    """Measure how well people agree.

    Args:
        answers: All that was said about each item that two people have answered.
        numbers: The place of each item of the queue.
        with_replies: The items that have two replies to compare.
        seed: Of the intervals.
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
            found = opinions(answers[item], part)
            outcome = found.outcome
            if isinstance(outcome, Consensus):
                settled += 1
                adjudicated += outcome.adjudicated
            elif outcome is Unsettled.NEEDS_THIRD:
                waiting += 1
            elif outcome is Unsettled.NO_CONSENSUS:
                no_consensus += 1
                given = tuple(str(answer) for answer in found.latest.values())
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
