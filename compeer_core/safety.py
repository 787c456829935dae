"""Signs of danger in a message, and where to find help.

`find_risk` is a list of phrases, not a judgement. It exists so that a page can show help lines at
once, before any model has answered, and keep such a conversation out of votes and training data.

What it cannot do:

- It cannot tell that somebody is safe. A person in danger may write no such phrase, or write it in
  words that are not listed; None means "no listed phrase", nothing more.
- It reads one message. It knows no history, no voice, no face, and no irony beyond a few idioms.
- It reads English and Chinese. In other languages it finds nothing.
- It has not been evaluated on clinical data. It must not be used to decide about a person, to
  report one, or to end a conversation.

A false alarm costs a reader a calm card; a missed sign can cost more. The rules still leave common
figures of speech alone ("I could kill for a coffee", "想死你了"), because a card that appears at
every idiom is soon ignored.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from compeer_core.config import FrozenModel, load_toml
from compeer_core.taxonomy import VOCABULARIES

HELP_LINES_FILE = Path(__file__).resolve().parent.parent / "assets" / "help_lines.toml"


# --- Help lines -------------------------------------------------------------------------------


class HelpLineName(FrozenModel):
    """What a line calls itself, in the languages of the page."""

    en: str
    zh: str


class HelpLine(FrozenModel):
    """One number that a person in danger can call."""

    regions: tuple[str, ...] = Field(min_length=1)
    """ISO 3166 codes of the countries it serves, and ``EU`` for all of the European Union."""
    number: str = Field(pattern=r"^[0-9][0-9 ]*$")
    """As it is dialled there, spaces for reading."""
    kind: Literal["crisis", "emergency"]
    """Somebody to talk to, or an ambulance and the police."""
    name: HelpLineName
    source: str
    """Who says so: an address, or a document."""
    checked: date
    """The day on which the entry was compared with its source."""
    confirmed: str
    """Who called or asked the service, and when; says so where nobody has."""


class HelpLines(FrozenModel):
    """All lines, in the order of the file."""

    lines: tuple[HelpLine, ...] = Field(min_length=1)

    def for_region(self, region: str) -> tuple[HelpLine, ...]:
        """Return the lines of a region first, crisis before emergency, and then all others.

        Args:
            region: A code as in `HelpLine.regions`, in any case; an unknown one puts none first.
        """
        wanted = region.upper()

        def rank(line: HelpLine) -> tuple[bool, bool]:
            return wanted not in line.regions, wanted in line.regions and line.kind == "emergency"

        return tuple(sorted(self.lines, key=rank))


def load_help_lines(path: Path = HELP_LINES_FILE) -> HelpLines:
    """Read the help lines.

    Raises:
        ConfigError: The file is missing or wrong.
    """
    return load_toml(path, HelpLines)


# --- Signs of danger --------------------------------------------------------------------------


class RiskKind(StrEnum):
    """What a phrase points to, the gravest first."""

    SUICIDE = "suicide"
    """The writer thinks of ending their life."""
    SELF_HARM = "self_harm"
    """The writer hurts themselves or wants to."""
    VIOLENCE = "violence"
    """The writer thinks of seriously hurting somebody."""
    OTHER_IN_DANGER = "other_in_danger"
    """Somebody the writer knows may end their life."""


@dataclass(frozen=True)
class RiskSign:
    """A phrase that may mean danger.

    Attributes:
        phrase: The words that were found, in lower case and without apostrophes. They are the
            visitor's own: log nothing of them.
    """

    kind: RiskKind
    phrase: str


class _Phrases(FrozenModel):
    """The regular expressions of one language; ``vocabularies/risk_phrases.toml`` explains them."""

    words: Mapping[str, str] = {}
    idioms: tuple[str, ...]
    negations: tuple[str, ...]
    other_in_danger: tuple[str, ...]
    suicide: tuple[str, ...]
    self_harm: tuple[str, ...]
    violence: tuple[str, ...]


class _PhraseFile(FrozenModel):
    en: _Phrases
    zh: _Phrases


@dataclass(frozen=True)
class _Rules:
    """The phrases of one language, ready for use."""

    idioms: re.Pattern[str]
    negations: re.Pattern[str]
    signs: Mapping[RiskKind, re.Pattern[str]]

    def find(self, text: str) -> RiskSign | None:
        text = self.idioms.sub(_GAP, text)
        about_other, text = self._take(RiskKind.OTHER_IN_DANGER, text)
        for kind in (RiskKind.SUICIDE, RiskKind.SELF_HARM, RiskKind.VIOLENCE):
            phrase, _ = self._take(kind, text)
            if phrase:
                return RiskSign(kind, phrase)
        return RiskSign(RiskKind.OTHER_IN_DANGER, about_other) if about_other else None

    def _take(self, kind: RiskKind, text: str) -> tuple[str, str]:
        """Return the first sign that is not negated, or "", and the text without such signs."""
        first = ""
        for match in self.signs[kind].finditer(text):
            if not self.negations.search(text[: match.start()]):
                first = first or match[0]
        return first, self.signs[kind].sub(_GAP, text) if first else text


_GAP = " / "  # neither a word nor the end of a sentence, so that no phrase reaches across it


@cache
def _rules() -> Mapping[str, _Rules]:
    file = load_toml(VOCABULARIES / "risk_phrases.toml", _PhraseFile)
    return {"en": _compiled(file.en), "zh": _compiled(file.zh)}


def _compiled(phrases: _Phrases) -> _Rules:
    def joined(patterns: Iterable[str]) -> re.Pattern[str]:
        whole = "|".join(f"(?:{pattern})" for pattern in patterns)
        for name, words in phrases.words.items():
            whole = whole.replace(f"{{{name}}}", words)
        return re.compile(whole)

    return _Rules(
        joined(phrases.idioms),
        joined(phrases.negations),
        {kind: joined(getattr(phrases, kind)) for kind in RiskKind},
    )


def find_risk(text: str, language: str = "und") -> RiskSign | None:
    """Return the gravest sign of danger in a message, or None where no listed phrase is found.

    The order is that of `RiskKind`. See the top of this module for what None does not mean.

    Args:
        text: What the seeker wrote.
        language: ``en`` or ``zh`` says whose phrase to return of two equally grave ones. All
            phrases are tried whatever it is, since people mix languages.

    Example:
        >>> find_risk("I could kill for a coffee", "en") is None
        True
        >>> find_risk("I can't stop thinking about killing myself", "en").kind
        <RiskKind.SUICIDE: 'suicide'>
    """
    plain = " ".join(re.sub("['’‘`]", "", text.lower()).split())
    languages = sorted(_rules(), key=lambda code: code != language)
    signs = [sign for code in languages if (sign := _rules()[code].find(plain))]
    return min(signs, key=lambda sign: list(RiskKind).index(sign.kind), default=None)
