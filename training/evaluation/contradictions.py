"""When a judge's verdicts contradict each other, how often, and how often by chance.

A contradiction takes two verdicts: one on the reasoning, one on the reply. So its rate alone tells
little: it is low for a judge that hardly ever accepts a reply, and high for one that accepts
everything. Beside it stands the rate that the same verdicts give when those on replies are dealt out
anew among turns that are alike in all that is no verdict. It is what a judge reaches whose verdicts
on replies know nothing of its verdicts on steps. The difference is the coherence that was measured.

The mean rate over all ways to deal has a closed form. Where a contradiction on turn i is ``a_i b_i``,
with ``a_i`` known from the verdicts on steps and ``b_i`` from the one on the reply, the mean over all
permutations of ``mean_i a_i b_pi(i)`` is ``mean(a) mean(b)``. So nothing is drawn, and a judge that
says the same of all steps, or the same of all replies, has a difference of exactly 0.
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
    """What a judge says about a turn, all of it readable."""

    steps: tuple[bool, bool, bool]
    preference: Preference
    """Of the reply and a reference; `first` is the reply."""


@dataclass(frozen=True)
class Table:
    """Verdicts of one judge on many turns, one entry for each."""

    steps: Bools
    """Shape (n, 3)."""
    accepts: Bools
    """The reply is at least as good as the reference."""
    better: Bools
    worse: Bools
    follows: Bools
    """The reply carries out the strategy of its turn; not the judge's word."""

    @classmethod
    def of(cls, verdicts: Sequence[Verdicts], follows: Sequence[bool]) -> "Table":
        """Take verdicts, and whether each reply carries out its strategy."""
        preferences = [each.preference for each in verdicts]

        def is_in(*these: Preference) -> Bools:
            return np.array([one in these for one in preferences], dtype=bool)

        return cls(
            steps=np.array([each.steps for each in verdicts], dtype=bool).reshape(-1, 3),
            accepts=is_in(Preference.FIRST, Preference.BOTH),
            better=is_in(Preference.FIRST),
            worse=is_in(Preference.SECOND),
            follows=np.asarray(follows, dtype=bool),
        )


@dataclass(frozen=True)
class Term:
    """One way to contradict oneself, with an entry for each turn."""

    steps: Bools
    """The verdicts on steps are one half of it."""
    reply: Bools
    """The verdict on the reply is the other half."""
    among: Bools
    """Where both together are one, and among which verdicts on replies may be dealt out anew."""


def broken_promise(table: Table) -> tuple[Term, ...]:
    """The strategy is right, the reply is accepted, and it does not carry out that strategy.

    The paper's example: "correctly identify a need for emotional soothing, yet the selected response
    might instead offer practical suggestions". A reply that is rejected is never one: it may carry
    out its strategy and be the worse one for other reasons. By chance means: among replies that do
    not carry out their strategy. A judge gets no credit for seeing that they are bad replies; it
    gets credit for rejecting them where it praised what they should have done.
    """
    return (Term(table.steps[:, 2], table.accepts, ~table.follows),)


def against_itself(table: Table) -> tuple[Term, ...]:
    """All steps are right and the reply is worse, or a step is wrong and the reply is better.

    Nothing but the judge's own words. Replies that are equally good, or both unacceptable, contradict
    nothing: the reference was written without that reasoning.
    """
    sound: Bools = np.logical_and.reduce(table.steps, axis=1)
    anywhere = np.ones_like(sound)
    return (Term(sound, table.worse, anywhere), Term(~sound, table.better, anywhere))


CONTRADICTIONS: Mapping[str, Callable[[Table], tuple[Term, ...]]] = MappingProxyType(
    {
        "accepts a reply that ignores the strategy it judged True": broken_promise,
        "steps and reply verdict disagree": against_itself,
    }
)
"""By what a table of results calls them; the first is the primary one."""


@dataclass(frozen=True)
class Rates:
    """Of one kind of contradiction, for the sample and each resample of it: shape (rows,)."""

    seen: Floats
    by_chance: Floats

    @property
    def difference(self) -> Floats:
        """Below 0: coherent. 0: the verdicts on replies know nothing of those on steps."""
        return self.seen - self.by_chance


def rates(terms: Sequence[Term], weights: Floats) -> Rates:
    """Return how often turns are contradictions, and how often with the replies' verdicts dealt anew.

    Args:
        terms: A turn is a contradiction if one of them holds; no two hold of one turn.
        weights: Rows of weights of the turns (`stats.bootstrap_weights`), shape (rows, n). A row without
            any weight, where none of these turns was drawn, gives NaN.
    """
    total = weights.sum(axis=1)
    total[total == 0] = np.nan
    seen, by_chance = np.zeros(len(weights)), np.zeros(len(weights))
    for term in terms:
        count = weights @ term.among
        one_half = weights @ (term.steps & term.among)
        other_half = weights @ (term.reply & term.among)
        seen += weights @ (term.steps & term.reply & term.among) / total
        by_chance += one_half * other_half / np.maximum(count, 1.0) / total
    return Rates(seen, by_chance)


def holds(terms: Sequence[Term]) -> Bools:
    """Return which turns are contradictions."""
    found = np.zeros_like(terms[0].among)
    for term in terms:
        found |= term.steps & term.reply & term.among
    return found
