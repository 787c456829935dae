"""Whether a rewritten text still says the same, and whether a machine gives itself away in it.

The paper's "final filtering step discards rewritten samples with semantic inconsistencies or
detectable LLM artifacts" without saying how. Here each utterance is compared with what it was:

- **numbers** are the same, as a multiset;
- **negations**: as many as before for the rule rewriter, which promises that; for a generator, some
  where there were some and none where there were none ("not happy" may become "unhappy" only if
  another denial is left);
- **questions**: likewise for question marks;
- **meaning**: the cosine of TF-IDF vectors over pieces of words is above a floor, for utterances
  long enough that it says something. A sentence encoder can take its place;
- **length** lies within a ratio;
- **strategy**: the reply still has the words by which its strategy shows, where it had them;
- **artefacts**: phrases of ``artefacts.toml``, mark-up, lists and wrapping quotes that were not
  there before.

These are rules and miss what rules miss. With a generator at hand `rewriting` asks it as well
(prompt ``drift.<language>.md``).
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.prompts import LANGUAGES
from compeer_core.taxonomy import Strategy
from training.cer.personality.clusters import Encoder
from training.cer.personality.wording import negations, numbers, questions, words

_ARTEFACTS_FILE = Path(__file__).with_name("artefacts.toml")
_FITTED_UTTERANCES = 20_000


class Reason(StrEnum):
    """Why a rewritten row is left out."""

    NOT_REWRITTEN = "no usable rewriting"
    NOBODY_ELSE = "nobody else to take a persona from"
    NUMBERS = "another number"
    NEGATION = "a negation more or less"
    QUESTION = "a question more or less"
    MEANING = "too unlike"
    LENGTH = "another length"
    STRATEGY = "another strategy"
    ARTEFACT = "reads machine-made"
    NOT_CHECKED = "no usable verdict on the rewriting"


class Settings(FrozenModel):
    """What a rewriting may differ in."""

    similarity_floor: float = Field(default=0.2, ge=0, le=1)
    """Least cosine between an utterance and its rewriting. 0.2 fits TF-IDF; for a sentence encoder
    0.5 or more is usual."""
    compared_from: int = Field(default=8, ge=1)
    """Utterances of fewer words (Chinese: characters) are not compared by cosine."""
    shortest_ratio: float = Field(default=0.5, gt=0, le=1)
    longest_ratio: float = Field(default=2.0, ge=1)
    """Bounds of the length in characters, after `length_slack`."""
    length_slack: int = Field(default=25, ge=0)
    """Characters that any utterance may gain or lose."""


class Similarity(Protocol):
    """Cosines between texts and their rewritings."""

    def between(self, before: Sequence[str], after: Sequence[str]) -> NDArray[np.float64]: ...


class TfidfSimilarity:
    """The cosine of TF-IDF vectors over runs of 2 to 4 characters within words."""

    def __init__(self, texts: Iterable[str]) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        fitted = list(islice((text for text in texts if text.strip()), _FITTED_UTTERANCES))
        self._vectorizer = TfidfVectorizer(
            analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, max_features=100_000
        )
        self._vectorizer.fit(fitted or ["nothing"])

    def between(self, before: Sequence[str], after: Sequence[str]) -> NDArray[np.float64]:
        vectors = self._vectorizer.transform([*before, *after])
        products = vectors[: len(before)].multiply(vectors[len(before) :])
        return np.asarray(products.sum(axis=1)).ravel()


@dataclass(frozen=True)
class EncoderSimilarity:
    """The cosine of a sentence encoder's vectors, which are of length 1."""

    encoder: Encoder

    def between(self, before: Sequence[str], after: Sequence[str]) -> NDArray[np.float64]:
        vectors = self.encoder.encode([*before, *after])
        cosines: NDArray[np.float64] = (vectors[: len(before)] * vectors[len(before) :]).sum(axis=1)
        return cosines


@dataclass(frozen=True)
class Rewriting:
    """One utterance before and after.

    Attributes:
        strategies: Of a reply, as far as they are known.
    """

    before: str
    after: str
    strategies: tuple[Strategy, ...] = ()
    language: str = "en"


def drifted(
    pairs: Iterable[Rewriting],
    similarity: Similarity,
    settings: Settings,
    *,
    is_exact: bool,
) -> Reason | None:
    """Return the first reason for which a row must be left out, or None.

    Args:
        pairs: The utterances of a row; those that did not change are passed over.
        similarity: See `Settings.similarity_floor`.
        settings: The bounds.
        is_exact: Whether negations and question marks must be as many as before.
    """
    changed = [pair for pair in pairs if pair.before != pair.after]
    for pair in changed:
        if reason := _broken(pair, settings, is_exact):
            return reason
    long = [
        pair for pair in changed if len(words(pair.before, pair.language)) >= settings.compared_from
    ]
    if not long:
        return None
    cosines = similarity.between([pair.before for pair in long], [pair.after for pair in long])
    return Reason.MEANING if bool((cosines < settings.similarity_floor).any()) else None


def _broken(pair: Rewriting, settings: Settings, is_exact: bool) -> Reason | None:
    before, after, language = pair.before, pair.after, pair.language
    if not after.strip():
        return Reason.NOT_REWRITTEN
    if numbers(before, language) != numbers(after, language):
        return Reason.NUMBERS
    if not _kept(negations(before, language), negations(after, language), is_exact):
        return Reason.NEGATION
    if not _kept(questions(before), questions(after), is_exact):
        return Reason.QUESTION
    slack = settings.length_slack
    shortest = settings.shortest_ratio * len(before) - slack
    if not shortest <= len(after) <= settings.longest_ratio * len(before) + slack:
        return Reason.LENGTH
    if not keeps_strategy(before, after, pair.strategies, language):
        return Reason.STRATEGY
    return Reason.ARTEFACT if artefact(before, after, language) else None


def _kept(before: int, after: int, is_exact: bool) -> bool:
    return before == after if is_exact else bool(before) == bool(after)


# --- Strategy ---------------------------------------------------------------------------------

_SUGGESTING = {
    "en": r"\b(?:try|should|could|can|might|may|must|need|have to|want to|suggest|recommend|"
    r"consider|advise|advice|how about|what about|why don['’]t|if you|would help|best to|maybe|"
    r"perhaps|let)\b",
    "zh": "可以|试|建议|应该|不妨|考虑|需要|最好|或许|也许|要不|如果",
}
_FIRST_PERSON = {"en": r"\b(?:I|my|me|mine|we|our|us)\b|\bI['’]", "zh": "我|咱"}
_SECOND_PERSON = {"en": r"\b(?:you|your|yours|yourself)\b|\byou['’]", "zh": "你|您"}
_CUES = {
    Strategy.QUESTION: {"en": r"\?", "zh": "[?？]"},
    Strategy.SELF_DISCLOSURE: _FIRST_PERSON,
    Strategy.SUGGESTIONS: _SUGGESTING,
    Strategy.REFLECTION: _SECOND_PERSON,
    Strategy.RESTATEMENT: _SECOND_PERSON,
}


def keeps_strategy(
    before: str, after: str, strategies: Iterable[Strategy], language: str = "en"
) -> bool:
    """Return whether a reply still shows the words of its strategies, where it showed them.

    Affirmation, information and others have no words of their own here.

    Example:
        >>> keeps_strategy("Try to rest.", "Rest is good.", [Strategy.SUGGESTIONS])
        False
    """
    language = language if language in LANGUAGES else "en"
    cues = (_CUES[strategy][language] for strategy in strategies if strategy in _CUES)
    return all(
        re.search(cue, after, re.IGNORECASE)
        for cue in cues
        if re.search(cue, before, re.IGNORECASE)
    )


# --- Artefacts --------------------------------------------------------------------------------

_MARK_UP = (
    re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S", re.MULTILINE),  # a list
    re.compile(r"^\s*#{1,6}\s", re.MULTILINE),  # a heading
    re.compile(r"\*\*|__|```"),
    re.compile("—.*—", re.DOTALL),
)
_WRAPPED = re.compile(r"\s*(?:\"[^\"]*\"|“[^”]*”|「[^」]*」)\s*")


@cache
def _phrases(language: str) -> tuple[re.Pattern[str], ...]:
    table = tomllib.loads(_ARTEFACTS_FILE.read_text(encoding="utf-8"))
    return tuple(re.compile(phrase, re.IGNORECASE) for phrase in table[language])


def artefact(before: str, after: str, language: str = "en") -> str | None:
    """Return what of a rewriting reads as machine-made and was not there before, or None.

    Example:
        >>> artefact("I am sad.", "Sure, here is the rewritten utterance: I feel low.")
        'Sure, here'
    """
    language = language if language in LANGUAGES else "en"
    return next(_tell_tales(before, after, language), None)


def _tell_tales(before: str, after: str, language: str) -> Iterator[str]:
    for pattern in (*_phrases(language), *_MARK_UP):
        found = pattern.search(after)
        if found and not pattern.search(before):
            yield found[0]
    if _WRAPPED.fullmatch(after) and not _WRAPPED.fullmatch(before):
        yield after[:1]
