"""The tour's plan and comments: `plan.toml` and `notes.toml`."""

from pathlib import Path

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel
from compeer_core.reasoning import STEPS, Part

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
    """A model at one stage of training."""

    name: str = Field(pattern=Name)
    model: str
    """Its name in the model list, if it is shipped."""
    shipped: bool = True
    """Whether this repository contains the weights; others are given by ``--weights``."""
    title: Words
    what: Words
    """One sentence on its training."""


class Choice(FrozenModel):
    """A step of a recorded turn."""

    case: str
    stage: str
    part: Part


class Plan(FrozenModel):
    """`plan.toml`."""

    seed: int = Field(ge=0)
    """For every turn; fixed before the first one was recorded."""
    cases: tuple[Case, ...] = Field(min_length=1)
    stages: tuple[Stage, ...] = Field(min_length=1)
    """In the order of training."""
    shown: str
    """The stage whose turns are shown in detail."""
    close_up: Choice
    """The incorrect step that is explained in detail."""

    @model_validator(mode="after")
    def _names_fit(self) -> "Plan":
        cases = [case.name for case in self.cases]
        stages = [stage.name for stage in self.stages]
        for names in (cases, stages):
            if len(set(names)) != len(names):
                raise ValueError(f"duplicate name: {', '.join(names)}")
        if self.shown not in stages:
            raise ValueError(f"shown: there is no stage {self.shown!r}")
        if self.close_up.case not in cases or self.close_up.stage not in stages:
            raise ValueError("close_up: there is no such case or stage")
        if self.close_up.part not in STEPS:
            raise ValueError(f"close_up: {self.close_up.part} is not a reasoning step")
        return self

    def case(self, name: str) -> Case:
        """Return the case of that name."""
        return next(case for case in self.cases if case.name == name)

    def stage(self, name: str) -> Stage:
        """Return the stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)


class Opinion(FrozenModel):
    """A reader's comment on one step."""

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
    steps: tuple[Opinion, ...] = ()
    reply: Words | None = None
    """The comment on the reply."""


class Notes(FrozenModel):
    """`notes.toml`."""

    by: Words
    """Who wrote the comments."""
    notes: tuple[Note, ...] = ()
