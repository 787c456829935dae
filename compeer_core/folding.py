"""Normalise text for phrase matching, whatever its spelling.

Zero-width characters, accents, full-width letters, markup, k1ll, s.u.i.c.i.d.e, common misspellings
and traditional Chinese all become plain words. The result is for matching only, not for display.

Every step is one pass with bounded repetitions, so the time is linear in the text's length.
"""

import html
import re
import unicodedata
from collections.abc import Mapping
from functools import cached_property, lru_cache

from compeer_core.config import FrozenModel

_ENTITY = re.compile(r"&(?:#x?[0-9a-f]{1,6}|[a-z]{2,8});")
_LINK = re.compile(r"!?\[([^\[\]]{1,200})\]\([^()\[\]\s]{0,300}\)")
_BREAK = re.compile(r"<(?:br|/?(?:p|div|li|ul|ol|tr|td|h[1-6]|blockquote)) ?/?>")
_TAG = re.compile(
    r"<(?:!--[^<>]{0,300}--|/?[a-z][a-z0-9]{0,9}(?: [a-z-]{1,20}=(?:\"[^\"<>]{0,200}\"|'[^'<>]{0,200}'|[^\s<>\"']{1,200})){0,9} ?/?)>"
)
_APOSTROPHES = dict.fromkeys(map(ord, "'’‘`´＇"))
_QUOTES = dict.fromkeys(map(ord, "“”„«»「」『』"), '"')
_EMPHASIS = re.compile(r"[*~]+")
_NOT_WORDS = re.compile(r"[^a-z0-9.,!?;:\"/()&%+<>@$|\u3001\u3002\u3400-\u9fff]+")
_SPACED = re.compile(r"(?<![a-z0-9])(?:[a-z] ){4,80}[a-z](?![a-z0-9])")
_ELONGATED = re.compile(r"([a-z\u4e00-\u9fff])\1{2,}")


class Folding(FrozenModel):
    """The folding rules; ``vocabularies/risk_phrases.toml`` explains the entries."""

    disguised: tuple[str, ...]
    letters: Mapping[str, str]
    spelling: Mapping[str, str]
    characters_from: str
    characters_to: str

    def __call__(self, text: str) -> str:
        """Return the text in lower case, with single spaces, without apostrophes and markup."""
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text).translate(_APOSTROPHES)
        if not text.isascii():
            text = "".join(map(_plain, text))
        text = text.lower().translate(self._characters)
        text = _TAG.sub("", _BREAK.sub(" ", _LINK.sub(r"\1", " ".join(text.split()))))
        text = _SPACED.sub(lambda letters: letters[0].replace(" ", ""), text)
        text = self._disguises.sub(self._undisguised, text)
        text = _NOT_WORDS.sub(" ", _EMPHASIS.sub("", text))
        text = _ELONGATED.sub(r"\1", text)
        text = self._spellings.sub(self._respelled, " ".join(text.split()))
        return text.strip()

    @cached_property
    def _characters(self) -> dict[int, str]:
        pairs = zip(map(ord, self.characters_from), self.characters_to, strict=True)
        return dict(pairs) | _QUOTES

    @cached_property
    def _disguises(self) -> re.Pattern[str]:
        """One empty group after each word, so that `re.Match.lastindex` identifies it."""
        between = r"[^a-z0-9\u3400-\u9fff]{0,2}"
        latin, chinese = "", ""
        for word in self.disguised:
            letters = (f"[{re.escape(letter + self.letters.get(letter, ''))}]" for letter in word)
            branch = f"|{between.join(letters)}"
            if word.isascii():
                latin += f"{branch}(?![a-z0-9])()"
            else:
                chinese += f"{branch}()"
        return re.compile(f"(?<![a-z0-9])(?:{latin[1:]}){chinese}")

    def _undisguised(self, disguise: re.Match[str]) -> str:
        assert disguise.lastindex is not None  # every alternative ends in a group
        return self.disguised[disguise.lastindex - 1]

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        """One empty group after each entry."""
        entries = "|".join(
            f"(?:{without_captures(entry)})(?![a-z0-9])()" for entry in self.spelling
        )
        return re.compile(f"(?<![a-z0-9])(?=[a-z])(?:{entries})")

    @cached_property
    def _respellings(self) -> tuple[str, ...]:
        return tuple(self.spelling.values())

    def _respelled(self, match: re.Match[str]) -> str:
        assert match.lastindex is not None
        return self._respellings[match.lastindex - 1]


@lru_cache(maxsize=4096)
def _plain(character: str) -> str:
    """Return a character without accents and variant form; empty for an invisible one.

    Characters that expand to whole phrases become a space, so that text does not grow.
    """
    parts = unicodedata.normalize("NFKD", character)
    plain = "".join(part for part in parts if unicodedata.category(part) not in {"Cf", "Mn"})
    return plain if len(plain) <= 3 else " "


def without_captures(pattern: str) -> str:
    """Return a regular expression without capturing groups, which cost time."""
    return re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern)
