"""Does a reply carry out the strategy that its turn names? Told by outer signs, without a model.

A turn may reason well and then do something else: it names Reflection of Feelings and goes on to give
advice. COMPEER reports such turns in its consistency study. The signs are few and can be looked up by
hand (``vocabularies/strategy_signs.en.toml``):

- Question: a question mark.
- Restatement or Paraphrasing: says "you", and takes up at least one of the telling words of the
  seeker's last two turns.
- Self-disclosure: says I, my or me beyond set phrases ("I am sorry").
- Information: a phrase of its list, in statements of at least six words.
- All others: a phrase of their list.

There are lists for English alone. No Chinese corpus at hand has strategies labelled by people, so
Chinese lists could be written but not measured; in any language but English, and for a strategy of
another vocabulary, the answer is that it cannot be told.

**How far to trust it.** Measured on those turns of ESConv's train split to which people gave one
strategy: how often the signs of that strategy are there (found), and how often those of a strategy
that people did not give to the turn (false alarms). 95 % intervals over dialogues in brackets. People
gave one label to a sentence that may do two things, so not every false alarm is one.

| strategy                    |    n | found                 | n of others | false alarms          |
|-----------------------------|-----:|-----------------------|------------:|-----------------------|
| Question                    | 1666 | 93.0 % (91.0 to 94.8) |        7053 | 23.8 % (22.5 to 25.1) |
| Restatement or Paraphrasing |  618 | 48.5 % (44.1 to 52.9) |        8101 | 24.7 % (23.6 to 25.9) |
| Reflection of Feelings      |  676 | 62.7 % (58.7 to 66.5) |        8043 | 34.7 % (33.4 to 35.9) |
| Self-disclosure             |  749 | 88.8 % (86.3 to 91.1) |        7970 | 24.8 % (23.6 to 26.0) |
| Affirmation and Reassurance | 1414 | 54.8 % (51.8 to 57.7) |        7305 | 31.4 % (30.2 to 32.7) |
| Providing Suggestions       | 1399 | 61.4 % (58.5 to 64.1) |        7320 | 19.8 % (18.7 to 20.8) |
| Information                 |  577 | 74.0 % (70.4 to 77.9) |        8142 | 50.7 % (49.5 to 52.0) |
| Others                      | 1620 | 67.7 % (65.1 to 70.2) |        7099 | 44.3 % (43.0 to 45.7) |
| all, another one at random  | 8719 | 69.9 % (68.6 to 71.1) |        8719 | 31.9 % (31.3 to 32.5) |

`CLEAR_SIGNS` are the strategies where the two are at least 40 points apart. For the others the
answer is little more than a hint: good for comparing judges on many turns, too weak to tell a reader
that one reply is wrong. The measure is `training.evaluation.strategy_signs`, run by
``python -m training evaluate consistency CONFIG --set esconv=runs/small/rules/rows.jsonl``.
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from typing import Protocol

from compeer_core.config import FrozenModel, load_toml
from compeer_core.dialogue import Speaker, language_of
from compeer_core.phrases import Phrases, stem, words_of
from compeer_core.reasoning import Unreadable
from compeer_core.taxonomy import VOCABULARIES, Strategy

LANGUAGES = ("en",)
"""The languages that there are lists for."""

CLEAR_SIGNS = frozenset({Strategy.QUESTION, Strategy.SELF_DISCLOSURE, Strategy.SUGGESTIONS})
"""Strategies whose signs seldom stand in a reply that does something else; see the module."""

_FIRST_PERSON = re.compile(r"\b(?:i|i'm|i've|i'd|my|me|mine|myself)\b")
_SECOND_PERSON = frozenset({"you", "your", "you're", "you've", "yourself"})
_STATEMENT = re.compile(r"[^.!?\n]+[.!?]*")


class Followed(StrEnum):
    """Whether a reply carries out a strategy."""

    YES = "carries it out"
    NO = "does not carry it out"
    UNKNOWN = "cannot tell"


class Said(Protocol):
    """What somebody said: an `Utterance`, or that of a `compeer_core.cer.Case`."""

    @property
    def speaker(self) -> Speaker: ...

    @property
    def text(self) -> str: ...


def carries_out(
    history: Iterable[Said], reply: str, strategy: str | Unreadable, language: str | None = None
) -> Followed:
    """Return whether a reply shows the outer signs of a strategy.

    Args:
        history: What was said before, with runs of one speaker joined (`Dialogue.merged`).
        reply: Its words.
        strategy: The name that the turn gives.
        language: ISO 639-1; None guesses it from the reply.

    Example:
        >>> carries_out([], "What happened then?", "Question").value
        'carries it out'
        >>> carries_out([], "Maybe talk to your boss.", "Reflection of Feelings").value
        'does not carry it out'
        >>> carries_out([], "后来怎么样了？", "Question").value
        'cannot tell'
    """
    spoken = language_of(reply) if language is None else language
    if isinstance(strategy, Unreadable) or strategy not in _NAMES or spoken not in LANGUAGES:
        return Followed.UNKNOWN
    shown = _shows(history, reply, Strategy(strategy), signs(spoken))
    return Followed.YES if shown else Followed.NO


_NAMES = frozenset(strategy.value for strategy in Strategy)


def _shows(history: Iterable[Said], reply: str, strategy: Strategy, lists: "Signs") -> bool:
    match strategy:
        case Strategy.QUESTION:
            return "?" in reply
        case Strategy.RESTATEMENT:
            said = [each.text for each in history if each.speaker is Speaker.SEEKER]
            lately = lists.content("\n".join(said[-2:]))
            turned = _SECOND_PERSON & set(words_of(reply))
            return bool(turned) and bool(lists.content(reply) & lately)
        case Strategy.SELF_DISCLOSURE:
            return bool(_FIRST_PERSON.search(lists.set_first_person.without(reply)))
        case Strategy.INFORMATION:
            statements = " ".join(s for s in _STATEMENT.findall(reply) if "?" not in s)
            return (
                len(words_of(statements)) >= 6 and statements in lists.shows[Strategy.INFORMATION]
            )
        case other:
            return reply in lists.shows[other]


# --- the lists --------------------------------------------------------------------------------


class _SetPhrases(FrozenModel):
    first_person: tuple[str, ...]


class _Common(FrozenModel):
    words: str


class _File(FrozenModel):
    shows: Mapping[Strategy, tuple[str, ...]]
    set_phrases: _SetPhrases
    common: _Common


class Signs:
    """The lists of one language, ready for use."""

    def __init__(self, file: _File) -> None:
        self.shows = {strategy: Phrases(each) for strategy, each in file.shows.items()}
        self.set_first_person = Phrases(file.set_phrases.first_person)
        self._common = frozenset(file.common.words.split())

    def content(self, text: str) -> frozenset[str]:
        """Return the words that tell what a text is about, without their endings."""
        return frozenset(
            cut
            for word in words_of(text)
            if len(word) > 2 and not {word, cut := stem(word)} & self._common
        )


@cache
def signs(language: str) -> Signs:
    """The shipped lists of one of `LANGUAGES`.

    Raises:
        ConfigError: The file is missing or wrong.
    """
    return Signs(load_toml(VOCABULARIES / f"strategy_signs.{language}.toml", _File))
