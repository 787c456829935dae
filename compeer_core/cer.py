"""Rows of a CER data set (COMPEER, "Construction of the CER Dataset").

A `Case` is a history with its human labels. A `CerRecord` is a case with one or two supporter turns
as answers, the verdicts on their reasoning steps, and the preferred reply. The pipeline writes such
rows, votes and annotations are exported as such rows, and the training stages read them unchanged: one
JSON object per line.

Every verdict names its source (`DecidedBy`): a rule, a model, a person, or people who agree.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.images import Image
from compeer_core.reasoning import STEPS
from compeer_core.taxonomy import Emotion, Preference, Strategy

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""Split by source dialogue: `train` for training, `valid` for selection, `test` for reports."""

StepLabels = tuple[bool | None, bool | None, bool | None]
"""Whether the history, emotion and strategy steps are right; None if unlabelled."""


class CaseUtterance(FrozenModel):
    """One turn of a history; consecutive utterances of a speaker are joined by a line break."""

    speaker: Speaker
    text: str
    images: tuple[str, ...] = ()
    """Image names: `faces/<file>` in the packed folder of faces, otherwise a path in the folder of
    corpora."""


class HumanLabels(FrozenModel):
    """Human labels of the turn that follows a history; None or empty if unlabelled."""

    strategies: tuple[Strategy, ...] = ()
    """Of the supporter's turn, in order, without repetition; the first is that of the longest
    utterance."""
    emotion: Emotion | None = None
    """The seeker's, of the last utterance if the corpus labels utterances, otherwise of the dialogue."""
    emotion_of: Literal["utterance", "dialogue"] | None = None
    problem: str | None = None
    intensity_before: int | None = Field(default=None, ge=1, le=5)
    intensity_after: int | None = Field(default=None, ge=1, le=5)
    feedback: int | None = Field(default=None, ge=1, le=5)
    """The seeker's first rating of the support after the turn: 1 (very bad) to 5 (very good)."""


class Case(FrozenModel):
    """A history that ends with the seeker, and the supporter's answer in the corpus."""

    id: str
    """`<dialogue id>#<round>`."""
    dialogue_id: str
    source_id: str
    """The original dialogue; splits are made by it to avoid leakage."""
    corpus: str
    language: str
    """ISO 639-1."""
    split: Split
    licence: str
    round: int = Field(ge=0)
    """Index of the dialogue's round, from 0. A round is a supporter's turn after a seeker's."""
    rounds: int = Field(ge=1)
    """Number of rounds of the dialogue."""
    history: tuple[CaseUtterance, ...] = Field(min_length=1)
    original: str | None
    """The supporter's next turn in the corpus; None if the history has no answer."""
    situation: str | None = Field(default=None, exclude_if=lambda text: text is None)
    """What happened to the seeker, in the corpus or in the writer's plan. No supporter sees it."""
    labels: HumanLabels = HumanLabels()

    @model_validator(mode="after")
    def _ends_with_the_seeker(self) -> Self:
        if self.history[-1].speaker is not Speaker.SEEKER:
            raise ValueError(f"case {self.id}: its history does not end with the seeker")
        return self

    def dialogue(self, pictures: "Sequence[Sequence[Image]] | None" = None) -> Dialogue:
        """Return the history as a dialogue.

        Args:
            pictures: The images of each utterance, in order; None leaves them out.

        Raises:
            ValueError: The numbers of entries and utterances differ.
        """
        images = [()] * len(self.history) if pictures is None else pictures
        return Dialogue(
            tuple(
                Utterance(utterance.speaker, utterance.text, tuple(shown))
                for utterance, shown in zip(self.history, images, strict=True)
            ),
            id=self.dialogue_id,
        )


class DecidedBy(FrozenModel):
    """The source of a label."""

    kind: Literal["rule", "model", "person", "people"]
    """`person`: one human judgement; `people`: at least two that agree."""
    name: str
    """The rule and its version, the model, the corpus (for its raters), or pseudonyms."""


class Candidate(FrozenModel):
    """One supporter turn that answers a case."""

    author: str
    """`corpus` for the supporter of the corpus, otherwise the model's name."""
    reply: str
    turn: str | None = None
    """The whole turn in the output grammar (`compeer_core.reasoning`), if it has reasoning."""
    steps: StepLabels | None = None
    steps_by: DecidedBy | None = None
    reason: str = ""
    """For steps decided by a rule: its finding, in readable words."""

    @model_validator(mode="after")
    def _has_what_is_judged(self) -> Self:
        if self.steps is not None and self.turn is None:
            raise ValueError(f"{len(STEPS)} step labels, but the turn has no steps")
        if (self.steps is None) != (self.steps_by is None):
            raise ValueError("step labels and who decided them belong together")
        return self


class Variant(StrEnum):
    """Origin of a row's text (COMPEER, Table 1: UnifiReward-D, -R and -P)."""

    ORIGINAL = "original"
    DUPLICATE = "duplicate"
    """A verbatim duplicate (-D)."""
    REWRITE = "rewrite"
    """Rewritten without a persona (-R)."""
    PERSONA = "persona"
    """Rewritten in the style of another speaker of the same cluster (-P)."""


class CerRecord(FrozenModel):
    """A case, its answers in order of presentation, and the verdicts."""

    id: str
    case: Case
    first: Candidate
    second: Candidate | None = None
    """None if only reasoning steps were judged."""
    preference: Preference | None = None
    preference_by: DecidedBy | None = None
    variant: Variant = Variant.ORIGINAL
    persona: str | None = None
    """The id of the persona of a rewritten row."""
    rewritten_from: str | None = None
    """The id of the row that this one duplicates or rewrites."""

    @model_validator(mode="after")
    def _preference_of_two(self) -> Self:
        if (self.preference is None) != (self.preference_by is None):
            raise ValueError("a preference and who decided it belong together")
        if self.preference is not None and self.second is None:
            raise ValueError("a preference needs two replies")
        return self

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)
