"""Build `SourceDialogue`s from the raw values of records, in the same way for all corpora."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from compeer_core.dialogue import Speaker
from compeer_core.taxonomy import Emotion, Strategy, map_emotion, map_strategy
from training.cer.records import Dropped, Reason, SourceDialogue, SourceUtterance

# The mapping compares a label with every known spelling, which is too slow for each utterance.
_emotion = lru_cache(maxsize=1024)(map_emotion)
_strategy = lru_cache(maxsize=1024)(map_strategy)


@dataclass(frozen=True)
class RawUtterance:
    """An utterance as in the corpus."""

    speaker: Speaker
    text: str
    strategy: str = ""
    emotion: str = ""
    feedback: int | None = None
    caption: str | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Builder:
    """The common values of the records of one file."""

    corpus: str
    language: str
    licence: str
    path: Path
    dropped: Dropped
    split: str | None
    vocabulary: str = ""
    """The corpus's name in the label mapping; empty if it has no labels there."""

    def dialogue(
        self,
        where: int | str,
        *,
        id: str,
        source_id: str,
        utterances: Iterable[RawUtterance],
        emotion: str = "",
        problem: str = "",
        situation: str = "",
        before: int | None = None,
        after: int | None = None,
        survey: Mapping[str, int] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SourceDialogue | None:
        """Return the dialogue, or None if no utterance has text."""
        converted = tuple(
            utterance
            for raw in utterances
            if (utterance := self._utterance(where, raw)) is not None
        )
        if not converted:
            self.dropped.add(Reason.NO_UTTERANCES, self.path, where)
            return None
        known = self._emotion(where, emotion)
        all_labels = dict(labels or {})
        if emotion and known is None:
            all_labels["emotion"] = emotion
        return SourceDialogue(
            id=id,
            source_id=f"{self.corpus}/{source_id}",
            corpus=self.corpus,
            language=self.language,
            split=self.split,
            licence=self.licence,
            utterances=converted,
            problem=problem or None,
            emotion=known,
            situation=situation or None,
            intensity_before=before,
            intensity_after=after,
            survey=survey or {},
            labels=all_labels,
        )

    def _utterance(self, where: int | str, raw: RawUtterance) -> SourceUtterance | None:
        text = raw.text.strip()
        if not text:
            self.dropped.add(Reason.EMPTY_UTTERANCE, self.path, where)
            return None
        strategy = self._strategy(where, raw.strategy)
        emotion = self._emotion(where, raw.emotion)
        labels = dict(raw.labels or {})
        if raw.strategy and strategy is None:
            labels["strategy"] = raw.strategy
        if raw.emotion and emotion is None:
            labels["emotion"] = raw.emotion
        return SourceUtterance(
            speaker=raw.speaker,
            text=text,
            strategy=strategy,
            emotion=emotion,
            feedback=raw.feedback,
            caption=raw.caption,
            labels=labels,
        )

    def _strategy(self, where: int | str, label: str) -> Strategy | None:
        if not label:
            return None
        strategy = _strategy(self.vocabulary, label)
        if strategy is None:
            self.dropped.add(Reason.UNKNOWN_STRATEGY, self.path, where, label)
        return strategy

    def _emotion(self, where: int | str, label: str) -> Emotion | None:
        if not label:
            return None
        emotion = _emotion(self.vocabulary, label)
        if emotion is None:
            self.dropped.add(Reason.UNKNOWN_EMOTION, self.path, where, label)
        return emotion


def rating(value: object) -> int | None:
    """Return a rating of 1 to 5, given as a number or a string; None if it is missing.

    Raises:
        ValueError: It is something else.
    """
    if value is None or value == "":
        return None
    number = int(str(value))
    if not 1 <= number <= 5:
        raise ValueError(f"{number} is not on the scale of 1 to 5")
    return number
