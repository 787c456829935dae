"""Diversity of texts.

A collapsed policy gives everybody the same reply, or repeats itself within a reply. The measures:

- distinct-n: the share of distinct n-grams of words among all n-grams (Li et al. 2016, arXiv
  1510.03055). It falls with the amount of text, so only equal amounts can be compared: for longer texts, use the
  expected value over draws of as many n-grams as the shorter ones have (rarefaction, Hurlbert 1971,
  doi 10.2307/1934145, for species).
- loops (`compeer_core.ngrams`): the share of texts that repeat an n-gram several times;
- the Vendi score: the effective number of different texts, by the similarity of their embeddings
  (Friedman and Dieng 2023, arXiv 2210.02410): exp of the entropy of the eigenvalues of K / n, where K
  holds the cosines. 1 if all texts are the same, n if no two are similar.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from compeer_core.ngrams import runs_of


def distinct(texts: Sequence[str], length: int) -> float | None:
    """Return the share of distinct n-grams of `length` words; None if there are none.

    Example:
        >>> distinct(["that is hard", "that is sad"], 2)  # 4 pairs, "that is" twice
        0.75
    """
    runs = runs_of(texts, length)
    return len(runs) / runs.total() if runs else None


def distinct_without(
    texts: Sequence[str], groups: Sequence[str], length: int, amount: int | None = None
) -> list[float]:
    """Return distinct-n of all texts, then without each group in turn; 0 if nothing is left.

    Args:
        texts: Texts of all groups.
        groups: The group of each text. Groups are left out in order of first appearance.
        length: Number of words of an n-gram.
        amount: Return the expected value over draws of this many n-grams; None uses all.

    Raises:
        ValueError: Fewer than `amount` n-grams are left.

    Example:
        >>> distinct_without(["that is hard", "that is sad"], ["a", "b"], 2)
        [0.75, 1.0, 1.0]
    """
    spectra = _spectra_without(texts, groups, length)
    if amount is not None:
        return [_expected(spectrum, amount) for spectrum in spectra]
    return [spectrum.total() / _runs(spectrum) if spectrum else 0.0 for spectrum in spectra]


def fewest_runs(texts: Sequence[str], groups: Sequence[str], length: int) -> int:
    """Return the smallest number of n-grams that is left when one group is left out.

    Example:
        >>> fewest_runs(["that is hard", "that is sad", "so sad"], ["a", "a", "b"], 2)
        1
    """
    return min(map(_runs, _spectra_without(texts, groups, length)))


def _spectra_without(
    texts: Sequence[str], groups: Sequence[str], length: int
) -> list[Counter[int]]:
    """Count the n-grams that occur once, twice and so on: in all texts, then without each group."""
    members: dict[str, list[str]] = {}
    for text, group in zip(texts, groups, strict=True):
        members.setdefault(group, []).append(text)
    of_group = [runs_of(own, length) for own in members.values()]
    everything: Counter[tuple[str, ...]] = Counter()
    for runs in of_group:
        everything.update(runs)
    spectra = [Counter(everything.values())]
    for runs in of_group:
        left = spectra[0].copy()
        for run, times in runs.items():
            left[everything[run]] -= 1
            left[everything[run] - times] += 1
        left[0] = 0
        spectra.append(+left)
    return spectra


def _runs(spectrum: Counter[int]) -> int:
    return sum(times * kinds for times, kinds in spectrum.items())


def _expected(spectrum: Counter[int], amount: int) -> float:
    """Return the expected share of distinct n-grams among `amount` drawn ones."""
    total = _runs(spectrum)
    if amount > total:
        raise ValueError(f"{amount} n-grams cannot be drawn from {total}")
    times = np.array(list(spectrum))
    kinds = np.array(list(spectrum.values()))
    others = total - times
    # P(no n-gram of a kind is drawn) = C(others, amount) / C(total, amount), 0 if others < amount
    possible = others >= amount
    remaining = np.where(possible, others, amount)
    missed = np.exp(
        (gammaln(remaining + 1) - gammaln(remaining - amount + 1))
        - (gammaln(total + 1) - gammaln(total - amount + 1))
    )
    return float((kinds * (1 - missed * possible)).sum() / amount)


def vendi_score(embeddings: npt.ArrayLike) -> float:
    """Return the effective number of different texts.

    Args:
        embeddings: Shape (n, dimension), of any norm. A zero vector (an empty text) is similar only to
            itself.

    Raises:
        ValueError: There are no embeddings.

    Example:
        >>> round(vendi_score([[1, 0], [2, 0]]), 6), round(vendi_score([[1, 0], [0, 1]]), 6)
        (1.0, 2.0)
    """
    vectors = np.atleast_2d(np.asarray(embeddings, dtype=np.float64))
    if vectors.size == 0:
        raise ValueError("there are no embeddings")
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    kernel = unit @ unit.T
    np.fill_diagonal(kernel, 1.0)
    share = np.clip(np.linalg.eigvalsh(kernel / len(kernel)), 0.0, None)
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))
