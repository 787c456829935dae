"""Signs of danger in a message, and where to find help.

`find_risk` matches a list of phrases; it does not understand a message. It lets a page show help lines
at once, before any model answers, withhold replies (`RiskState`), and keep such conversations out of votes
and training data. A learned check can replace or complement it (`RiskCheck`).

Limits:

- It cannot establish that somebody is safe. A person in danger may use words that are not listed; None
  means "no listed phrase", nothing more.
- It reads one message, without history, voice or face, and misses most irony.
- It covers English and Chinese only.
- It has not been evaluated on clinical data. Do not use it to decide about a person, to report one, or
  to end a conversation.

Evaluation: ``tests/core/risk_messages.jsonl`` has 6,368 messages that a large language model wrote and
labelled for this purpose, with look-alikes (idioms, lyrics, denials, fiction, games, the distant past).
On the part ``tuning``, which was visible while the phrases were written, they find 246 of 248 signs, with 0
false alarms in 249 look-alikes. On the part ``held`` (same author, not used for tuning) they find 44 of
88 signs, with 4 false alarms in 92 look-alikes: explicit wording is mostly found, hints hardly ever.
On the part ``wide`` (English and Chinese, most signs without an explicit word; most of its writers with names
were visible too) they find 468 of 2402 signs, with 38 false alarms in 2469 look-alikes. On the part ``fresh``
(by another, one in three without an explicit word, and 100 ordinary messages) they find 72 of 260 signs, with 4
false alarms in 260, and on the part ``final`` (English, written before the last changes) they find 24 of 150 signs,
with 2 false alarms in 150. **Most hints are missed.** `compeer_core.risk_classifier` finds more of them, with a few more false alarms.
Of 19,372 utterances of ESConv's seekers 30 are flagged, most of them correctly, and of 60,000 lines of
DailyDialog 5; both corpora were inspected during development. No crisis professional has reviewed the
phrases, the labels or the messages.

A false alarm costs a reply; a missed sign can cost more. Common figures of speech are still excluded ("I
could kill for a coffee", "想死你了"), because people soon ignore a card that appears at every idiom.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel, load_toml
from compeer_core.folding import Folding, without_captures
from compeer_core.taxonomy import VOCABULARIES

HELP_LINES_FILE = Path(__file__).resolve().parent.parent / "assets" / "help_lines.toml"


# --- Help lines -------------------------------------------------------------------------------


LineKind = Literal["crisis", "emergency"]


class Wording(FrozenModel):
    """A text in the languages of the page."""

    en: str = Field(min_length=1)
    zh: str = Field(min_length=1)

    def __call__(self, language: str) -> str:
        """Return the text in ``zh``, for any other language in ``en``."""
        return self.zh if language == "zh" else self.en


class HelpLine(FrozenModel):
    """One number that a person in danger can call."""

    regions: tuple[str, ...] = Field(min_length=1)
    """ISO 3166 codes of the countries it serves, and ``EU`` for all of the European Union."""
    number: str = Field(pattern=r"^[0-9][0-9 ]*$")
    """As dialled in these regions, with spaces for readability."""
    kind: LineKind
    """A crisis line, or ambulance and police."""
    name: Wording
    source: str
    """The source: a URL or a document."""
    checked: date
    """The day of the last comparison with the source."""
    confirmed: str
    """Who confirmed it with the service, and when; states it if nobody has."""


class HelpLines(FrozenModel):
    """All lines, in the order of the file."""

    lines: tuple[HelpLine, ...] = Field(min_length=1)

    def for_region(self, region: str, first: LineKind = "crisis") -> tuple[HelpLine, ...]:
        """Return all lines, those of a region first.

        Args:
            region: A code as in `HelpLine.regions`, in any case; for an unknown one the order of
                the file stays.
            first: The kind that comes first among the region's lines.
        """
        wanted = region.upper()

        def rank(line: HelpLine) -> tuple[bool, bool]:
            return wanted not in line.regions, wanted in line.regions and line.kind != first

        return tuple(sorted(self.lines, key=rank))


def load_help_lines(path: Path = HELP_LINES_FILE) -> HelpLines:
    """Read the help lines.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    return load_toml(path, HelpLines)


# --- Signs of danger --------------------------------------------------------------------------


class RiskKind(StrEnum):
    """Kinds of danger, the gravest first: to the writer, to others, and what is past."""

    MEDICAL_EMERGENCY = "medical_emergency"
    """The writer has taken an overdose or is bleeding: minutes may count."""
    SUICIDE = "suicide"
    """The writer considers suicide."""
    SELF_HARM = "self_harm"
    """The writer hurts themselves or wants to."""
    VIOLENCE_SUFFERED = "violence_suffered"
    """Somebody beats, threatens or abuses the writer."""
    VIOLENCE = "violence"
    """The writer considers seriously hurting somebody."""
    OTHER_IN_DANGER = "other_in_danger"
    """Somebody the writer knows may attempt suicide."""
    PAST_SELF_HARM = "past_self_harm"
    """The writer attempted or considered suicide, or hurt themselves, years ago. The message does not say
    that it came back, nor that it is over."""


_GRAVITY = {kind: place for place, kind in enumerate(RiskKind)}
_OWN = {RiskKind.MEDICAL_EMERGENCY, RiskKind.SUICIDE, RiskKind.SELF_HARM}


def forbids_reply(kind: RiskKind | None) -> bool:
    """Whether no model may reply to a message with such a sign: at present, with any."""
    return kind is not None


@dataclass(frozen=True)
class RiskSign:
    """What a check takes for a sign of danger.

    Attributes:
        phrase: The matched words, as `Folding` normalises them; empty if the check matches no phrase.
            They are the visitor's own: do not log them.
        is_hint: The check is often wrong, so help is shown and the reply folded behind it, not withheld.
    """

    kind: RiskKind
    phrase: str = ""
    is_hint: bool = False


class RiskCheck(Protocol):
    """Looks for signs of danger in one message; `find_risk` is the default."""

    def __call__(self, text: str, language: str) -> RiskSign | None:
        """Return the gravest sign, None if there is none.

        Args:
            text: The message, as its writer sent it.
            language: ``en``, ``zh``, or what else `compeer_core.dialogue.language_of` returns.
        """


def _gravest(signs: Iterable[RiskSign | None]) -> RiskSign | None:
    return min(filter(None, signs), key=lambda sign: _GRAVITY[sign.kind], default=None)


WITHHELD_AFTERWARDS = 1
"""How many messages after one with a sign get no generated reply either."""


@dataclass(frozen=True)
class RiskState:
    """What a person's messages so far mean for the reply to the newest one.

    A message with a sign gets no generated reply, and neither do the next `WITHHELD_AFTERWARDS`
    messages, whatever they say: one "I was joking" does not end a danger. A new sign starts the count
    again. A hint shows help and withholds nothing, unless a sign came before: then it counts as one. All entry
    points follow this rule; the page counts across conversations and screens.
    """

    kind: RiskKind | None = None
    """The kind of the latest sign; None if there was none."""
    messages_since: int = 0
    """How many messages came after that sign; 0 if it is in the newest one."""
    is_hint: bool = False
    """Whether all signs so far were hints."""

    def after(self, sign: RiskSign | None) -> "RiskState":
        """Return the state after one more message."""
        if sign is not None:
            is_first = self.kind is None or self.is_hint
            return RiskState(sign.kind, is_hint=sign.is_hint and is_first)
        return replace(self, messages_since=self.messages_since + 1) if self.kind else self

    @property
    def withheld_for(self) -> RiskKind | None:
        """The kind for which the newest message gets no generated reply; None if it may get one."""
        is_near = self.messages_since <= WITHHELD_AFTERWARDS
        return self.kind if is_near and not self.is_hint and forbids_reply(self.kind) else None


class RiskSentences(FrozenModel):
    """What is shown in place of a reply; no model writes any of it."""

    kinds: Mapping[RiskKind, Wording]
    afterwards: Wording
    """For a message without a sign, soon after one with a sign."""
    hint: Wording
    """Beside a reply, after a hint."""

    @model_validator(mode="after")
    def _is_complete(self) -> "RiskSentences":
        if missing := set(RiskKind) - set(self.kinds):
            raise ValueError(f"kinds: no sentence for {', '.join(sorted(missing))}")
        return self


@cache
def risk_sentences() -> RiskSentences:
    """Read the fixed sentences of ``vocabularies/risk_sentences.toml``.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    return load_toml(VOCABULARIES / "risk_sentences.toml", RiskSentences)


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


_GAP = " / "  # neither a word nor the end of a sentence, so that no phrase matches across it
_NEGATION_REACH = 60
_SENTENCE_REACH = 200
_SENTENCE_END = re.compile(r"[.!?;。]")
_OF_A_STORY = {RiskKind.OTHER_IN_DANGER, RiskKind.VIOLENCE}
"""Kinds that also appear when people talk about a book or a game."""


class _Rules:
    """The compiled phrases of one language."""

    def __init__(self, phrases: _Phrases, word_start: str) -> None:
        def compiled(patterns: Iterable[str], start: str = "") -> re.Pattern[str]:
            whole = "|".join(f"(?:{_filled(pattern, phrases.words)})" for pattern in patterns)
            return re.compile(f"{start}(?:{whole})")

        by_kind = [
            (_filled(pattern, phrases.words), kind)
            # Danger to somebody else is matched before the same words as the writer's own.
            for kind in sorted(RiskKind, key=lambda kind: kind is not RiskKind.OTHER_IN_DANGER)
            for pattern in getattr(phrases, kind, ())
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
                gravest = _gravest([gravest, self._weighed(kind, match, text)])
        return gravest

    def _weighed(self, kind: RiskKind, match: re.Match[str], text: str) -> RiskSign | None:
        """Return a sign, weighed by its context; None if the context negates it."""
        start, end = match.span()
        if self._negations.search(text[max(0, start - _NEGATION_REACH) : start]):
            return None
        before = _SENTENCE_END.split(text[max(0, start - _SENTENCE_REACH) : start])[-1]
        after = _SENTENCE_END.split(text[end : end + _SENTENCE_REACH], maxsplit=1)[0]
        sentence = f"{before}{match[0]}{after}"
        if kind in _OF_A_STORY and self._fiction.search(sentence):
            return None
        if self._past.search(sentence):
            came_back = self._again.search(text) is not None
            if not came_back and self._recovered.search(text):
                return None
            if kind in _OWN and not came_back:
                kind = RiskKind.PAST_SELF_HARM
            elif kind is RiskKind.MEDICAL_EMERGENCY:  # a past attempt, so no emergency
                kind = RiskKind.SUICIDE
        return RiskSign(kind, match[0])


def _filled(pattern: str, words: Mapping[str, str]) -> str:
    """Replace placeholders in a pattern; a value may contain further ones."""
    for _ in range(2):
        for name, meaning in words.items():
            pattern = pattern.replace(f"{{{name}}}", meaning)
    return without_captures(pattern)


def _factored(
    patterns: Iterable[tuple[str, RiskKind]], start: str
) -> tuple[re.Pattern[str], tuple[RiskKind, ...]]:
    """Return one expression for all patterns, and the kind of each of its groups.

    Each pattern ends in an empty group, so `re.Match.lastindex` identifies it. Patterns with the same
    beginning share it, which makes a scan for so many phrases fast enough.
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
    """Return the first word or group of a pattern; empty if it cannot be split off."""
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
    """Return the gravest sign of danger in a message, or None if no listed phrase matches.

    The order is that of `RiskKind`. See the module's limits for what None does not mean. The time is
    linear in the text's length.

    Args:
        text: The seeker's message.
        language: ``en`` or ``zh``: which phrase to return of two equally grave ones. Phrases of both
            languages are always tried, since people mix them.

    Example:
        >>> find_risk("I could kill for a coffee", "en") is None
        True
        >>> find_risk("I can't stop thinking about k1lling myself", "en").kind
        <RiskKind.SUICIDE: 'suicide'>
    """
    folding, rules = _phrases()
    plain = folding(text)
    languages = sorted(rules, key=lambda code: code != language)
    return _gravest(rules[code].find(plain) for code in languages)
