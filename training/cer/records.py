"""Dialogues of all corpora in one format, with their human labels, and the report of a step.

The loaders of `training.cer.corpora` yield `SourceDialogue`s and count in a `Dropped` what they skip.
They only normalise white space: merging, translating and cleaning are left to later steps.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.taxonomy import Emotion, Strategy

logger = logging.getLogger(__name__)


class SourceUtterance(FrozenModel):
    """One utterance as in the corpus: consecutive utterances of a speaker are not joined."""

    speaker: Speaker
    text: str = Field(min_length=1)
    strategy: Strategy | None = None
    emotion: Emotion | None = None
    feedback: int | None = Field(default=None, ge=1, le=5)
    """The seeker's rating of the support so far, 1 (very bad) to 5 (very good)."""
    caption: str | None = None
    """A video model's caption of the picture of the utterance."""
    images: tuple[str, ...] = ()
    """Pictures shown with the utterance, as paths below the folder of corpora."""
    labels: Mapping[str, str] = {}
    """Labels without a field of their own, by the corpus's name and spelling."""


class SourceDialogue(FrozenModel):
    """One dialogue of a corpus, or one question with one of its answers."""

    id: str
    """Unique within a corpus and split."""
    source_id: str
    """The original dialogue, which decides the split: all layouts, windows and answers share it."""
    corpus: str
    language: str
    """ISO 639-1."""
    split: str | None
    """The corpus's own split, if any."""
    licence: str
    """As the corpus states it, or what is known about it."""
    utterances: tuple[SourceUtterance, ...] = Field(min_length=1)
    problem: str | None = None
    emotion: Emotion | None = None
    """The seeker's emotion over the whole dialogue."""
    situation: str | None = None
    """What happened, in the seeker's words before the dialogue."""
    intensity_before: int | None = Field(default=None, ge=1, le=5)
    """The seeker's rating of the emotion before the dialogue."""
    intensity_after: int | None = Field(default=None, ge=1, le=5)
    survey: Mapping[str, int] = {}
    """Other ratings after the dialogue, as `<who>_<what>`: 1 to 5 (three of ESConv's are 0)."""
    labels: Mapping[str, str] = {}
    """Other labels of the dialogue, as the corpus spells them: tiers, votes, levels."""


class Reason(StrEnum):
    """Why a part of a corpus is skipped."""

    NOT_JSON = "not JSON"
    """The rest of a JSON array is lost too, because the record's end is unknown."""
    ANOTHER_LAYOUT = "not in the corpus's layout"
    NO_UTTERANCES = "no utterance with text"
    EMPTY_UTTERANCE = "an utterance without text"
    UNKNOWN_STRATEGY = "unmapped strategy (the utterance stays, with its label)"
    UNKNOWN_EMOTION = "unmapped emotion (the labelled item stays, with its label)"
    NO_PARTNER = "no answer"
    REPEATED = "repeated record"


@dataclass
class Dropped:
    """Counts what a loader skips, by reason, and logs where.

    Example:
        >>> dropped = Dropped()
        >>> dropped.add(Reason.NOT_JSON, Path("train.jsonl"), 7)
        >>> dict(dropped.reasons)
        {<Reason.NOT_JSON: 'not JSON'>: 1}
    """

    reasons: Counter[Reason] = field(default_factory=Counter)

    def add(self, reason: Reason, path: Path, where: object, detail: str = "") -> None:
        """Count one item. `where` is a line, a record number or the name of a packed file.

        Texts are private and not logged.
        """
        self.reasons[reason] += 1
        logger.debug("%s, %s: %s%s", path, where, reason, f" ({detail})" if detail else "")


class DroppedDialogue(FrozenModel):
    """A dialogue that a step dropped, without its text."""

    id: str
    corpus: str
    layer: str
    """The group of rules, or the model, that dropped it."""
    reason: str
    detail: str = ""
    """The evidence: a number, or the name of what it repeats."""


class StepReport(FrozenModel):
    """What a step of the pipeline read, wrote and dropped, and why."""

    step: str
    read: int
    written: int
    dropped: Mapping[str, Mapping[str, int]] = {}
    """By corpus, then by reason."""
    figures: Mapping[str, float | int | str | None] = {}
    """Further figures, by name."""

    @property
    def dropped_count(self) -> int:
        return sum(count for reasons in self.dropped.values() for count in reasons.values())
