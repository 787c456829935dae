"""Written dialogues as CER rows: `python -m training cer written <config.toml>`.

The dialogues of `assets/cer` were written by a large language model for this project (see the card there). Each
supporter turn becomes a row whose author is `llm`; nobody judged its steps. Splits are made by dialogue.

A message may show a face of a named class. With a folder of faces such a message gets a photo of that class, one
that the image tower takes for it where `readings` tell; without one, a dialogue ends before its first photo.
"""

import gzip
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord, Split
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    render,
)
from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy
from training.faces import FACE_CLASSES, read_faces
from training.pictures import FACES
from training.samples import write_records
from training.sft.source import read_readings

_log = logging.getLogger(__name__)

CORPUS = "written"
AUTHOR = "llm"
LICENCE = "CC BY 4.0"
ROWS = "rows.jsonl"

_QUOTATION = re.compile(r'"([^"]+)"')


class Config(FrozenModel):
    """`[cer written]`: which dialogues, which photos."""

    written: tuple[Path, ...] = Field(min_length=1)
    """Files of dialogues, gzipped JSON lines."""
    output: Path
    """Folder that receives `rows.jsonl`."""
    faces: Path | None = None
    """Folder of the packed faces; None leaves photos out, and what is said after the first one."""
    readings: Path | None = None
    """What an image tower takes each photo for (`readings.json`); None takes any photo of the class named."""
    photo_draws: int = Field(default=1, gt=0)
    """How often a dialogue with photos is there in the train split, each time with other photos."""
    seed: int = 0
    """Draws the photos."""


class SeekerMessage(FrozenModel):
    """What the seeker says."""

    role: Literal["user"]
    text: str = Field(min_length=1)
    face: str | None = None
    """The class of the face that a photo beside the message shows."""

    @model_validator(mode="after")
    def _known_face(self) -> "SeekerMessage":
        if self.face is not None and self.face not in FACE_CLASSES:
            raise ValueError(f"no class of faces is called {self.face}")
        return self


class WrittenTurn(FrozenModel):
    """What the supporter thinks and answers."""

    role: Literal["assistant"]
    history: str
    stage: Stage
    emotion_text: str
    sentiment: Sentiment
    emotion: Emotion
    intensity: int = Field(ge=1, le=5)
    strategy_text: str
    strategy: Strategy
    reply: str

    def turn(self) -> SupportTurn:
        """Return it in the form of the output grammar."""
        return SupportTurn(
            Reasoning(
                HistoryStep(self.history, self.stage),
                EmotionStep(self.emotion_text, self.sentiment, self.emotion, self.intensity),
                StrategyStep(self.strategy_text, self.strategy.value),
            ),
            self.reply,
        )


class WrittenDialogue(FrozenModel):
    """One line of a file: seeker and supporter in turns, the seeker first."""

    id: str
    situation: str
    """What it is about, which nobody in it is told."""
    turns: tuple[SeekerMessage | WrittenTurn, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _is_sound(self) -> "WrittenDialogue":
        for place, turn in enumerate(self.turns):
            if (turn.role == "user") != (place % 2 == 0):
                raise ValueError(f"dialogue {self.id}: turn {place} is out of order")
            if isinstance(turn, WrittenTurn):
                turn.turn()  # it says what cannot be rendered
        for quoted in invented_quotations(self):
            raise ValueError(f'dialogue {self.id}: nobody said "{quoted}"')
        return self


def invented_quotations(dialogue: WrittenDialogue) -> Iterator[str]:
    """Yield each quotation of a step that is not, letter for letter, in a message of the seeker before it.

    The first letter may be a capital where the message has none, and a last full stop or comma may be the step's.
    """
    said: list[str] = []
    for turn in dialogue.turns:
        if isinstance(turn, SeekerMessage):
            said.append(turn.text)
            continue
        for quoted in _QUOTATION.findall(f"{turn.history}\n{turn.emotion_text}"):
            rest = quoted[1:].rstrip(".,")
            if not any(rest in text for text in said):
                yield quoted


def read_written(path: Path) -> Iterator[WrittenDialogue]:
    """Yield the dialogues of a file.

    Raises:
        ConfigError: It is missing, damaged, or a line is no such dialogue.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (assets/cer has the project's own)")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield WrittenDialogue.model_validate_json(line)
                except ValidationError as error:
                    problem = error.errors()[0]
                    place = ".".join(map(str, problem["loc"]))
                    raise ConfigError(
                        f"{path}, line {number}: no written dialogue: {place} {problem['msg']}"
                    ) from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as gzipped JSON lines ({error})") from error


def split_of(dialogue_id: str) -> Split:
    """Return a dialogue's split: of twelve, one is for validation and one for the test."""
    number = int.from_bytes(hashlib.sha256(dialogue_id.encode()).digest()[:4]) % 12
    return "valid" if number == 0 else "test" if number == 1 else "train"


def rows_of(dialogue: WrittenDialogue, photos: Sequence[str | None], draw: int) -> list[CerRecord]:
    """Return the rows of a dialogue, one for each supporter turn.

    Args:
        dialogue: What was said.
        photos: For each turn the name of its photo, or None. They end where the dialogue is to end.
        draw: Which of its appearances this is, from 1.
    """
    name = dialogue.id if draw == 1 else f"{dialogue.id}~{draw}"
    turns = dialogue.turns[: len(photos)]
    rounds = sum(isinstance(turn, WrittenTurn) for turn in turns)
    history: list[CaseUtterance] = []
    rows: list[CerRecord] = []
    for turn, photo in zip(turns, photos, strict=True):
        if isinstance(turn, SeekerMessage):
            images = () if photo is None else (photo,)
            history.append(CaseUtterance(speaker=Speaker.SEEKER, text=turn.text, images=images))
            continue
        number = len(rows)
        case = Case(
            id=f"{name}#{number}",
            dialogue_id=name,
            source_id=dialogue.id,
            corpus=CORPUS,
            language="en",
            split=split_of(dialogue.id),
            licence=LICENCE,
            round=number,
            rounds=rounds,
            history=tuple(history),
            original=None,
        )
        answer = Candidate(author=AUTHOR, reply=turn.reply, turn=render(turn.turn()))
        rows.append(CerRecord(id=case.id, case=case, first=answer))
        history.append(CaseUtterance(speaker=Speaker.SUPPORTER, text=turn.reply))
    return rows


class _Photos:
    """The photos that may be shown, by split and class."""

    def __init__(self, config: Config) -> None:
        self._names: dict[tuple[bool, str], list[str]] = {}
        self._config = config
        if config.faces is None:
            return
        readings = None if config.readings is None else read_readings(config.readings)
        for face in read_faces(config.faces):
            if readings is None or readings.get(face.file) == face.face_class:
                key = (face.split == "train", face.face_class)
                self._names.setdefault(key, []).append(f"{FACES}{face.file}")

    def of(self, dialogue: WrittenDialogue, draw: int) -> list[str | None]:
        """Return a photo or None for each turn, up to the first photo where there are none."""
        digest = hashlib.sha256(dialogue.id.encode()).digest()
        rng = np.random.default_rng([self._config.seed, draw, int.from_bytes(digest[:8])])
        photos: list[str | None] = []
        for turn in dialogue.turns:
            face = turn.face if isinstance(turn, SeekerMessage) else None
            if face is not None and self._config.faces is None:
                break
            photos.append(None if face is None else self._drawn(dialogue, face, rng))
        return photos

    def _drawn(self, dialogue: WrittenDialogue, face: str, rng: np.random.Generator) -> str:
        names = self._names.get((split_of(dialogue.id) == "train", face))
        if not names:
            raise ConfigError(
                f"{self._config.faces}: no photo of class {face} for dialogue {dialogue.id}"
            )
        return names[int(rng.integers(len(names)))]


def records(config: Config) -> Iterator[CerRecord]:
    """Yield the rows of all dialogues, in the order of the files.

    Raises:
        ConfigError: A file is missing or damaged, two dialogues have the same id, or a class has no photo.
    """
    photos = _Photos(config)
    seen: set[str] = set()
    for path in config.written:
        for dialogue in read_written(path):
            if dialogue.id in seen:
                raise ConfigError(f"{path}: two dialogues are called {dialogue.id}")
            seen.add(dialogue.id)
            shows = any(isinstance(t, SeekerMessage) and t.face for t in dialogue.turns)
            repeats = shows and config.faces is not None and split_of(dialogue.id) == "train"
            for draw in range(1, 1 + (config.photo_draws if repeats else 1)):
                yield from rows_of(dialogue, photos.of(dialogue, draw), draw)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    if resume is not None:
        raise ConfigError("cer written takes seconds and cannot be resumed: begin it again")
    rows = list(records(config))
    _log.info("rows: %s", counts_of(rows))
    if not dry_run:
        write_records(config.output / ROWS, rows)


def counts_of(rows: Sequence[CerRecord]) -> str:
    """Return how many rows each split has, in words."""
    counts: Mapping[str, int] = Counter(row.case.split for row in rows)
    return json.dumps(counts, sort_keys=True)
