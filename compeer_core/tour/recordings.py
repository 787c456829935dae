"""A recorded turn: the words of a model as they came, where they came from, and what a judge said."""

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
"""A card may be mended without a change to what the model says."""

Hash = str


class Origin(FrozenModel):
    """A model, down to its bytes."""

    name: str
    title: str
    shipped: bool
    """Whether the files are part of this repository."""
    licence: str = ""
    """Of the weights."""
    files: Mapping[str, Hash]
    """SHA-256 of everything that decides what it says: ``folder/file``, cards left out."""

    @property
    def weights(self) -> str:
        """The file of its own weights, ``folder/file``; of an adapter, not of its base."""
        weights = [name for name in self.files if name.endswith(".safetensors")]
        return next((name for name in weights if "adapter" in name), weights[0] if weights else "")

    @property
    def short_hash(self) -> str:
        """The beginning of the hash of its weights, for people to compare."""
        return self.files.get(self.weights, "")[:12]

    @property
    def card(self) -> str:
        """Where its card is, below ``assets``; empty where the model is not shipped."""
        folder = self.weights.partition("/")[0]
        return f"checkpoints/{folder}/{CARD}" if self.shipped and folder else ""


class SamplingUsed(FrozenModel):
    """How each token was chosen."""

    temperature: float
    top_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int


class StepJudged(FrozenModel):
    """What the judge said about one step."""

    part: Part
    correct: bool | None
    """None: it gave no answer that can be relied on."""
    probability_correct: float | None = Field(default=None, ge=0, le=1)


class Judged(FrozenModel):
    """What the judge said about a turn."""

    judge: Origin
    date: datetime.date
    versions: Mapping[str, str]
    asked: bool
    """False: the turn is not complete, which costs all points by rule, and nobody was asked."""
    steps: tuple[StepJudged, ...] = ()
    total: float | None
    maximum: int

    def step(self, part: Part) -> StepJudged | None:
        """Return what was said about a step."""
        return next((step for step in self.steps if step.part == part), None)


class Recording(FrozenModel):
    """One file of `assets/tour`."""

    case: str
    stage: str
    said: str
    """The seeker's message, all that the model was given."""
    raw: str
    """All that the model wrote, untouched."""
    status: Literal["finished", "stopped", "failed"]
    tokens: int
    date: datetime.date
    command: str
    model: Origin
    sampling: SamplingUsed
    versions: Mapping[str, str]
    machine: str
    judged: Judged | None = None
    """None: nobody has judged it yet."""

    @property
    def file_name(self) -> str:
        """What its file is called."""
        return f"{self.case}.{self.stage}.json"

    @property
    def text_hash(self) -> str:
        """What a note names the text by."""
        return hashlib.sha256(self.raw.encode()).hexdigest()[:16]

    @property
    def reading(self) -> Reading:
        """The text as the parser reads it."""
        return read(self.raw)


def load_recordings(folder: Path) -> list[Recording]:
    """Read all recordings of a folder, in the order of their names.

    Raises:
        ConfigError: A file is no recording, or is not called as it says.
    """
    return [load_recording(path) for path in sorted(folder.glob("*.json"))]


def load_recording(path: Path) -> Recording:
    """Read one recording.

    Raises:
        ConfigError: It cannot be read, is no recording, or is not called as it says.
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
        raise ConfigError(f"{path}: by what it says it should be called {recording.file_name}")
    return recording


def save_recording(recording: Recording, folder: Path) -> Path:
    """Write a recording into its file and return the path."""
    path = folder / recording.file_name
    path.write_text(recording.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def origin_of(entry: ModelEntry, folder: Path, *, shipped: bool) -> Origin:
    """Describe a model of a list by the bytes of its files.

    Args:
        entry: The model; a checkpoint or a script on this machine.
        folder: What its paths are relative to.
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
