"""Rows of a CER data set (COMPEER, "Construction of the CER Dataset"), in one form for all who write them.

A `Case` is a history and what people labelled about it. A `CerRecord` is a case with one or two
supporter turns as an answer to it, the verdicts on their reasoning steps, and which reply is the
better one. The pipeline writes such rows, the votes and annotations of the page are exported as
such rows, and the training stages read them as they are: one JSON object per line.

Every verdict names who or what decided it (`DecidedBy`): a rule, a person, or people who agreed.
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
"""Made by source dialogue. Only `train` is ever trained on; `valid` chooses, `test` reports."""

StepLabels = tuple[bool | None, bool | None, bool | None]
"""Whether the history, the emotion and the strategy step are right; None where nobody said."""


class CaseUtterance(FrozenModel):
    """One turn of a history; neighbouring utterances of one speaker are joined by a line break."""

    speaker: Speaker
    text: str
    images: tuple[str, ...] = ()
    """Names of pictures: `faces/<file>` in the packed folder of faces, else a path below the folder
    of corpora."""


class HumanLabels(FrozenModel):
    """What people said about the turn that follows a history. None or empty: nobody did."""

    strategies: tuple[Strategy, ...] = ()
    """Of the supporter's turn, in order, without repetition; a turn of several utterances may have
    several. The first is that of its longest utterance."""
    emotion: Emotion | None = None
    """The seeker's: of the last utterance where the corpus labels utterances, else of the dialogue."""
    emotion_of: Literal["utterance", "dialogue"] | None = None
    problem: str | None = None
    intensity_before: int | None = Field(default=None, ge=1, le=5)
    intensity_after: int | None = Field(default=None, ge=1, le=5)
    feedback: int | None = Field(default=None, ge=1, le=5)
    """The seeker's first rating of the support after the turn: 1 (very bad) to 5 (very good)."""


class Case(FrozenModel):
    """A history that ends with the seeker, and what the supporter of the corpus answered."""

    id: str
    """`<dialogue id>#<round>`."""
    dialogue_id: str
    source_id: str
    """The dialogue that it comes from originally; splits are made by it, so that they never leak."""
    corpus: str
    language: str
    """ISO 639-1."""
    split: Split
    licence: str
    round: int = Field(ge=0)
    """Which of the dialogue's rounds this is, from 0. A round is a supporter's turn after a
    seeker's."""
    rounds: int = Field(ge=1)
    """How many rounds the dialogue has."""
    history: tuple[CaseUtterance, ...] = Field(min_length=1)
    original: str | None
    """What the supporter of the corpus said next; None where the history has no answer."""
    labels: HumanLabels = HumanLabels()

    @model_validator(mode="after")
    def _ends_with_the_seeker(self) -> Self:
        if self.history[-1].speaker is not Speaker.SEEKER:
            raise ValueError(f"case {self.id}: its history does not end with the seeker")
        return self

    def dialogue(self, pictures: "Sequence[Sequence[Image]] | None" = None) -> Dialogue:
        """Return the history as a dialogue.

        Args:
            pictures: The opened pictures of each utterance, in order; None leaves pictures out.

        Raises:
            ValueError: There are not as many entries as utterances.
        """
        images = [()] * len(self.history) if pictures is None else pictures
        return Dialogue(
            tuple(
                Utterance(said.speaker, said.text, tuple(shown))
                for said, shown in zip(self.history, images, strict=True)
            ),
            id=self.dialogue_id,
        )


class DecidedBy(FrozenModel):
    """Who or what gave a label."""

    kind: Literal["rule", "model", "person", "people"]
    """`person`: one human judgement; `people`: at least two that agree."""
    name: str
    """The rule and its version, the model, the corpus whose raters they were, or pseudonyms."""


class Candidate(FrozenModel):
    """One supporter turn that answers a case."""

    author: str
    """`corpus` for the supporter of the corpus, else the name of what wrote it."""
    reply: str
    turn: str | None = None
    """The whole turn in the output grammar (`compeer_core.reasoning`), if it has reasoning."""
    steps: StepLabels | None = None
    steps_by: DecidedBy | None = None
    reason: str = ""
    """For steps decided by a rule: what it found, in words fit for a reader."""

    @model_validator(mode="after")
    def _has_what_is_judged(self) -> Self:
        if self.steps is not None and self.turn is None:
            raise ValueError(f"{len(STEPS)} steps are judged of a turn that has none")
        if (self.steps is None) != (self.steps_by is None):
            raise ValueError("step labels and who decided them belong together")
        return self


class Variant(StrEnum):
    """How a row came to its words (COMPEER, Table 1: UnifiReward-D, -R and -P)."""

    ORIGINAL = "original"
    DUPLICATE = "duplicate"
    """A row again, word by word (-D)."""
    REWRITE = "rewrite"
    """Rewritten without a persona (-R)."""
    PERSONA = "persona"
    """Rewritten in the manner of another speaker of the same cluster (-P)."""


class CerRecord(FrozenModel):
    """A case, its answers in the order in which they are shown, and the verdicts."""

    id: str
    case: Case
    first: Candidate
    second: Candidate | None = None
    """None where only reasoning steps were judged."""
    preference: Preference | None = None
    preference_by: DecidedBy | None = None
    variant: Variant = Variant.ORIGINAL
    persona: str | None = None
    """The id of the persona in whose manner the row was rewritten."""
    rewritten_from: str | None = None
    """The id of the row that this one repeats or rewrites."""

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
