"""The gate between a model and a person: why a generated turn may not be shown.

A small model can loop, leak its own markup or stop in the middle of a turn. `faults_of` names such faults of a
finished turn, by rule and in linear time. It does not judge meaning: a reply can pass and still be unhelpful.
`compeer_core.turn.take_turn` draws again after a fault, and withholds the reply if every draw has one.
A page that streams shows a draw while it is written; the gate decides when it has ended.

Lengths are in words as in `compeer_core.redundancy`: separated by spaces, and 1.5 characters each in Chinese and
other scripts without spaces. Repetition is measured as in evaluations (`compeer_core.ngrams`).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from compeer_core.dialogue import Dialogue, Speaker
from compeer_core.ngrams import loops, runs_of, words_of
from compeer_core.reasoning import LABELS, Reading
from compeer_core.redundancy import LETTERS_PER_WORD, reply_length

FEWEST_WORDS = 2
"""A reply of one word answers nothing that a person wrote."""
MOST_WORDS = 250
"""A page. The longest reply in `assets/cer` has 34 words, the longest of a supporter in ESConv's test set 111."""
GRAM_WORDS = 4
GRAM_TIMES = 3
"""A reply repeats itself if it contains the same `GRAM_WORDS` words in a row this often. None of the 13,411 replies in
`assets/cer` and of the 2,340 in ESConv's test set does."""
COPIED_SHARE = 0.8
"""A reply repeats the previous one if that one contains this share of its distinct runs of `GRAM_WORDS` words."""

_MARKUP = re.compile(
    r"</?[A-Za-z][^<>\n]{0,200}>"  # a tag, of the output format or of HTML
    r"|</[A-Za-z]|<[A-Za-z]{2,20}$"  # ... cut off
    r"|<\|[^|\n]{1,40}\|>|\[/?(?:INST|SYS)\]|<</?SYS>>"  # control tokens of chat templates
    r"|```|\{\{[^{}\n]{1,80}\}\}"
)
_LABELS = "|".join(name for names in LABELS.values() for name in names)
_LABEL_LINE = re.compile(
    rf"^[ \t*#>_-]{{0,8}}(?:{_LABELS}|history|reply|response|seeker|supporter|user|assistant|system"
    r"|阶段|情感极性|情绪|强度|策略|对话历史|情绪状态|支持策略|回复|求助者|支持者|用户|助手)[ \t*_]{0,4}[:：]",
    re.IGNORECASE | re.MULTILINE,
)


class Fault(StrEnum):
    """A reason why a turn may not be shown."""

    FORMAT = "format"
    """It lacks a part, or has text outside the four parts."""
    SAYS_NOTHING = "says_nothing"
    """The reply is empty, or has fewer than `FEWEST_WORDS` words."""
    MARKUP = "markup"
    """The reply contains a tag, a control token, or a line that reads as a label."""
    TOO_LONG = "too_long"
    """The reply has more than `MOST_WORDS` words."""
    REPEATS_ITSELF = "repeats_itself"
    """The reply contains the same words again and again."""
    REPEATS_PREVIOUS = "repeats_previous"
    """The reply is the supporter's previous one, or nearly."""
    NO_SIGN = "no_sign"
    """The reply does not show the forced strategy. `compeer_core.forced_turn` finds it, not `faults_of`."""


UNFINISHED_FAULTS = frozenset({Fault.MARKUP, Fault.TOO_LONG, Fault.REPEATS_ITSELF})
"""The faults that a turn can have before it is finished. What it still lacks is not a fault."""


@dataclass(frozen=True)
class RejectedDraw:
    """A draw that was not shown."""

    seed: int
    """With which the same controls give this draw again."""
    raw: str
    """The full text that the model generated."""
    faults: tuple[Fault, ...]
    """At least one, in the order of `Fault`."""


def faults_of(
    reading: Reading, previous: str = "", *, is_finished: bool = True
) -> tuple[Fault, ...]:
    """Return why a turn may not be shown, in the order of `Fault`; empty if it may.

    Args:
        reading: The turn.
        previous: The supporter's previous reply; empty if there is none.
        is_finished: Whether the model ended the turn. If it was interrupted, only `UNFINISHED_FAULTS` count.

    Example:
        >>> from compeer_core.reasoning import read
        >>> [fault.value for fault in faults_of(read("<reply>...</reply>"))]
        ['format', 'says_nothing']
    """
    reply = reading.reply or ""
    checks = {
        Fault.FORMAT: not reading.is_complete,
        Fault.SAYS_NOTHING: reply_length(" ".join(words_of(reply))) < FEWEST_WORDS,
        Fault.MARKUP: bool(_MARKUP.search(reply) or _LABEL_LINE.search(reply)),
        Fault.TOO_LONG: reply_length(reply) > MOST_WORDS,
        Fault.REPEATS_ITSELF: loops(reply, _gram_size(reply), GRAM_TIMES),
        Fault.REPEATS_PREVIOUS: _repeats(reply, previous),
    }
    return tuple(
        fault
        for fault, applies in checks.items()
        if applies and (is_finished or fault in UNFINISHED_FAULTS)
    )


def previous_reply(dialogue: Dialogue) -> str:
    """Return the supporter's latest utterance, empty if there is none."""
    return next(
        (each.text for each in reversed(dialogue.utterances) if each.speaker is Speaker.SUPPORTER),
        "",
    )


def _gram_size(text: str) -> int:
    """Return `GRAM_WORDS`, or as many characters if most of the words are characters of a script without spaces."""
    words = words_of(text)
    characters = sum(word >= "\u3040" for word in words)
    return round(GRAM_WORDS * LETTERS_PER_WORD) if 2 * characters > len(words) else GRAM_WORDS


def _repeats(reply: str, previous: str) -> bool:
    words = words_of(reply)
    if not words or words == words_of(previous):
        return bool(words)
    size = _gram_size(reply)
    grams, earlier = runs_of([reply], size).keys(), runs_of([previous], size).keys()
    return bool(grams) and len(grams & earlier) >= COPIED_SHARE * len(grams)
