"""Check whether a rewritten text keeps its meaning and shows no LLM artifacts.

The paper's "final filtering step discards rewritten samples with semantic inconsistencies or
detectable LLM artifacts" without further detail. Here each utterance is compared with its original:

- **numbers** are equal, as a multiset;
- **negations**: equally many for the rule rewriter, which promises that; for a generator, some if
  there were some and none if there were none ("not happy" may become "unhappy" only if another
  negation remains);
- **questions**: likewise for question marks;
- **meaning**: the cosine of TF-IDF vectors over character n-grams is above a floor, for utterances
  that are long enough;
- **length** is within a ratio;
- **strategy**: the reply still has the words that show its strategy, if it had them;
- **artifacts**: no new phrases of ``artefacts.toml``, markup, lists or wrapping quotes.

Rules miss what rules miss. With a generator, `rewriting` asks it as well (prompt
``drift.<language>.md``).
"""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compeer_core.prompts import LANGUAGES
from compeer_core.taxonomy import Strategy
from training.cer.personality.wording import negations, numbers, questions, words

_ARTEFACTS_FILE = Path(__file__).with_name("artefacts.toml")
_FITTED_UTTERANCES = 20_000


class Reason(StrEnum):
    """Why a rewritten row is dropped."""

    NOT_REWRITTEN = "no usable rewriting"
    NOBODY_ELSE = "no other persona available"
    NUMBERS = "numbers changed"
    NEGATION = "negations changed"
    QUESTION = "questions changed"
    MEANING = "meaning changed"
    LENGTH = "length changed"
    STRATEGY = "strategy changed"
    ARTIFACT = "LLM artifact"
    NOT_CHECKED = "no usable verdict on the rewriting"


SIMILARITY_FLOOR = 0.2
"""Least cosine between an utterance and its rewriting."""
COMPARED_FROM = 8
"""Shorter utterances, in words (Chinese: characters), are not compared by cosine."""
SHORTEST_RATIO, LONGEST_RATIO = 0.5, 2.0
"""Bounds of the length in characters, in addition to `LENGTH_SLACK`."""
LENGTH_SLACK = 25
"""Characters that every utterance may gain or lose."""


class TfidfSimilarity:
    """The cosine of TF-IDF vectors over character 2- to 4-grams within words."""

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
class Rewriting:
    """One utterance before and after.

    Attributes:
        strategies: The known strategies of a reply.
    """

    before: str
    after: str
    strategies: tuple[Strategy, ...] = ()
    language: str = "en"


def drifted(
    pairs: Iterable[Rewriting],
    similarity: TfidfSimilarity,
    *,
    is_exact: bool,
) -> Reason | None:
    """Return the first reason to drop a row, or None. Unchanged utterances are skipped.

    If `is_exact`, the numbers of negations and question marks must stay equal.
    """
    changed = [pair for pair in pairs if pair.before != pair.after]
    for pair in changed:
        if reason := _broken(pair, is_exact):
            return reason
    long = [pair for pair in changed if len(words(pair.before, pair.language)) >= COMPARED_FROM]
    if not long:
        return None
    cosines = similarity.between([pair.before for pair in long], [pair.after for pair in long])
    return Reason.MEANING if bool((cosines < SIMILARITY_FLOOR).any()) else None


def _broken(pair: Rewriting, is_exact: bool) -> Reason | None:
    before, after, language = pair.before, pair.after, pair.language
    if not after.strip():
        return Reason.NOT_REWRITTEN
    if numbers(before, language) != numbers(after, language):
        return Reason.NUMBERS
    if not _preserved(negations(before, language), negations(after, language), is_exact):
        return Reason.NEGATION
    if not _preserved(questions(before), questions(after), is_exact):
        return Reason.QUESTION
    shortest = SHORTEST_RATIO * len(before) - LENGTH_SLACK
    if not shortest <= len(after) <= LONGEST_RATIO * len(before) + LENGTH_SLACK:
        return Reason.LENGTH
    if not keeps_strategy(before, after, pair.strategies, language):
        return Reason.STRATEGY
    return Reason.ARTIFACT if llm_artifact(before, after, language) else None


def _preserved(before: int, after: int, is_exact: bool) -> bool:
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
    """Return whether a reply still shows the words of its strategies, if it did before.

    Affirmation, information and others have no typical words here.

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


# --- LLM artifacts ----------------------------------------------------------------------------

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


def llm_artifact(before: str, after: str, language: str = "en") -> str | None:
    """Return the first sign of a language model that is new in a rewriting, or None.

    Example:
        >>> llm_artifact("I am sad.", "Sure, here is the rewritten utterance: I feel low.")
        'Sure, here'
    """
    language = language if language in LANGUAGES else "en"
    for pattern in (*_phrases(language), *_MARK_UP):
        match = pattern.search(after)
        if match and not pattern.search(before):
            return match[0]
    if _WRAPPED.fullmatch(after) and not _WRAPPED.fullmatch(before):
        return after[:1]
    return None
