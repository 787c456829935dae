"""Texts that say what a held-out text says, found by the long utterances that both have word by word.

An utterance is long from `long_words` words (of letters and digits, without case); a text is a
near-duplicate of another where the long utterances that they share have `shared_words` words
together. One shared greeting or farewell is not enough, and an utterance that more than
`phrase_sources` held-out sources have is a phrase and no sign. In Chinese, 2.5 letters are a word.

What is remembered are hashes. `training/cer/leaks.py` says what the rule costs on public corpora.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable

from pydantic import Field

from compeer_core.config import FrozenModel

LETTERS_PER_WORD = 2.5
"""Of Chinese."""
_WORD = re.compile(r"[^\W_]+")


class Rule(FrozenModel):
    """When two texts say the same."""

    long_words: int = Field(default=8, ge=1)
    """From how many words an utterance is long enough to be a sign."""
    shared_words: int = Field(default=15, ge=1)
    """How many words the shared long utterances must have together."""
    phrase_sources: int = Field(default=50, ge=1)
    """An utterance that more held-out sources have than this is no sign."""


def plain_words(text: str) -> list[str]:
    """Return the words of a text in small letters, without apostrophes.

    Example:
        >>> plain_words("I'm not sure ...")
        ['im', 'not', 'sure']
    """
    return _WORD.findall(text.lower().replace("'", "").replace("’", ""))


class HeldOut:
    """Which held-out sources say a long utterance."""

    def __init__(self, rule: Rule | None = None) -> None:
        self._rule = rule or Rule()
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._saying: dict[bytes, set[int]] = defaultdict(set)

    def add(self, source: str, utterances: Iterable[str], language: str = "en") -> None:
        """Remember what a source says; a source may be added in pieces."""
        number = self._numbers.setdefault(source, len(self._names))
        if number == len(self._names):
            self._names.append(source)
        for key in self._long(utterances, language):
            sources = self._saying[key]
            if len(sources) <= self._rule.phrase_sources:  # one more says that it is a phrase
                sources.add(number)

    def repeated_by(self, utterances: Iterable[str], language: str = "en") -> str | None:
        """Return the source with which a text shares most, if that is enough."""
        shared: defaultdict[int, float] = defaultdict(float)
        for key, words in self._long(utterances, language).items():
            sources = self._saying.get(key, ())
            if len(sources) <= self._rule.phrase_sources:
                for number in sources:
                    shared[number] += words
        if not shared:
            return None
        nearest = max(shared, key=lambda number: (shared[number], -number))
        return self._names[nearest] if shared[nearest] >= self._rule.shared_words else None

    def _long(self, utterances: Iterable[str], language: str) -> dict[bytes, float]:
        """Return the words of each long utterance by a hash of its letters."""
        found: dict[bytes, float] = {}
        for said in utterances:
            words = plain_words(said)
            count = float(len(words))
            text = " ".join(words)
            if language == "zh":
                text = "".join(words)
                count = len(text) / LETTERS_PER_WORD
            if count >= self._rule.long_words:
                found[hashlib.blake2b(text.encode(), digest_size=8).digest()] = count
        return found
