"""The closed vocabularies of a supporter turn, each with its source.

Stages and strategies are those of ESConv (Liu et al. 2021, "Towards Emotional Support Dialog
Systems"), after Hill's helping skills. Emotions are the union of ESConv's and MESC's labels (Chu
et al. 2024). The COMPEER paper says "eight" strategies but does not print the list: the vocabulary
is therefore a file, and ESConv's eight are the default.

Labels are English whatever the language of the conversation, and are shown translated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import Field

from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import ConfigError

VOCABULARIES = Path(__file__).parent / "vocabularies"


class Stage(StrEnum):
    """The stage of a supportive conversation (ESConv, section 3), usually in this order."""

    EXPLORATION = "Exploration"
    """Exploring the problem."""
    COMFORTING = "Comforting"
    """Showing understanding and easing distress."""
    ACTION = "Action"
    """Helping to act on the problem."""


class Sentiment(StrEnum):
    """The polarity of the seeker's state."""

    POSITIVE = "Positive"
    NEUTRAL = "Neutral"
    NEGATIVE = "Negative"


class Emotion(StrEnum):
    """The seeker's main emotion: ESConv's eleven, then two that only MESC has."""

    ANXIETY = "Anxiety"
    DEPRESSION = "Depression"
    SADNESS = "Sadness"
    ANGER = "Anger"
    FEAR = "Fear"
    SHAME = "Shame"
    DISGUST = "Disgust"
    NERVOUSNESS = "Nervousness"
    PAIN = "Pain"
    GUILT = "Guilt"
    JEALOUSY = "Jealousy"
    JOY = "Joy"
    NEUTRAL = "Neutral"


class Strategy(StrEnum):
    """ESConv's eight support strategies; their definitions are in `ESCONV_STRATEGIES`."""

    QUESTION = "Question"
    RESTATEMENT = "Restatement or Paraphrasing"
    REFLECTION = "Reflection of Feelings"
    SELF_DISCLOSURE = "Self-disclosure"
    AFFIRMATION = "Affirmation and Reassurance"
    SUGGESTIONS = "Providing Suggestions"
    INFORMATION = "Information"
    OTHERS = "Others"


class Preference(StrEnum):
    """Which of two replies is better: the paper's four answers, for people and judges alike."""

    FIRST = "first"
    """The first reply is better."""
    SECOND = "second"
    """The second reply is better."""
    BOTH = "both"
    """Both are good and about equal."""
    NEITHER = "neither"
    """Neither is acceptable."""

    def swapped(self) -> "Preference":
        """Return the same answer for the two replies in the other order."""
        return _SWAPPED.get(self, self)


_SWAPPED: Mapping[Preference, Preference] = MappingProxyType(
    {Preference.FIRST: Preference.SECOND, Preference.SECOND: Preference.FIRST}
)

SENTIMENT_OF: Mapping[Emotion, Sentiment] = MappingProxyType(
    dict.fromkeys(Emotion, Sentiment.NEGATIVE)
    | {Emotion.JOY: Sentiment.POSITIVE, Emotion.NEUTRAL: Sentiment.NEUTRAL}
)
"""The polarity of each emotion, for corpora that label only the emotion."""

INTENSITIES = range(1, 6)
"""Intensity of an emotion: 1 (barely felt) to 5 (overwhelming), ESConv's scale."""

Label = TypeVar("Label", bound=str)


def read_label(vocabulary: Iterable[Label], text: str) -> Label | None:
    """Return the member that a text names, or None.

    Case, white space and final punctuation are ignored. Anything else must match: a near miss is an
    unreadable label.

    Example:
        >>> read_label(Strategy, " reflection  of feelings. ")
        <Strategy.REFLECTION: 'Reflection of Feelings'>
        >>> read_label(Stage, "Explore") is None
        True
    """
    wanted = _folded(text)
    return next((member for member in vocabulary if _folded(member) == wanted), None)


def _folded(text: str) -> str:
    return " ".join(text.split()).rstrip(" .,;:!?。，；：！？").casefold()


@dataclass(frozen=True)
class StrategyEntry:
    """One support strategy: its label, its meaning in English and Chinese, its usual stages.

    Empty ``stages`` means any stage.
    """

    name: str
    definition_en: str
    definition_zh: str
    stages: tuple[Stage, ...] = ()

    def definition(self, language: str) -> str:
        """Return the meaning in Chinese for ``zh``, in English for any other language."""
        return self.definition_zh if language == "zh" else self.definition_en


@dataclass(frozen=True)
class StrategyVocabulary:
    """The strategies that a policy may choose from, in order."""

    entries: tuple[StrategyEntry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The labels."""
        return tuple(entry.name for entry in self.entries)

    def read(self, text: str) -> str | None:
        """Return the name in a text, as `read_label` does, or None."""
        return read_label(self.names, text)

    def entry(self, name: str) -> StrategyEntry:
        """Return the strategy of that name.

        Raises:
            KeyError: The vocabulary has no such name.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)


class _StrategyRow(FrozenModel):
    name: str = Field(min_length=1)
    en: str = Field(min_length=1)
    zh: str = Field(min_length=1)
    stages: tuple[Stage, ...] = ()


class _StrategyFile(FrozenModel):
    source: str
    strategies: tuple[_StrategyRow, ...] = Field(min_length=1)


def load_strategies(path: Path) -> StrategyVocabulary:
    """Read a strategy vocabulary (see ``vocabularies/strategies.esconv.toml`` for the layout).

    Raises:
        ConfigError: The file is invalid, a name is repeated, or a name could not be parsed from a
            label line (it must be one plain line).
    """
    rows = load_toml(path, _StrategyFile).strategies
    folded = [_folded(row.name) for row in rows]
    for row, key in zip(rows, folded, strict=True):
        if folded.count(key) > 1:
            raise ConfigError(f"{path}: strategy {row.name!r} is listed twice")
        if not key or row.name != " ".join(row.name.split()) or set("<>") & set(row.name):
            raise ConfigError(f"{path}: {row.name!r} cannot be a label: one plain line is needed")
    return StrategyVocabulary(
        tuple(StrategyEntry(row.name, row.en, row.zh, row.stages) for row in rows)
    )


ESCONV_STRATEGIES = load_strategies(VOCABULARIES / "strategies.esconv.toml")
"""ESConv's eight strategies, with short definitions from its annotation guideline."""


class _CorpusLabels(FrozenModel):
    emotions: Mapping[str, Emotion] = {}
    strategies: Mapping[str, Strategy] = {}


class _CorpusFile(FrozenModel):
    corpora: Mapping[str, _CorpusLabels]


@cache
def _corpora() -> Mapping[str, _CorpusLabels]:
    return load_toml(VOCABULARIES / "corpus_labels.toml", _CorpusFile).corpora


def map_emotion(corpus: str, label: str) -> Emotion | None:
    """Return the emotion for a label of a corpus.

    Args:
        corpus: ``esconv``, ``mesc``, ``meld``, ``emorynlp``, ``dailydialog`` or ``escot``.
        label: The label in the corpus's spelling; compared as in `read_label`.

    Returns:
        The emotion, or None if `Emotion` has no equivalent (``surprise``) or the label does not
        belong to the corpus.

    Raises:
        ConfigError: The corpus is not in the table.
    """
    labels = _labels_of(corpus).emotions
    spelling = read_label(labels, label)
    return None if spelling is None else labels[spelling]


def map_strategy(corpus: str, label: str) -> Strategy | None:
    """Return the ESConv strategy for a label of a corpus.

    Arguments, result and errors as in `map_emotion`. ESConv's table includes the spellings of its
    failed dialogues and of MultiESC.
    """
    labels = _labels_of(corpus).strategies
    spelling = read_label(labels, label)
    return None if spelling is None else labels[spelling]


def _labels_of(corpus: str) -> _CorpusLabels:
    corpora = _corpora()
    if corpus not in corpora:
        raise ConfigError(f"unknown corpus {corpus!r}; known: {', '.join(corpora)}")
    return corpora[corpus]
