"""Signs of danger in a message, and where to find help.

`find_risk` is a list of phrases, not a judgement. It exists so that a page can show help lines at
once, before any model has answered, leave some messages to people (`forbids_reply`), and keep such a
conversation out of votes and training data.

What it cannot do:

- It cannot tell that somebody is safe. A person in danger may write no such phrase, or write it in
  words that are not listed; None means "no listed phrase", nothing more.
- It reads one message. It knows no history, no voice, no face, and little irony.
- It reads English and Chinese. In other languages it finds nothing.
- It has not been evaluated on clinical data. It must not be used to decide about a person, to
  report one, or to end a conversation.

What was measured: ``tests/core/risk_messages.jsonl`` holds 677 messages that a large language model
wrote and labelled for this purpose, look-alikes among them (idioms, lyrics, denials, fiction,
games, what is long over). On the part ``tuning``, which was in sight while the phrases were
written, they find 246 of 248 signs and raise 0 false alarms in 249 look-alikes: they do what they
were written for. On the part ``held``, from the same pen and otherwise left alone, they find 42 of
88 signs and raise 4 false alarms in 92 look-alikes: words that say it are mostly found, hints
hardly ever (1 of 16). In 19,372 utterances of ESConv's seekers they flag 30, most of them rightly,
and in 60,000 lines of DailyDialog 5; both were looked at meanwhile. Nobody who works with people
in danger has read the phrases, the labels or the messages.

A false alarm costs a reader a reply; a missed sign can cost more. The rules still leave common
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
from compeer_core.folding import Folding, without_captures
from compeer_core.taxonomy import VOCABULARIES

HELP_LINES_FILE = Path(__file__).resolve().parent.parent / "assets" / "help_lines.toml"


# --- Help lines -------------------------------------------------------------------------------


LineKind = Literal["crisis", "emergency"]


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
    kind: LineKind
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

    def for_region(self, region: str, first: LineKind = "crisis") -> tuple[HelpLine, ...]:
        """Return the lines of a region first, and then all others.

        Args:
            region: A code as in `HelpLine.regions`, in any case; an unknown one puts none first.
            first: Which of the region's own lines come first.
        """
        wanted = region.upper()

        def rank(line: HelpLine) -> tuple[bool, bool]:
            return wanted not in line.regions, wanted in line.regions and line.kind != first

        return tuple(sorted(self.lines, key=rank))


def load_help_lines(path: Path = HELP_LINES_FILE) -> HelpLines:
    """Read the help lines.

    Raises:
        ConfigError: The file is missing or wrong.
    """
    return load_toml(path, HelpLines)


# --- Signs of danger --------------------------------------------------------------------------


class RiskKind(StrEnum):
    """What a phrase points to, the gravest first: danger to the writer, then to others."""

    MEDICAL_EMERGENCY = "medical_emergency"
    """The writer has taken too much of something, or bleeds: minutes may count."""
    SUICIDE = "suicide"
    """The writer thinks of ending their life."""
    SELF_HARM = "self_harm"
    """The writer hurts themselves or wants to."""
    VIOLENCE_SUFFERED = "violence_suffered"
    """Somebody beats, threatens or abuses the writer."""
    VIOLENCE = "violence"
    """The writer thinks of seriously hurting somebody."""
    OTHER_IN_DANGER = "other_in_danger"
    """Somebody the writer knows may end their life."""


_GRAVITY = {kind: place for place, kind in enumerate(RiskKind)}
_LEFT_TO_PEOPLE = {RiskKind.MEDICAL_EMERGENCY, RiskKind.SUICIDE, RiskKind.SELF_HARM}


def forbids_reply(kind: RiskKind | None) -> bool:
    """Whether no model may reply to a message with such a sign: help lines stand in its place.

    This is the one rule for the chat, for every way to ask for another reply, and for the API.
    A comparison is stricter: it takes no message with any sign.
    """
    return kind in _LEFT_TO_PEOPLE


@dataclass(frozen=True)
class RiskSign:
    """A phrase that may mean danger.

    Attributes:
        phrase: The words that were found, as `Folding` leaves them: in lower case, without
            apostrophes. They are the visitor's own: log nothing of them.
    """

    kind: RiskKind
    phrase: str


class _Phrases(FrozenModel):
    """The regular expressions of one language; ``vocabularies/risk_phrases.toml`` explains them."""

    words: Mapping[str, str]
    idioms: tuple[str, ...]
    negations: tuple[str, ...]
    fiction: tuple[str, ...]
    past: tuple[str, ...]
    recovered: tuple[str, ...]
    again: tuple[str, ...]
    medical_emergency: tuple[str, ...]
    suicide: tuple[str, ...]
    self_harm: tuple[str, ...]
    violence_suffered: tuple[str, ...]
    violence: tuple[str, ...]
    other_in_danger: tuple[str, ...]


class _PhraseFile(FrozenModel):
    fold: Folding
    en: _Phrases
    zh: _Phrases


_GAP = " / "  # neither a word nor the end of a sentence, so that no phrase reaches across it
_NEGATION_REACH = 60
_SENTENCE_REACH = 200
_SENTENCE_END = re.compile(r"[.!?;。]")
_OF_A_STORY = {RiskKind.OTHER_IN_DANGER, RiskKind.VIOLENCE}
"""Kinds of which people tell when they speak of a book or a game."""


class _Rules:
    """The phrases of one language, ready for use."""

    def __init__(self, phrases: _Phrases, word_start: str) -> None:
        def compiled(patterns: Iterable[str], start: str = "") -> re.Pattern[str]:
            whole = "|".join(f"(?:{_filled(pattern, phrases.words)})" for pattern in patterns)
            return re.compile(f"{start}(?:{whole})")

        by_kind = [
            (_filled(pattern, phrases.words), kind)
            # The story of somebody else is read before the same words are read as the writer's own.
            for kind in sorted(RiskKind, key=lambda kind: kind is not RiskKind.OTHER_IN_DANGER)
            for pattern in getattr(phrases, kind)
        ]
        self._signs, self._kinds = _factored(by_kind, word_start)
        self._idioms = compiled(phrases.idioms, word_start)
        self._negations = compiled(phrases.negations)
        self._fiction = compiled(phrases.fiction, word_start)
        self._past = compiled(phrases.past, word_start)
        self._recovered = compiled(phrases.recovered, word_start)
        self._again = compiled(phrases.again, word_start)

    def find(self, text: str) -> RiskSign | None:
        """Return the gravest sign in a folded text."""
        text = self._idioms.sub(_GAP, text)
        gravest: RiskSign | None = None
        for match in self._signs.finditer(text):
            assert match.lastindex is not None  # every phrase ends in a group
            kind = self._kinds[match.lastindex - 1]
            if gravest is None or _GRAVITY[kind] < _GRAVITY[gravest.kind]:
                gravest = self._weighed(kind, match, text) or gravest
        return gravest

    def _weighed(self, kind: RiskKind, match: re.Match[str], text: str) -> RiskSign | None:
        """Return a sign as what surrounds it lets it stand, None where that takes it back."""
        start, end = match.span()
        if self._negations.search(text[max(0, start - _NEGATION_REACH) : start]):
            return None
        before = _SENTENCE_END.split(text[max(0, start - _SENTENCE_REACH) : start])[-1]
        after = _SENTENCE_END.split(text[end : end + _SENTENCE_REACH], maxsplit=1)[0]
        sentence = f"{before}{match[0]}{after}"
        if kind in _OF_A_STORY and self._fiction.search(sentence):
            return None
        if self._past.search(sentence):
            if self._is_over(text):
                return None
            if kind is RiskKind.MEDICAL_EMERGENCY:  # an attempt, and no ambulance is late
                kind = RiskKind.SUICIDE
        return RiskSign(kind, match[0])

    def _is_over(self, text: str) -> bool:
        return bool(self._recovered.search(text)) and not self._again.search(text)


def _filled(pattern: str, words: Mapping[str, str]) -> str:
    """Put words into a pattern, which may hold other words."""
    for _ in range(2):
        for name, meaning in words.items():
            pattern = pattern.replace(f"{{{name}}}", meaning)
    return without_captures(pattern)


def _factored(
    patterns: Iterable[tuple[str, RiskKind]], start: str
) -> tuple[re.Pattern[str], tuple[RiskKind, ...]]:
    """Return one expression for all patterns, and the kind for each of its groups.

    Each pattern ends in an empty group, so `re.Match.lastindex` tells which one matched. Patterns
    that begin alike are tried together: this is what makes a scan for so many phrases affordable.
    """
    by_head: dict[str, list[tuple[str, RiskKind]]] = {}
    for pattern, kind in patterns:
        head = _head(pattern)
        by_head.setdefault(head, []).append((pattern[len(head) :], kind))
    branches = []
    kinds = []
    for head, rests in by_head.items():
        branches.append(f"{head}(?:{'|'.join(f'(?:{rest})()' for rest, _ in rests)})")
        kinds += [kind for _, kind in rests]
    return re.compile(f"{start}(?:{'|'.join(branches)})"), tuple(kinds)


def _head(pattern: str) -> str:
    """Return the first word or the first group of a pattern, empty where it cannot stand alone."""
    depth, end = 0, 0
    outside = ""
    for place, character in enumerate(pattern):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            outside += character
            if not end and character in " )]":
                end = place + 1
    if "|" in outside or pattern[end : end + 1] in set("?{*+"):
        return ""
    return pattern[:end]


@cache
def _phrases() -> tuple[Folding, Mapping[str, _Rules]]:
    file = load_toml(VOCABULARIES / "risk_phrases.toml", _PhraseFile)
    return file.fold, {
        "en": _Rules(file.en, "(?<![a-z0-9])(?=[a-z0-9])"),
        "zh": _Rules(file.zh, "(?=[\u4e00-\u9fff])"),
    }


def find_risk(text: str, language: str = "und") -> RiskSign | None:
    """Return the gravest sign of danger in a message, or None where no listed phrase is found.

    The order is that of `RiskKind`. See the top of this module for what None does not mean.
    The time is linear in the length of the text.

    Args:
        text: What the seeker wrote.
        language: ``en`` or ``zh`` says whose phrase to return of two equally grave ones. All
            phrases are tried whatever it is, since people mix languages.

    Example:
        >>> find_risk("I could kill for a coffee", "en") is None
        True
        >>> find_risk("I can't stop thinking about k1lling myself", "en").kind
        <RiskKind.SUICIDE: 'suicide'>
    """
    folding, rules = _phrases()
    plain = folding(text)
    languages = sorted(rules, key=lambda code: code != language)
    signs = [sign for code in languages if (sign := rules[code].find(plain))]
    return min(signs, key=lambda sign: _GRAVITY[sign.kind], default=None)
