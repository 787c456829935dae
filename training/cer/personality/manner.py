"""Rewrite a text in another manner of speaking by published rules, without a language model.

The paper has a language model rewrite a dialogue in the manner of a persona. Without one, these rules
**simulate** that step: they change how something is said and never what. They change contractions and
register, hedges, requests, exclamations, openers, and sentence boundaries (`manner.<language>.toml`);
which of them apply, and how often, follows the DISC scores of the persona (`Manner.of`). Numbers,
negations, names and question marks stay, and so do text in double quotes, web addresses and line
breaks. English and Chinese have rules; a text in another language is unchanged.

`FIXED` is one manner for everybody: spelled out, polite, even. It imitates what the paper says about
rewriting without a persona: the results "converge toward a homogeneous linguistic style".

The rules know no grammar beyond the adjacent words, so each is narrow: unsafe cases stay unchanged.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from training.cer.personality.traits import Disc
from training.cer.personality.wording import negations, numbers, questions

LANGUAGES = ("en", "zh")
"""The languages that have rules."""

NAME = "manner/1"
"""The name and version of the rules in records."""

_GROUPS = (
    *("tidy", "expand", "contract", "formal", "informal"),
    *("direct", "soft", "polite", "blunt", "polite_questions", "blunt_questions"),
)
_PROTECTED = re.compile(
    r"\"[^\"\n]*\"|“[^”\n]*”|「[^」\n]*」|https?://\S+|\S+@\S+|<[^<>\n]*>|\[[^\[\]\n]*\]"
)
_MARK = "\ue000"  # a private-use character that stands for a protected piece
_ENDS: Mapping[str, re.Pattern[str]] = {
    "en": re.compile(r"(?<=[.!?…])(\s+)"),
    "zh": re.compile(r"(?<=[。！？…])(?![”’」』）。！？…])()"),
}
_CLAUSE = {
    "en": re.compile(r", (and|but) (?=(?:I|you|he|she|it|we|they)\b)"),
    "zh": re.compile("，(但是|可是|不过)，?(?=[我你您他她这那])"),
}
_ASKING = frozenset(["how", "what", "why", "who", "where", "when", "which", "whose"])
_SHORT_WORDS, _LONG_WORDS = 4, 14


# --- Manner -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manner:
    """A manner of speaking: how often each kind of rule applies where it fits, 0 to 1.

    Attributes:
        spelled_out: Contractions are expanded and chatty words replaced by careful ones.
        chatty: The opposite. At most one of the two is above 0.
        direct: Hedges are removed, long sentences split.
        soft: Hedges are added.
        polite: "Please" and fuller thanks.
        blunt: The opposite.
        lively: Cheerful statements end with an exclamation mark.
        even: Exclamation marks become full stops.
        joined: Short sentences are joined.
        opener: A short phrase precedes a sentence, once per utterance.
        openers: The set of phrases: a letter of DISC, or ``fixed``.
    """

    spelled_out: float = 0.0
    chatty: float = 0.0
    direct: float = 0.0
    soft: float = 0.0
    polite: float = 0.0
    blunt: float = 0.0
    lively: float = 0.0
    even: float = 0.0
    joined: float = 0.0
    opener: float = 0.0
    openers: Literal["D", "I", "S", "C", "fixed"] = "fixed"

    @classmethod
    def of(cls, scores: Disc) -> "Manner":
        """Return the manner for DISC scores.

        Each score counts by its distance from 0.5. Compliance minus influence sets the register,
        dominance minus steadiness directness and politeness, influence the exclamations, compliance
        and steadiness how sentences are joined; the highest score selects the openers.
        """
        d, i, s, c = (2 * score - 1 for score in (scores.d, scores.i, scores.s, scores.c))
        register, push = c - i, d - s
        highest = max("DISC", key=lambda letter: getattr(scores, letter.lower()))
        return cls(
            spelled_out=_share(register),
            chatty=_share(-register),
            direct=_share(push),
            soft=_share(-push + 0.3 * c),
            polite=_share(s - d),
            blunt=_share(d - s),
            lively=_share(i),
            even=_share(-i),
            joined=_share(0.5 * (c + s)),
            opener=0.3 + 0.4 * abs(2 * getattr(scores, highest.lower()) - 1),
            openers=highest,  # type: ignore[arg-type]
        )


def _share(strength: float) -> float:
    """Return how often a rule applies: 0 up to strength 0, 1 from strength 0.5."""
    return min(max(2.0 * strength, 0.0), 1.0)


FIXED = Manner(spelled_out=1.0, soft=1.0, polite=1.0, even=1.0, joined=1.0, opener=0.4)
"""One manner for everybody, for rewriting without a persona."""


# --- Rules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    replacement: str
    after_wh: bool


@dataclass(frozen=True)
class _Rules:
    groups: Mapping[str, tuple[_Rule, ...]]
    openers: Mapping[str, Mapping[str, Sequence[str]]]
    cheerful: re.Pattern[str]
    subjects: frozenset[str]
    starters: frozenset[str]
    no_opener: re.Pattern[str]
    question_starts: frozenset[str]
    subordinate: re.Pattern[str]
    wh: re.Pattern[str]


@cache
def _rules(language: str) -> _Rules:
    path = Path(__file__).with_name(f"manner.{language}.toml")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    cues = table["cues"]
    return _Rules(
        {group: tuple(_rule(entry, language) for entry in table[group]) for group in _GROUPS},
        table["openers"],
        re.compile(cues["cheerful"], re.IGNORECASE),
        frozenset(word.lower() for word in cues["subjects"]),
        frozenset(cues["starters"]),
        re.compile(cues["no_opener"], re.IGNORECASE),
        frozenset(cues["question_starts"]),
        re.compile(cues["subordinate"], re.IGNORECASE),
        re.compile(cues["wh"], re.IGNORECASE),
    )


def _rule(entry: Mapping[str, Any], language: str) -> _Rule:
    pattern = entry["from"].replace("'", "['’]")
    if language == "en":
        # A rule that only inserts or removes words ends where the next word begins.
        end = "" if not entry["to"] or entry["to"].endswith(" ") else r"(?![\w'’])"
        start = "" if entry["from"].startswith(",") else r"(?<![\w'’-])"
        pattern = rf"{start}(?:{pattern}){end}"
    return _Rule(
        re.compile(pattern, re.IGNORECASE), entry["to"], bool(entry.get("after_wh", False))
    )


# --- Rewriting --------------------------------------------------------------------------------


def rewritten(text: str, manner: Manner, rng: np.random.Generator, language: str = "en") -> str:
    """Return a text in a manner. The same generator state gives the same text.

    Args:
        text: The text; each line is rewritten separately.
        manner: The target manner.
        rng: Decides which of the fitting rules apply.
        language: A text in a language without rules is unchanged.

    Returns:
        A text with the same numbers, negations and questions, empty only if the given one is.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> rewritten("I'm glad! You should talk to your mom.", FIXED, rng)
        'I am glad. Perhaps you should speak to your mother.'
    """
    if language not in LANGUAGES or _MARK in text:
        return text
    rules = _rules(language)
    protected = iter(_PROTECTED.findall(text))
    masked = _PROTECTED.sub(_MARK, text)
    lines: list[str] = []
    may_open = True
    for line in masked.split("\n"):
        done = _line(line, manner, rng, rules, language, may_open=may_open)
        lines.append(done.text)
        may_open = may_open and not done.is_opened
    changed = re.sub(_MARK, lambda _: next(protected), "\n".join(lines))
    return changed if _says_the_same(changed, text, language) else text


def _says_the_same(changed: str, text: str, language: str) -> bool:
    """Whether numbers, negations and questions are unchanged.

    The rules guarantee that for separated words; but in a script without spaces, such as Chinese, a
    rule can form a new word from the characters around it.
    """
    return (
        numbers(changed, language) == numbers(text, language)
        and negations(changed, language) == negations(text, language)
        and questions(changed) == questions(text)
    )


@dataclass(frozen=True)
class _Line:
    text: str
    is_opened: bool = False


def _line(
    line: str,
    manner: Manner,
    rng: np.random.Generator,
    rules: _Rules,
    language: str,
    *,
    may_open: bool,
) -> _Line:
    if not line.strip():
        return _Line(line)
    before, body, after = _around(line)
    pieces = _ENDS[language].split(body)
    sentences, gaps = [piece for piece in pieces[::2] if piece], pieces[1::2]
    sentences = [_sentence(each, manner, rng, rules, language) for each in sentences]
    gap = gaps[0] if gaps else ""
    if rng.random() < manner.joined and language == "en":
        sentences = _joined(sentences, rules)
    if rng.random() < manner.direct:
        sentences = [part for each in sentences for part in _cut(each, rules, language)]
    unopened = sentences
    if rng.random() < manner.opener and may_open:
        sentences = _opened(sentences, manner, rng, rules, language)
    is_opened = sentences is not unopened
    sentences = _finished(sentences, manner, rng, rules, language)
    changed = (gap or (" " if language == "en" else "")).join(filter(None, sentences))
    return _Line(f"{before}{changed or body}{after}", is_opened)


def _around(line: str) -> tuple[str, str, str]:
    body = line.strip()
    start = line.index(body)
    return line[:start], body, line[start + len(body) :]


def _sentence(
    sentence: str, manner: Manner, rng: np.random.Generator, rules: _Rules, language: str
) -> str:
    is_question = sentence.rstrip("\"'”’)").endswith(("?", "？"))
    text = sentence
    if manner.spelled_out:
        text = _use(text, "tidy", 1.0, rng, rules)
        text = _use(text, "expand", manner.spelled_out, rng, rules)
    if not is_question:
        text = _use(text, "direct", manner.direct, rng, rules)
        text = _use(text, "soft", manner.soft, rng, rules, once=True)
        text = _use(text, "polite", manner.polite, rng, rules, once=True)
        text = _use(text, "blunt", manner.blunt, rng, rules)
    else:
        text = _use(text, "polite_questions", manner.polite, rng, rules, once=True)
        text = _use(text, "blunt_questions", manner.blunt, rng, rules, once=True)
    text = _use(text, "formal", manner.spelled_out, rng, rules)
    text = _use(text, "informal", manner.chatty, rng, rules)
    text = _use(text, "contract", manner.chatty, rng, rules)
    if not is_question:
        text = _voice(text, manner, rng, rules, language)
    return text if any(map(str.isalnum, text)) or _MARK in text else sentence


def _use(
    text: str,
    group: str,
    share: float,
    rng: np.random.Generator,
    rules: _Rules,
    *,
    once: bool = False,
) -> str:
    table = rules.groups[group]
    draws = rng.random(len(table))  # one for every rule, so that a rule does not shift the others
    for rule, draw in zip(table, draws, strict=True):
        if draw >= share:
            continue
        changed = _applied(text, rule, rules)
        if changed != text and changed.strip():
            text = _like(text, changed)
            if once:
                break
    return text


def _applied(text: str, rule: _Rule, rules: _Rules) -> str:
    def replace(match: re.Match[str]) -> str:
        if rule.after_wh and rules.wh.search(_clause_before(text, match.start())):
            return match[0]
        replacement = match.expand(rule.replacement)
        if match[0][:1].isupper() and replacement:
            return replacement[0].upper() + replacement[1:]
        return replacement

    return rule.pattern.sub(replace, text)


def _clause_before(text: str, position: int) -> str:
    return re.split("[.,;:!?]", text[:position])[-1]


def _like(before: str, after: str) -> str:
    """Restore the capital at the start of a sentence, and collapse double spaces."""
    after = re.sub(" {2,}", " ", after.strip())
    after = re.sub(r"^[,;] ?", "", after)
    first = before.split(" ", 1)[0]
    words = after.split(" ")
    place = _place_of(first, words)
    if first[:1].isupper() and place > 0:
        words[place] = _lowered(words[place])  # it is no longer the first word
        after = " ".join(words)
    return after[:1].upper() + after[1:] if first[:1].isupper() else after


def _place_of(first: str, words: Sequence[str]) -> int:
    return next((place for place, word in enumerate(words[:6]) if word == first), 0)


def _lowered(word: str) -> str:
    return word if re.match(r"I(?:['’]\w+)?\b", word) else word[:1].lower() + word[1:]


def _voice(
    text: str, manner: Manner, rng: np.random.Generator, rules: _Rules, language: str
) -> str:
    stop, call = ("。", "！") if language == "zh" else (".", "!")
    lively, even = rng.random(2)
    if even < manner.even and text.endswith(call):
        return text.rstrip(f"{call}!") + stop
    ends_plainly = text.endswith(stop) and not text.endswith(stop * 2)
    if lively < manner.lively and ends_plainly and rules.cheerful.search(text):
        return text[:-1] + call
    return text


# --- Sentences --------------------------------------------------------------------------------


def _joined(sentences: list[str], rules: _Rules) -> list[str]:
    """Join two short neighbouring statements that both begin with their subject."""
    joined: list[str] = []
    for sentence in sentences:
        last = joined[-1] if joined else ""
        if _is_plain(last, rules) and _is_plain(sentence, rules):
            joined[-1] = f"{last[:-1]}, and {_lowered(sentence)}"
        else:
            joined.append(sentence)
    return joined


def _is_plain(sentence: str, rules: _Rules) -> bool:
    words = sentence.split()
    return (
        _SHORT_WORDS <= len(words) <= _LONG_WORDS
        and sentence.endswith(".")
        and not sentence.endswith("..")
        and words[0].lower() in rules.subjects
        and not re.search(r"[,;:()—]| and ", sentence)
    )


def _cut(sentence: str, rules: _Rules, language: str) -> list[str]:
    """Split a long statement before "and" or "but" and a new subject."""
    stop = "。" if language == "zh" else "."
    if not sentence.endswith((stop, "!", "！")) or rules.subordinate.search(sentence):
        return [sentence]
    for place in _CLAUSE[language].finditer(sentence):
        left, right = sentence[: place.start()], sentence[place.end() :]
        if language == "zh":
            if len(left) >= 6 and len(right) >= 6:
                return [left + stop, f"{place[1]}{right}"]
        elif min(len(left.split()), len(right.split())) >= _SHORT_WORDS:
            begun = f"But {right}" if place[1] == "but" else right[0].upper() + right[1:]
            return [left + stop, begun]
    return [sentence]


def _finished(
    sentences: list[str], manner: Manner, rng: np.random.Generator, rules: _Rules, language: str
) -> list[str]:
    """Begin with a capital and end with a full stop, or drop the last stop as in a chat."""
    tidy, chat = rng.random(2)
    stop = "。" if language == "zh" else "."
    *others, last = sentences
    if chat < 0.6 * manner.chatty and last.endswith(stop) and not last.endswith(stop * 2):
        return [*others, last[:-1]]
    if tidy < manner.spelled_out:
        sentences = [each[:1].upper() + each[1:] for each in sentences]
        last = sentences[-1]
        words = [word.lower().strip(",") for word in last.split()]
        # A question without its mark would become a statement.
        may_ask = words[0] in rules.question_starts or _ASKING.intersection(words[-6:])
        if last[-1].isalpha() and not may_ask and len(words) > 1:
            return [*sentences[:-1], f"{last}."]
    return sentences


def _opened(
    sentences: list[str], manner: Manner, rng: np.random.Generator, rules: _Rules, language: str
) -> list[str]:
    draws = rng.random(2)
    for place, sentence in enumerate(sentences):
        kind = _kind(sentence, rules, language)
        if kind is None:
            continue
        phrases = rules.openers[manner.openers][kind]
        phrase = phrases[int(draws[0] * len(phrases))]
        inner = _lowered(sentence) if language == "en" else sentence
        capital = sentence[:1].upper() + sentence[1:]
        opened = phrase + (capital if phrase.endswith(": ") else inner)
        return [*sentences[:place], opened, *sentences[place + 1 :]]
    return sentences


def _kind(sentence: str, rules: _Rules, language: str) -> str | None:
    """Return the kind of opener that a sentence can take: ``statement``, ``question`` or None."""
    if rules.no_opener.search(sentence):
        return None
    if language == "zh":
        if len(sentence) < 6:
            return None
        if sentence.endswith("？"):
            return "question" if sentence.startswith(tuple(rules.question_starts)) else None
        return "statement" if sentence[0] in rules.subjects else None
    words = sentence.split()
    if len(words) < _SHORT_WORDS:
        return None
    first = words[0].lower().replace("’", "'")
    if sentence.endswith("?"):
        return "question" if first in rules.question_starts else None
    return "statement" if first in rules.subjects | rules.starters else None
