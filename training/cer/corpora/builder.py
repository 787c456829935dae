"""From the raw values of a record to a `SourceDialogue`: one way for all corpora."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from compeer_core.dialogue import Speaker
from compeer_core.taxonomy import Emotion, Strategy, map_emotion, map_strategy
from training.cer.records import Dropped, Reason, SourceDialogue, SourceUtterance

# The table compares a label with every spelling it knows, which is too slow for each utterance.
_emotion = lru_cache(maxsize=1024)(map_emotion)
_strategy = lru_cache(maxsize=1024)(map_strategy)


@dataclass(frozen=True)
class Said:
    """An utterance as the corpus has it."""

    speaker: Speaker
    text: str
    strategy: str = ""
    emotion: str = ""
    feedback: int | None = None
    caption: str | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Builder:
    """What all records of one file share, and how they are made."""

    corpus: str
    language: str
    licence: str
    path: Path
    dropped: Dropped
    split: str | None
    vocabulary: str = ""
    """The corpus's name in the table of labels; empty where it has neither kind."""

    def dialogue(
        self,
        where: int | str,
        *,
        id: str,
        source_id: str,
        said: Iterable[Said],
        emotion: str = "",
        problem: str = "",
        situation: str = "",
        before: int | None = None,
        after: int | None = None,
        survey: Mapping[str, int] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SourceDialogue | None:
        """Return the dialogue, or None where nothing with a text is left of it."""
        utterances = tuple(
            utterance for each in said if (utterance := self._utterance(where, each)) is not None
        )
        if not utterances:
            self.dropped.add(Reason.NO_UTTERANCES, self.path, where)
            return None
        known = self._emotion(where, emotion)
        kept = dict(labels or {})
        if emotion and known is None:
            kept["emotion"] = emotion
        return SourceDialogue(
            id=id,
            source_id=f"{self.corpus}/{source_id}",
            corpus=self.corpus,
            language=self.language,
            split=self.split,
            licence=self.licence,
            utterances=utterances,
            problem=problem or None,
            emotion=known,
            situation=situation or None,
            intensity_before=before,
            intensity_after=after,
            survey=survey or {},
            labels=kept,
        )

    def _utterance(self, where: int | str, said: Said) -> SourceUtterance | None:
        text = said.text.strip()
        if not text:
            self.dropped.add(Reason.EMPTY_UTTERANCE, self.path, where)
            return None
        strategy = self._strategy(where, said.strategy)
        emotion = self._emotion(where, said.emotion)
        labels = dict(said.labels or {})
        if said.strategy and strategy is None:
            labels["strategy"] = said.strategy
        if said.emotion and emotion is None:
            labels["emotion"] = said.emotion
        return SourceUtterance(
            speaker=said.speaker,
            text=text,
            strategy=strategy,
            emotion=emotion,
            feedback=said.feedback,
            caption=said.caption,
            labels=labels,
        )

    def _strategy(self, where: int | str, label: str) -> Strategy | None:
        if not label:
            return None
        found = _strategy(self.vocabulary, label)
        if found is None:
            self.dropped.add(Reason.UNKNOWN_STRATEGY, self.path, where, label)
        return found

    def _emotion(self, where: int | str, label: str) -> Emotion | None:
        if not label:
            return None
        found = _emotion(self.vocabulary, label)
        if found is None:
            self.dropped.add(Reason.UNKNOWN_EMOTION, self.path, where, label)
        return found


def rating(value: object) -> int | None:
    """Return a rating of 1 to 5, written as a number or a string; None where it was not given.

    Raises:
        ValueError: It is something else.
    """
    if value is None or value == "":
        return None
    number = int(str(value))
    if not 1 <= number <= 5:
        raise ValueError(f"{number} is not on the scale of 1 to 5")
    return number
