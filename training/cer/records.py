"""What a corpus says, in one form: dialogues with the labels that people gave them.

Every loader of `training.cer.corpora` yields `SourceDialogue` and counts in a `Dropped` what it
leaves out. Nothing is merged, translated or cleaned here beyond white space: later steps decide.
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
    """One utterance as the corpus has it: runs of one speaker are not joined."""

    speaker: Speaker
    text: str = Field(min_length=1)
    strategy: Strategy | None = None
    emotion: Emotion | None = None
    feedback: int | None = Field(default=None, ge=1, le=5)
    """The seeker's rating of the support so far: 1 (very bad) to 5 (very good)."""
    caption: str | None = None
    """What a video model wrote about the picture that went with the utterance."""
    images: tuple[str, ...] = ()
    """Pictures shown with the utterance: paths below the folder of corpora."""
    labels: Mapping[str, str] = {}
    """Labels that have no counterpart here, as the corpus spells them, by their name there."""


class SourceDialogue(FrozenModel):
    """One dialogue of a corpus, or one question with one of its answers."""

    id: str
    """Unique within a corpus and a split."""
    source_id: str
    """The dialogue that it comes from originally. Splits are made by it: all layouts, windows and
    answers of one dialogue share it."""
    corpus: str
    language: str
    """ISO 639-1."""
    split: str | None
    """The corpus's own split, where it has one."""
    licence: str
    """As the corpus states it, or what is known where it states none."""
    utterances: tuple[SourceUtterance, ...] = Field(min_length=1)
    problem: str | None = None
    emotion: Emotion | None = None
    """The seeker's, over the whole dialogue."""
    situation: str | None = None
    """What happened, in the seeker's words before the talk."""
    intensity_before: int | None = Field(default=None, ge=1, le=5)
    """How strong the emotion was before the talk, by the seeker's own rating."""
    intensity_after: int | None = Field(default=None, ge=1, le=5)
    survey: Mapping[str, int] = {}
    """Other ratings given after the talk, as `<who>_<what>`: 1 to 5 (three of ESConv's are 0)."""
    labels: Mapping[str, str] = {}
    """Other labels of the whole dialogue, as the corpus spells them: tiers, votes, levels."""


class Reason(StrEnum):
    """Why something of a corpus is left out."""

    NOT_JSON = "not JSON"
    """The rest of a JSON array is lost with it, because its end cannot be known."""
    ANOTHER_LAYOUT = "another layout than the corpus has"
    NO_UTTERANCES = "no utterance with a text"
    EMPTY_UTTERANCE = "an utterance without text"
    UNKNOWN_STRATEGY = "a strategy without a counterpart (the utterance is kept, with its label)"
    UNKNOWN_EMOTION = "an emotion without a counterpart (what it labels is kept, with the label)"
    NO_PARTNER = "nobody answers"
    REPEATED = "the same record again"


@dataclass
class Dropped:
    """Counts, by reason, what a loader leaves out, and logs where.

    Example:
        >>> dropped = Dropped()
        >>> dropped.add(Reason.NOT_JSON, Path("train.jsonl"), 7)
        >>> dict(dropped.reasons)
        {<Reason.NOT_JSON: 'not JSON'>: 1}
    """

    reasons: Counter[Reason] = field(default_factory=Counter)

    def add(self, reason: Reason, path: Path, where: object, detail: str = "") -> None:
        """Count one case. `where` is a line, a record number or the name of a packed file.

        Texts are not logged: they are private talk.
        """
        self.reasons[reason] += 1
        logger.debug("%s, %s: %s%s", path, where, reason, f" ({detail})" if detail else "")


class DroppedDialogue(FrozenModel):
    """A dialogue that a step has left out, by name and without its text."""

    id: str
    corpus: str
    layer: str
    """What left it out: a group of rules, or a model."""
    reason: str
    detail: str = ""
    """What it was found by, for a reader: a number, or the name of what it repeats."""


class StepReport(FrozenModel):
    """What a step of the pipeline read, wrote and left out, and why."""

    step: str
    read: int
    written: int
    dropped: Mapping[str, Mapping[str, int]] = {}
    """By corpus, then by reason."""
    figures: Mapping[str, float | int | str | None] = {}
    """What else is worth knowing, by name."""

    @property
    def dropped_count(self) -> int:
        return sum(count for reasons in self.dropped.values() for count in reasons.values())
