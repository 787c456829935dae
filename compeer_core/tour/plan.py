"""The tour's plan and comments: `plan.toml` and `notes.toml`."""

from pathlib import Path

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel
from compeer_core.reasoning import Part

ASSETS = Path(__file__).resolve().parents[2] / "assets"
FOLDER = ASSETS / "tour"

Name = r"^[a-z][a-z0-9_]*$"


class Words(FrozenModel):
    """One text in the languages of the page."""

    en: str = Field(min_length=1)
    zh: str = Field(min_length=1)

    def in_language(self, language: str) -> str:
        """Return the text in one language."""
        return self.zh if language == "zh" else self.en


class Case(FrozenModel):
    """A seeker's message. Written for the tour, not a real person's words."""

    name: str = Field(pattern=Name)
    title: Words
    said: Words
    """Models receive the English text; the Chinese one is for readers."""


class Stage(FrozenModel):
    """A model at one stage of its making."""

    name: str = Field(pattern=Name)
    title: Words
    what: Words
    """One sentence on its training."""


class Plan(FrozenModel):
    """`plan.toml`."""

    seed: int = Field(ge=0)
    """For every turn; fixed before the first one was recorded."""
    cases: tuple[Case, ...] = Field(min_length=1)
    stages: tuple[Stage, ...] = Field(min_length=1)
    """In the order of their making."""

    @model_validator(mode="after")
    def _names_fit(self) -> "Plan":
        for named in (self.cases, self.stages):
            names = [one.name for one in named]
            if len(set(names)) != len(names):
                raise ValueError(f"duplicate name: {', '.join(names)}")
        return self

    def case(self, name: str) -> Case:
        """Return the case of that name."""
        return next(case for case in self.cases if case.name == name)


class Opinion(FrozenModel):
    """A reader's comment on one step, or on the reply."""

    part: Part
    right: bool
    why: Words


class Note(FrozenModel):
    """A reader's comment on one recorded turn."""

    case: str
    stage: str
    text: str = Field(pattern=r"^[0-9a-f]{16}$")
    """`Recording.text_hash` of the turn. A comment on another text is not shown."""
    summary: Words
    """The turn in plain words."""
    parts: tuple[Opinion, ...] = ()
    """On the steps and the reply; none if the turn has no steps."""


class Notes(FrozenModel):
    """`notes.toml`."""

    by: Words
    """Who wrote the comments."""
    notes: tuple[Note, ...] = ()
