"""A recorded turn: a model's output, its origin, and the judge's verdict."""

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
"""The name of a model card."""

Hash = str


class Origin(FrozenModel):
    """A model, identified by its files."""

    name: str
    title: str
    shipped: bool
    """Whether the list of models still held these very files when it was last judged."""
    licence: str = ""
    """Of the weights."""
    files: Mapping[str, Hash]
    """SHA-256 of every file that determines its output: ``folder/file``. Texts such as its card
    are left out."""

    @property
    def weights(self) -> str:
        """The file of its own weights, ``folder/file``; an adapter's, not its base's."""
        weights = [name for name in self.files if name.endswith(".safetensors")]
        return next((name for name in weights if "adapter" in name), weights[0] if weights else "")

    @property
    def short_hash(self) -> str:
        """The beginning of the hash of its weights, for people to compare."""
        return self.files.get(self.weights, "")[:12]

    @property
    def card(self) -> str:
        """Its card below ``assets``; empty if the model is not shipped."""
        folder = self.weights.partition("/")[0]
        return f"checkpoints/{folder}/{CARD}" if self.shipped and folder else ""


class SamplingUsed(FrozenModel):
    """The sampling parameters."""

    temperature: float
    top_p: float
    repetition_penalty: float
    max_new_tokens: int
    seed: int
    exact_quotations: bool = False
    fresh_sentences: bool = False
    thinking: bool | None = Field(default=None, exclude_if=lambda is_on: is_on is None)


class StepJudged(FrozenModel):
    """The judge's verdict on one step."""

    part: Part
    correct: bool | None
    """None: no usable verdict."""
    probability_correct: float | None = Field(default=None, ge=0, le=1)


class Judged(FrozenModel):
    """The judge's verdict on a turn."""

    judge: Origin
    date: datetime.date
    versions: Mapping[str, str]
    asked: bool
    """False: the turn is incomplete, which costs all points by rule, and the judge was not asked.
    """
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
    """The seeker's message, the model's only input."""
    raw: str
    """The model's whole output, unchanged."""
    status: Literal["finished", "stopped", "failed"]
    tokens: int
    date: datetime.date
    command: str
    model: Origin
    sampling: SamplingUsed
    versions: Mapping[str, str]
    machine: str
    judged: Judged | None = None
    """None: not judged yet."""

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.case}.{self.stage}.json"

    @property
    def text_hash(self) -> str:
        """The hash by which a comment refers to the text."""
        return hashlib.sha256(self.raw.encode()).hexdigest()[:16]

    @property
    def reading(self) -> Reading:
        """The parsed text."""
        return read(self.raw)


def load_recordings(folder: Path) -> list[Recording]:
    """Read all recordings of a folder, in the order of their names.

    Raises:
        ConfigError: A file is not a recording, or its name does not match its content.
    """
    return [load_recording(path) for path in sorted(folder.glob("*.json"))]


def load_recording(path: Path) -> Recording:
    """Read one recording.

    Raises:
        ConfigError: It cannot be read, is not a recording, or its name does not match its content.
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
        raise ConfigError(f"{path}: its content requires the name {recording.file_name}")
    return recording


def save_recording(recording: Recording, folder: Path) -> Path:
    """Write a recording into its file and return the path."""
    path = folder / recording.file_name
    path.write_text(recording.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def origin_of(entry: ModelEntry, folder: Path) -> Origin:
    """Describe a model of a list by its files.

    Args:
        entry: The model; a local checkpoint or script.
        folder: The folder that its paths are relative to.
    """
    places = [folder / entry.where.location]
    if entry.adapter is not None:
        places.append(folder / entry.adapter)
    files = {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for place in places
        for path in ([place] if place.is_file() else sorted(place.iterdir()))
        if path.is_file() and path.suffix != ".md"
    }
    return Origin(
        name=entry.name,
        title=entry.title or entry.name,
        shipped=True,
        licence=entry.licence,
        files=files,
    )
