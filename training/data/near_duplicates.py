"""Near-duplicates of held-out texts, found by the word 5-grams that two texts share.

The utterances of a text are read as one sequence of words, so it does not matter where turns begin
or end. Two texts are near-duplicates if they share at least `shared_words` distinct 5-grams, and
these are at least `containment` of the 5-grams of the text that has fewer: a copy with a word
inserted into each utterance, and a long excerpt, are both found. In Chinese, eight characters take
the place of five words.

Candidates come from MinHash LSH (package `datasketch`) and are then compared exactly. A pair with a
Jaccard similarity of 0.2 becomes a candidate with probability 0.99; a copied excerpt that is less
than a fifth of the longer text may therefore be missed. A paraphrase that shares no 5-gram is not
found.

Only hashes are stored. The module docstring of `training.cer.steps.decontamination` gives the rates
on public corpora.
"""

import re
import zlib
from collections.abc import Iterable

from datasketch import MinHash, MinHashLSH
from pydantic import Field

from compeer_core.config import FrozenModel

_WORD = re.compile(r"[^\W_]+")
_PERMUTATIONS = 256
_BANDS = (128, 2)
"""Bands, and rows per band: 1 - (1 - J^2)^128 of the pairs with Jaccard similarity J are candidates."""


class Rule(FrozenModel):
    """When two texts are near-duplicates."""

    containment: float = Field(default=0.3, gt=0, le=1)
    """Least share of the 5-grams of the text that has fewer."""
    shared_words: int = Field(default=15, ge=1)
    """Least number of distinct 5-grams that both texts have: fewer may be a shared greeting."""


def plain_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without apostrophes.

    Example:
        >>> plain_words("I'm not sure ...")
        ['im', 'not', 'sure']
    """
    return _WORD.findall(text.lower().replace("'", "").replace("’", ""))


class HeldOut:
    """An index of held-out texts by source."""

    def __init__(self, rule: Rule | None = None) -> None:
        self._rule = rule or Rule()
        self._ngrams: dict[str, frozenset[int]] = {}
        self._empty = MinHash(_PERMUTATIONS, hashfunc=int)  # the n-grams are hashes already
        self._index = MinHashLSH(num_perm=_PERMUTATIONS, params=_BANDS)

    def add(self, source: str, utterances: Iterable[str], language: str = "en") -> None:
        """Index a text under its source; further texts of a source are indexed with the first."""
        before = self._ngrams.get(source)
        ngrams = _ngrams(utterances, language)
        if before is not None:
            if ngrams <= before:
                return
            ngrams |= before
            self._index.remove(source)
        self._ngrams[source] = ngrams
        self._index.insert(source, self._sketch(ngrams))

    def repeated_by(self, utterances: Iterable[str], language: str = "en") -> str | None:
        """Return the held-out source that a text repeats, the most similar of several; or None."""
        ngrams = _ngrams(utterances, language)
        if len(ngrams) < self._rule.shared_words:
            return None
        best = self._rule.containment
        nearest: str | None = None
        for source in sorted(self._index.query(self._sketch(ngrams))):
            other = self._ngrams[source]
            shared = len(ngrams & other)
            if shared < self._rule.shared_words:
                continue
            containment = shared / min(len(ngrams), len(other))
            if containment > best or (nearest is None and containment == best):
                best, nearest = containment, source
        return nearest

    def _sketch(self, ngrams: frozenset[int]) -> MinHash:
        sketch = self._empty.copy()
        sketch.update_batch(ngrams)
        return sketch


def _ngrams(utterances: Iterable[str], language: str) -> frozenset[int]:
    """Return the hashes of the distinct n-grams of a text."""
    words = [word for text in utterances for word in plain_words(text)]
    size = 5
    if language == "zh":
        words, size = list("".join(words)), 8
    return frozenset(
        zlib.crc32(" ".join(words[at : at + size]).encode("utf-8", "surrogatepass"))
        for at in range(len(words) - size + 1)
    )
