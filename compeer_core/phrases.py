"""Lists of words and phrases, and how English text is searched for them.

Nothing here understands a sentence. A list of phrases becomes one pattern; text is folded before it
is searched (lower case, straight apostrophes, and ``haven ' t`` joined again, as one layout of
ESConv has it).
"""

import re
from collections.abc import Iterable

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")
_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "`": "'"})
_SPLIT_APOSTROPHE = re.compile(r"(?<=[a-z]) ' (?=(?:s|t|m|d|re|ve|ll)\b)")
_ENDINGS = re.compile(r"(?:'s|'|ings?|ed|es|s|ly)$")


class Phrases:
    """A list of phrases as one pattern.

    A word ends at a word boundary, a star at its end stands for any ending, and a phrase matches
    across any white space.

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
        """Whether a text is one of them, and nothing else."""
        return self._pattern.fullmatch(fold(text)) is not None

    def count(self, text: str) -> int:
        """How often any of them stands in a text, without overlap."""
        return len(self.found(text))

    def found(self, text: str) -> list[str]:
        """Return what stands in a text, folded, from left to right without overlap."""
        return [match[0] for match in self._pattern.finditer(fold(text))]

    def without(self, text: str) -> str:
        """Return the text, folded, without them."""
        return self._pattern.sub(" ", fold(text))


def _pattern(phrase: str) -> str:
    words = [
        re.escape(word.removesuffix("*")) + (r"[\w']*" if word.endswith("*") else "")
        for word in fold(phrase).split()
    ]
    return r"\s+".join(words)


def fold(text: str) -> str:
    """Return the text as it is searched."""
    plain = text.translate(_APOSTROPHES).casefold()
    return _SPLIT_APOSTROPHE.sub("'", plain)


def words_of(text: str) -> list[str]:
    """Return the words of a text in order, folded; numbers and marks are left out.

    Example:
        >>> words_of("I haven ' t slept, 3 nights!")
        ['i', "haven't", 'slept', 'nights']
    """
    return _WORD.findall(fold(text))


def stem(word: str) -> str:
    """Cut one common ending off, where at least three letters stay.

    Example:
        >>> stem("worried"), stem("works"), stem("bed")
        ('worri', 'work', 'bed')
    """
    cut = _ENDINGS.sub("", word)
    return cut if len(cut) >= 3 else word
