"""A recorded turn: a model's text, its origin, and a judge's verdicts."""

import datetime
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import Part, Reading, read
from compeer_core.registry import ModelEntry

CARD = "README.md"
"""The card is not hashed: it does not affect the model's output."""

Hash = str


class Origin(FrozenModel):
    """A model, identified by its files."""

    name: str
    title: str
    shipped: bool
    """Whether the files are part of this repository."""
    licence: str = ""
    """Of the weights."""
    files: Mapping[str, Hash]
    """SHA-256 of all files that affect its output, by ``folder/file``."""

    @property
    def weights(self) -> str:
        """The file of its own weights, ``folder/file``: of the adapter, if any, not of the base."""
        weights = [name for name in self.files if name.endswith(".safetensors")]
        return next((name for name in weights if "adapter" in name), weights[0] if weights else "")

    @property
    def short_hash(self) -> str:
        """The beginning of its weights' hash, for display."""
        return self.files.get(self.weights, "")[:12]

    @property
    def card(self) -> str:
        """Path of its card in ``assets``; empty if the model is not shipped."""
        folder = self.weights.partition("/")[0]
        return f"checkpoints/{folder}/{CARD}" if self.shipped and folder else ""


class SamplingUsed(FrozenModel):
    """The sampling parameters."""

    temperature: float
    top_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int


class StepJudged(FrozenModel):
    """The judge's verdict on one step."""

    part: Part
    correct: bool | None
    """None if the step was unscorable."""
    probability_correct: float | None = Field(default=None, ge=0, le=1)


class Judged(FrozenModel):
    """The judge's verdicts on a turn."""

    judge: Origin
    date: datetime.date
    versions: Mapping[str, str]
    asked: bool
    """False if the turn is incomplete: it loses all points by rule, without the judge."""
    steps: tuple[StepJudged, ...] = ()
    total: float | None
    maximum: int

    def step(self, part: Part) -> StepJudged | None:
        """Return the verdict on a step."""
        return next((step for step in self.steps if step.part == part), None)


class Recording(FrozenModel):
    """One file of `assets/tour`."""

    case: str
    stage: str
    said: str
    """The seeker's message, the model's whole input."""
    raw: str
    """The model's whole output, verbatim."""
    status: Literal["finished", "stopped", "failed"]
    tokens: int
    date: datetime.date
    command: str
    model: Origin
    sampling: SamplingUsed
    versions: Mapping[str, str]
    machine: str
    judged: Judged | None = None
    """None if not judged yet."""

    @property
    def file_name(self) -> str:
        """Its file name."""
        return f"{self.case}.{self.stage}.json"

    @property
    def text_hash(self) -> str:
        """The hash by which a note refers to the text."""
        return hashlib.sha256(self.raw.encode()).hexdigest()[:16]

    @property
    def reading(self) -> Reading:
        """The parsed text."""
        return read(self.raw)


def load_recordings(folder: Path) -> list[Recording]:
    """Read all recordings of a folder, in the order of their names.

    Raises:
        ConfigError: A file is invalid, or its name does not match its content.
    """
    return [load_recording(path) for path in sorted(folder.glob("*.json"))]


def load_recording(path: Path) -> Recording:
    """Read one recording.

    Raises:
        ConfigError: It cannot be read, is invalid, or its name does not match its content.
    """
    try:
        recording = Recording.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key or 'the file'}: {first['msg']}") from error
    if recording.file_name != path.name:
        raise ConfigError(f"{path}: by its content the name should be {recording.file_name}")
    return recording


def save_recording(recording: Recording, folder: Path) -> Path:
    """Write a recording into its file and return the path."""
    path = folder / recording.file_name
    path.write_text(recording.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def origin_of(entry: ModelEntry, folder: Path, *, shipped: bool) -> Origin:
    """Identify a model of a list by the hashes of its files.

    Args:
        entry: The model; a checkpoint or a script on this machine.
        folder: Base of its relative paths.
        shipped: Whether the files are part of this repository.
    """
    places = [folder / entry.where.location]
    if entry.adapter is not None:
        places.append(folder / entry.adapter)
    files = {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for place in places
        for path in ([place] if place.is_file() else sorted(place.iterdir()))
        if path.is_file() and path.name != CARD
    }
    return Origin(
        name=entry.name,
        title=entry.title or entry.name,
        shipped=shipped,
        licence=entry.licence,
        files=files,
    )
