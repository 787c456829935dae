"""Do the parts of a turn agree? Checks by rules, and by the judge's verdicts.

**Strategy and reply.** A turn may name Reflection of Feelings and then give advice. `carries_out` looks
for the named strategy's signs in the reply, without a model; they can be verified by hand
(``vocabularies/strategy_signs.en.toml``):

- Question: a question mark.
- Restatement or Paraphrasing: "you", and at least one content word of the seeker's last two turns.
- Self-disclosure: I, my or me outside set phrases ("I am sorry").
- Information: a phrase of its list, in statements of at least six words.
- All others: a phrase of their list.

The lists are English. No available Chinese corpus has human strategy labels, so Chinese lists could be
written but not measured; for other languages, and for strategies of other vocabularies, the answer is
`Followed.UNKNOWN`.

Accuracy on turns of ESConv's train split with one human strategy label: how often the signs of that
strategy are present (recall), and how often those of a strategy that people did not give to the turn
(false alarms); 95 % CI over dialogues in brackets. People gave one label to sentences that may do two
things, so not every false alarm is an error.

| strategy                    |    n | recall                | n of others | false alarms          |
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

`CLEAR_SIGNS` are the strategies for which the two differ by at least 40 points. For the others the
answer is a weak hint: good for comparing judges on many turns, too weak to call one reply wrong. The
measurement is `training.evaluation.strategy_signs`; reproduce:
``python -m training evaluate consistency CONFIG --set esconv=runs/small/rules/rows.jsonl``.

**Contradictions.** `contradictions` reports two kinds, each with its reason, since both can be wrong:

*By signs*, for `CLEAR_SIGNS` only: Question without a question mark, Self-disclosure without a word
about oneself, and Providing Suggestions that asks instead. On the same turns, how often this is reported
for the human label (false alarm) and for a random other strategy (a contradiction made on purpose):

| strategy              |    n | false alarms | recall |
|-----------------------|-----:|-------------:|-------:|
| Question              | 1666 |        7.0 % | 76.8 % |
| Self-disclosure       |  749 |       11.2 % | 74.7 % |
| Providing Suggestions | 1399 |        5.6 % | 24.4 % |

For the five other strategies no such rule separates the two. For example, advice in a turn that names
Affirmation and Reassurance is as frequent where people gave that label (9.1 %) as elsewhere (9.4 %).

*By the judge*, if it compared the reply with another one: all steps are right and the reply is
rejected, or no step is right and the reply is accepted.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Protocol

from compeer_core.config import FrozenModel, load_toml
from compeer_core.dialogue import Speaker, language_of
from compeer_core.judgement import Judgement, ResponseVerdict, StepVerdict
from compeer_core.phrases import Phrases, stem, words_of
from compeer_core.reasoning import Reading, Unreadable
from compeer_core.taxonomy import VOCABULARIES, Strategy

LANGUAGES = ("en",)
"""The languages that have lists."""

CLEAR_SIGNS = frozenset({Strategy.QUESTION, Strategy.SELF_DISCLOSURE, Strategy.SUGGESTIONS})
"""Strategies whose signs are rare in replies with another strategy; see the module docstring."""

_FIRST_PERSON = re.compile(r"\b(?:i|i'm|i've|i'd|my|me|mine|myself)\b")
_SECOND_PERSON = frozenset({"you", "your", "you're", "you've", "yourself"})
_STATEMENT = re.compile(r"[^.!?\n]+[.!?]*")


class Followed(StrEnum):
    """Whether a reply carries out a strategy."""

    YES = "carries it out"
    NO = "does not carry it out"
    UNKNOWN = "cannot tell"


class Said(Protocol):
    """An utterance: of a `Dialogue`, or of a `compeer_core.cer.Case`."""

    @property
    def speaker(self) -> Speaker: ...

    @property
    def text(self) -> str: ...


def carries_out(
    history: Iterable[Said], reply: str, strategy: str | Unreadable, language: str | None = None
) -> Followed:
    """Return whether a reply shows the signs of a strategy.

    Args:
        history: The earlier utterances, with consecutive ones of a speaker joined (`Dialogue.merged`).
        reply: Its text.
        strategy: The strategy that the turn names.
        language: ISO 639-1; None detects it from the reply.

    Example:
        >>> carries_out([], "What happened then?", "Question").value
        'carries it out'
        >>> carries_out([], "Maybe talk to your boss.", "Reflection of Feelings").value
        'does not carry it out'
        >>> carries_out([], "后来怎么样了？", "Question").value
        'cannot tell'
    """
    language = language or language_of(reply)
    if isinstance(strategy, Unreadable) or strategy not in _NAMES or language not in LANGUAGES:
        return Followed.UNKNOWN
    shown = _shows(history, reply, Strategy(strategy), signs(language))
    return Followed.YES if shown else Followed.NO


_NAMES = frozenset(strategy.value for strategy in Strategy)


def _shows(history: Iterable[Said], reply: str, strategy: Strategy, lists: "Signs") -> bool:
    match strategy:
        case Strategy.QUESTION:
            return "?" in reply
        case Strategy.RESTATEMENT:
            seeker = [each.text for each in history if each.speaker is Speaker.SEEKER]
            recent_words = lists.content("\n".join(seeker[-2:]))
            addresses_seeker = bool(_SECOND_PERSON & set(words_of(reply)))
            return addresses_seeker and bool(lists.content(reply) & recent_words)
        case Strategy.SELF_DISCLOSURE:
            return bool(_FIRST_PERSON.search(lists.set_first_person.without(reply)))
        case Strategy.INFORMATION:
            statements = " ".join(s for s in _STATEMENT.findall(reply) if "?" not in s)
            return (
                len(words_of(statements)) >= 6 and statements in lists.shows[Strategy.INFORMATION]
            )
        case other:
            return reply in lists.shows[other]


# --- contradictions ----------------------------------------------------------------------------


class Reason(StrEnum):
    """What kind of contradiction."""

    NO_SIGN = "no_sign"
    """The reply shows no sign of the strategy that the turn names."""
    ASKS_INSTEAD = "asks_instead"
    """The turn names Providing Suggestions; the reply neither suggests nor informs, but asks."""
    GOOD_STEPS_BAD_REPLY = "good_steps_bad_reply"
    """The judge accepts all steps and prefers the other reply."""
    BAD_STEPS_GOOD_REPLY = "bad_steps_good_reply"
    """The judge rejects all steps and finds the reply at least as good as the other one."""


@dataclass(frozen=True)
class Contradiction:
    """One contradiction between reasoning and reply."""

    reason: Reason
    named: Strategy | None = None
    """The strategy that the turn names, if the reason concerns it."""


def contradictions(
    history: Iterable[Said],
    reading: Reading,
    judgement: Judgement | None = None,
    language: str | None = None,
) -> tuple[Contradiction, ...]:
    r"""Return the contradictions of a turn; none if they cannot be determined.

    Args:
        history: The earlier utterances, with consecutive ones of a speaker joined (`Dialogue.merged`).
        reading: The turn.
        judgement: The judge's verdicts on it, if any.
        language: Of the reply, ISO 639-1; None detects it.

    Example:
        >>> from compeer_core.reasoning import read
        >>> turn = read("<strategy>Ask.\nStrategy: Question</strategy><reply>I see.</reply>")
        >>> [str(each.reason) for each in contradictions([], turn, language="en")]
        ['no_sign']
    """
    by_signs = _by_signs(list(history), reading, language)
    by_judge = None if judgement is None else _by_judge(judgement)
    return tuple(each for each in (by_signs, by_judge) if each is not None)


def _by_signs(history: list[Said], reading: Reading, language: str | None) -> Contradiction | None:
    if reading.strategy is None or isinstance(reading.strategy.strategy, Unreadable):
        return None
    reply, name = reading.reply, reading.strategy.strategy
    if not reply or name not in CLEAR_SIGNS:
        return None

    def follows(strategy: Strategy) -> Followed:
        return carries_out(history, reply, strategy, language)

    named = Strategy(name)
    if follows(named) is not Followed.NO:
        return None
    if named is not Strategy.SUGGESTIONS:
        return Contradiction(Reason.NO_SIGN, named)
    asks = follows(Strategy.QUESTION) is Followed.YES
    informs = follows(Strategy.INFORMATION) is Followed.YES
    return Contradiction(Reason.ASKS_INSTEAD, named) if asks and not informs else None


def _by_judge(judgement: Judgement) -> Contradiction | None:
    steps, response = judgement.steps, judgement.response
    if not steps or not isinstance(response, ResponseVerdict):
        return None
    right = [isinstance(step, StepVerdict) and step.correct for step in steps]
    wrong = [isinstance(step, StepVerdict) and not step.correct for step in steps]
    if all(right) and not response.at_least_as_good:
        return Contradiction(Reason.GOOD_STEPS_BAD_REPLY)
    if all(wrong) and response.at_least_as_good:
        return Contradiction(Reason.BAD_STEPS_GOOD_REPLY)
    return None


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
    """The compiled lists of one language."""

    def __init__(self, file: _File) -> None:
        self.shows = {strategy: Phrases(each) for strategy, each in file.shows.items()}
        self.set_first_person = Phrases(file.set_phrases.first_person)
        self._common = frozenset(file.common.words.split())

    def content(self, text: str) -> frozenset[str]:
        """Return the content words of a text, stemmed."""
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
