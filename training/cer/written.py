"""Dialogues written by a language model, as CER rows: `python -m training cer written <config.toml>`.

A large language model wrote whole dialogues (`assets/cer/README.md`), each supporter turn with its three steps. Each
of these turns becomes one row, in the format that SFT reads. Nobody judged the steps, so the rows carry no labels.

A dialogue names the class of a photo, not the photo. Photos are drawn from the packed folder of faces: its train
photos for the train split, held-out ones for the others. A small image tower misreads many faces, and the text of a
turn would then be wrong; `readings` restricts the draw to photos that the tower reads as the class in question.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from compeer_core.cer import SPLITS, Candidate, Case, CaseUtterance, CerRecord, Split
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.grounding import invented_quotations
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    render,
)
from compeer_core.row_files import json_lines, parse_row, write_rows
from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy
from training.cer.requests.seeding import generator_for, stable_hash
from training.data.faces import FACE_CLASSES
from training.data.pictures import Photos, read_photos
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

LICENCE = "CC BY 4.0"
ONE_IN = 12
"""One dialogue in this many is for validation, and one for the test."""


class Config(FrozenModel):
    """`[cer written]`: the dialogues and their photos."""

    written: Path
    """The dialogues: JSON lines, compressed with gzip."""
    output: Path
    """Folder that receives `rows.jsonl`."""
    faces: Path | None = None
    """Folder of the packed faces. None drops every turn that follows a photo."""
    readings: Path | None = None
    """The class that an image tower reads in each photo (`readings.json` of a `vision` run): only photos that it reads
    correctly are drawn. None draws from all photos of a class."""
    photo_draws: int = Field(default=1, gt=0)
    """How often a train dialogue with photos is written, each time with other photos."""
    seed: int = Field(default=0, ge=0)
    """Draws the photos."""

    @model_validator(mode="after")
    def _readings_are_of_faces(self) -> Self:
        if self.readings is not None and self.faces is None:
            raise ValueError("readings need photos: set `faces` to the packed folder of faces")
        return self


class SeekerTurn(FrozenModel):
    """A seeker turn."""

    role: Literal["user"]
    text: str = Field(pattern=r"\S")
    face: str | None = None
    """The class of its photo."""

    @field_validator("face")
    @classmethod
    def _is_a_class(cls, value: str | None) -> str | None:
        if value is not None and value not in FACE_CLASSES:
            raise ValueError(f"not a class of faces; known: {', '.join(FACE_CLASSES)}")
        return value


class WrittenReasoning(FrozenModel):
    """The three steps of a supporter turn."""

    history: str
    stage: Stage
    emotion_text: str
    sentiment: Sentiment
    emotion: Emotion
    intensity: int
    strategy_text: str
    strategy: Strategy

    def reasoning(self) -> Reasoning:
        """Return the steps as what a policy writes.

        Raises:
            ValueError: A part is empty, or cannot be parsed again.
        """
        return Reasoning(
            HistoryStep(self.history, self.stage),
            EmotionStep(self.emotion_text, self.sentiment, self.emotion, self.intensity),
            StrategyStep(self.strategy_text, self.strategy),
        )


class WrittenSupport(WrittenReasoning):
    """A supporter turn with its reasoning."""

    reply: str

    @model_validator(mode="after")
    def _can_be_rendered(self) -> Self:
        self.support_turn()
        return self

    def check_quotations(self, messages: Sequence[str]) -> None:
        """Check that the steps quote only what a message contains.

        Raises:
            ValueError: A quotation is invented.
        """
        steps = f"{self.history}\n{self.emotion_text}\n{self.strategy_text}"
        if invented := invented_quotations(steps, messages, exact=True):
            raise ValueError(f'"{invented[0]}" is quoted, but no earlier message contains it')

    def support_turn(self) -> SupportTurn:
        """Return the turn as what a policy writes.

        Raises:
            ValueError: A part is empty, or cannot be parsed again.
        """
        return SupportTurn(self.reasoning(), self.reply)


class WrittenTurn(WrittenSupport):
    """A supporter turn of a dialogue."""

    role: Literal["assistant"]


class WrittenDialogue(FrozenModel):
    """One line of the file."""

    id: str = Field(pattern=r"^[\w.-]+$")
    situation: str
    """The writer's idea, which is not part of the dialogue."""
    turns: tuple[Annotated[SeekerTurn | WrittenTurn, Field(discriminator="role")], ...] = Field(
        min_length=2
    )

    @model_validator(mode="after")
    def _takes_turns(self) -> Self:
        roles = [turn.role for turn in self.turns]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError(
                "turns must alternate between user and assistant and end with assistant"
            )
        return self

    @model_validator(mode="after")
    def _quotes_exactly(self) -> Self:
        messages: list[str] = []
        for turn in self.turns:
            if isinstance(turn, SeekerTurn):
                messages.append(turn.text)
            else:
                turn.check_quotations(messages)
        return self

    @property
    def faces(self) -> Mapping[int, str]:
        """The classes of the photos, by turn index."""
        return {
            place: turn.face
            for place, turn in enumerate(self.turns)
            if isinstance(turn, SeekerTurn) and turn.face is not None
        }


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    refuse_resume(resume, "this stage takes seconds")
    rows = list(written_rows(config))
    for split in SPLITS:
        cases = [row.case for row in rows if row.case.split == split]
        sources = {case.source_id for case in cases}
        _log.info("%s: %d turns of %d dialogues", split, len(cases), len(sources))
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def written_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a row for each supporter turn, in the order of the file, draw by draw.

    Raises:
        ConfigError: A file is missing, a line is not a dialogue, or there is no photo to draw.
    """
    photos = None if config.faces is None else read_photos(config.faces, config.readings)
    left_out: Counter[str] = Counter()
    for dialogue in read_written(config.written):
        split = split_of(dialogue.id)
        draws: list[dict[int, str]] = [{}]
        if photos is not None and dialogue.faces:
            count = config.photo_draws if split == "train" else 1
            draws = _drawn_photos(dialogue, split, photos, count, config.seed)
        for number, shown in enumerate(draws, start=1):
            name = dialogue.id if number == 1 else f"{dialogue.id}~{number}"
            rows = list(_rows_of(dialogue, name, split, shown))
            left_out[split] += len(dialogue.turns) // 2 - len(rows)
            yield from rows
    if left_out.total():
        _log.info(
            "dropped, because `faces` is not set: %s",
            ", ".join(f"{left_out[split]} turns of {split}" for split in SPLITS),
        )


def read_written(path: Path) -> Iterator[WrittenDialogue]:
    """Yield the dialogues of a file.

    Raises:
        ConfigError: The file is missing or damaged, a line is not a dialogue, or an id occurs twice.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file (the written dialogues, shipped as assets/cer/plain.jsonl.gz)"
        )
    first_use: dict[str, str] = {}
    for where, line in json_lines(path):
        dialogue = parse_row(WrittenDialogue, where, line)
        if (first := first_use.setdefault(dialogue.id, where)) != where:
            raise ConfigError(
                f"{where}: id {dialogue.id} is already used in {first.removeprefix(f'{path}, ')}; "
                "choose another"
            )
        yield dialogue


def split_of(dialogue_id: str) -> Split:
    """Return the split of a dialogue, which depends only on its id."""
    places: dict[int, Split] = {0: "valid", 1: "test"}
    return places.get(stable_hash("split", dialogue_id) % ONE_IN, "train")


def _drawn_photos(
    dialogue: WrittenDialogue, split: Split, photos: Photos, count: int, seed: int
) -> list[dict[int, str]]:
    """Return `count` draws of a photo for each turn with a class, without repetition if there are enough."""
    part = "train" if split == "train" else "valid"
    draws: list[dict[int, str]] = [{} for _ in range(count)]
    for place, face_class in dialogue.faces.items():
        names = photos.get((part, face_class), ())
        if not names:
            raise ConfigError(
                f"dialogue {dialogue.id}: no {part} photo of class {face_class}; use the complete folder of faces, or "
                "readings of a tower that knows this class"
            )
        rng = generator_for(seed, "photo", dialogue.id, str(place))
        chosen = rng.choice(len(names), size=count, replace=count > len(names))
        for draw, index in zip(draws, chosen.tolist(), strict=True):
            draw[place] = names[index]
    return draws


def _rows_of(
    dialogue: WrittenDialogue, name: str, split: Split, shown: Mapping[int, str]
) -> Iterator[CerRecord]:
    """Yield the rows of one draw, up to the first missing photo."""
    history: list[CaseUtterance] = []
    for place, turn in enumerate(dialogue.turns):
        if isinstance(turn, SeekerTurn):
            if turn.face is not None and place not in shown:
                return
            images = (shown[place],) if place in shown else ()
            history.append(CaseUtterance(speaker=Speaker.SEEKER, text=turn.text, images=images))
            continue
        case = Case(
            id=f"{name}#{place // 2}",
            dialogue_id=name,
            source_id=dialogue.id,
            corpus="written",
            language="en",
            split=split,
            licence=LICENCE,
            round=place // 2,
            rounds=len(dialogue.turns) // 2,
            history=tuple(history),
            original=turn.reply,
            situation=dialogue.situation or None,
        )
        answer = Candidate(author="llm", reply=turn.reply, turn=render(turn.support_turn()))
        yield CerRecord(id=case.id, case=case, first=answer)
        history.append(CaseUtterance(speaker=Speaker.SUPPORTER, text=turn.reply))
