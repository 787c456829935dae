"""Contradictions between a judge's verdicts: definitions, rates, and rates by chance.

A contradiction involves a verdict on the reasoning and one on the reply. Its rate alone says little: it is
low for a judge that hardly ever accepts a reply, and high for one that accepts everything. The control is
the rate after permuting the reply verdicts among comparable turns: what a judge reaches whose reply
verdicts are independent of its step verdicts. The difference measures coherence.

The expected rate over all permutations has a closed form. If a contradiction on turn i is ``a_i b_i``,
with ``a_i`` from the step verdicts and ``b_i`` from the reply verdict, the mean of ``mean_i a_i b_pi(i)``
over all permutations pi is ``mean(a) mean(b)``. So nothing is sampled, and a judge with constant step
verdicts or constant reply verdicts has a difference of exactly 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from compeer_core.config import FrozenModel
from compeer_core.stats import Floats
from compeer_core.taxonomy import Preference
from training.evaluation.metrics import Bools


class Verdicts(FrozenModel):
    """A judge's complete verdicts on a turn."""

    steps: tuple[bool, bool, bool]
    preference: Preference
    """Between the reply (`first`) and a reference."""


@dataclass(frozen=True)
class Table:
    """Verdicts of one judge on n turns."""

    steps: Bools
    """Shape (n, 3)."""
    accepts: Bools
    """The reply is at least as good as the reference."""
    better: Bools
    worse: Bools
    follows: Bools
    """The reply carries out the strategy of its turn, independent of the judge."""

    @classmethod
    def of(cls, verdicts: Sequence[Verdicts], follows: Sequence[bool]) -> "Table":
        """Build the table from verdicts, and whether each reply carries out its strategy."""

        def is_in(*accepted: Preference) -> Bools:
            return np.array([each.preference in accepted for each in verdicts], dtype=bool)

        return cls(
            steps=np.array([each.steps for each in verdicts], dtype=bool).reshape(-1, 3),
            accepts=is_in(Preference.FIRST, Preference.BOTH),
            better=is_in(Preference.FIRST),
            worse=is_in(Preference.SECOND),
            follows=np.asarray(follows, dtype=bool),
        )


@dataclass(frozen=True)
class Term:
    """A kind of contradiction: the conjunction of two conditions, with an entry per turn."""

    steps: Bools
    """The condition on the step verdicts."""
    reply: Bools
    """The condition on the reply verdict."""
    among: Bools
    """The turns that the contradiction is defined on; reply verdicts are permuted among them."""


def broken_promise(table: Table) -> tuple[Term, ...]:
    """The strategy is judged correct and the reply accepted, but it does not carry out that strategy.

    The paper's example: "correctly identify a need for emotional soothing, yet the selected response
    might instead offer practical suggestions". A rejected reply is never a contradiction: it may be
    worse for other reasons. Verdicts are permuted among replies that do not carry out their strategy, so
    a judge gets no credit for rejecting such replies in general, only for rejecting them where it
    judged the strategy correct.
    """
    return (Term(table.steps[:, 2], table.accepts, ~table.follows),)


def against_itself(table: Table) -> tuple[Term, ...]:
    """All steps are correct and the reply is worse, or a step is wrong and the reply is better.

    Uses the judge's verdicts only. Ties are never contradictions, because the reference was written
    without this reasoning.
    """
    all_correct: Bools = np.logical_and.reduce(table.steps, axis=1)
    everywhere = np.ones_like(all_correct)
    return (
        Term(all_correct, table.worse, everywhere),
        Term(~all_correct, table.better, everywhere),
    )


CONTRADICTIONS: Mapping[str, Callable[[Table], tuple[Term, ...]]] = MappingProxyType(
    {
        "accepts a reply that ignores the strategy it judged True": broken_promise,
        "steps and reply verdict disagree": against_itself,
    }
)
"""By their names in result tables; the first is the primary one."""


@dataclass(frozen=True)
class Rates:
    """Rates of a kind of contradiction, for the sample and each resample: shape (rows,)."""

    seen: Floats
    by_chance: Floats

    @property
    def difference(self) -> Floats:
        """Below 0: coherent. 0: reply verdicts are independent of step verdicts."""
        return self.seen - self.by_chance


def rates(terms: Sequence[Term], weights: Floats) -> Rates:
    """Return the rate of contradictions, and the expected rate with permuted reply verdicts.

    Args:
        terms: Mutually exclusive conditions; a turn is a contradiction if one of them holds.
        weights: Weights of the turns (`stats.bootstrap_weights`), shape (rows, n). A row of zeros, where
            a resample has none of these turns, gives NaN.
    """
    total = weights.sum(axis=1)
    total[total == 0] = np.nan
    seen, by_chance = np.zeros(len(weights)), np.zeros(len(weights))
    for term in terms:
        count = weights @ term.among
        with_steps = weights @ (term.steps & term.among)
        with_reply = weights @ (term.reply & term.among)
        seen += weights @ (term.steps & term.reply & term.among) / total
        by_chance += with_steps * with_reply / np.maximum(count, 1.0) / total
    return Rates(seen, by_chance)


def holds(terms: Sequence[Term]) -> Bools:
    """Return which turns are contradictions."""
    result: Bools = np.logical_or.reduce([t.steps & t.reply & t.among for t in terms])
    return result
