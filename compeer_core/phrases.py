"""Search English text for lists of words and phrases.

A list of phrases becomes one pattern. Text is folded first: lower case, straight apostrophes, and
``haven ' t`` (as in one version of ESConv) joined.
"""

import re
from collections.abc import Iterable

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "`": "'"})
_SPLIT_APOSTROPHE = re.compile(r"(?<=[a-z]) ' (?=(?:s|t|m|d|re|ve|ll)\b)")
_ENDINGS = re.compile(r"(?:'s|'|ings?|ed|es|s|ly)$")


class Phrases:
    """A list of phrases as one pattern.

    Words match whole; a final star matches any ending; any white space separates words.

    Example:
        >>> Phrases(["low mood", "depress*"]).count("Depressed, a low  mood, depression")
        3
    """

    def __init__(self, phrases: Iterable[str]) -> None:
        parts = sorted((_pattern(phrase) for phrase in phrases), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w'])(?:{'|'.join(parts)})(?!\w)")

    def __contains__(self, text: str) -> bool:
        return self._pattern.search(fold(text)) is not None

    def is_one(self, text: str) -> bool:
        """Whether the whole text is one of the phrases."""
        return self._pattern.fullmatch(fold(text)) is not None

    def count(self, text: str) -> int:
        """Return the number of matches in a text, without overlap."""
        return len(self.found(text))

    def found(self, text: str) -> list[str]:
        """Return the matches in a text, folded, from left to right without overlap."""
        return [match[0] for match in self._pattern.finditer(fold(text))]

    def without(self, text: str) -> str:
        """Return the folded text without the phrases."""
        return self._pattern.sub(" ", fold(text))


def _pattern(phrase: str) -> str:
    words = [
        re.escape(word.removesuffix("*")) + (r"[\w']*" if word.endswith("*") else "")
        for word in fold(phrase).split()
    ]
    return r"\s+".join(words)


def fold(text: str) -> str:
    """Return the text as it is matched."""
    plain = text.translate(_APOSTROPHES).casefold()
    return _SPLIT_APOSTROPHE.sub("'", plain)


def words_of(text: str) -> list[str]:
    """Return the words of a text in order, folded, without numbers and punctuation.

    Example:
        >>> words_of("I haven ' t slept, 3 nights!")
        ['i', "haven't", 'slept', 'nights']
    """
    return _WORD.findall(fold(text))


def stem(word: str) -> str:
    """Remove one common ending if at least three letters remain.

    Example:
        >>> stem("worried"), stem("works"), stem("bed")
        ('worri', 'work', 'bed')
    """
    stemmed = _ENDINGS.sub("", word)
    return stemmed if len(stemmed) >= 3 else word
