"""Training rows on disk: what the SFT stage writes and the later stages read.

A row is one supporter turn with everything before it. Photos are named, not stored: the names
lead into the packed folder of faces.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import ConfigError
from compeer_core.images import Image, read_image


class SampleUtterance(FrozenModel):
    """One turn of the history."""

    speaker: Speaker
    text: str
    face: str | None = None
    """Photo shown with the turn: its name in the packed folder of faces."""


class Sample(FrozenModel):
    """A history and the turn that the policy should write after it."""

    id: str
    """`<dialogue id>#<turn number>`."""
    dialogue_id: str
    """The source dialogue: splits are made by it, so that they never leak."""
    problem: str
    strategy: str
    history: tuple[SampleUtterance, ...]
    completion: str
    """The turn in the output grammar."""

    def dialogue(self, faces: dict[str, bytes]) -> Dialogue:
        """Return the history with its photos opened.

        Raises:
            ConfigError: A photo is not in `faces`.
        """
        return Dialogue(
            tuple(
                Utterance(turn.speaker, turn.text, self._images(turn, faces))
                for turn in self.history
            ),
            id=self.dialogue_id,
        )

    def _images(self, turn: SampleUtterance, faces: dict[str, bytes]) -> tuple[Image, ...]:
        if turn.face is None:
            return ()
        if turn.face not in faces:
            raise ConfigError(f"sample {self.id}: photo {turn.face} is not in the folder of faces")
        return (read_image(faces[turn.face]),)


Record = TypeVar("Record", bound=FrozenModel)
T = TypeVar("T")


def write_records(path: Path, records: Iterable[FrozenModel]) -> int:
    """Write records as JSON lines under a temporary name, then rename; return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    count = 0
    with fresh.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(record.model_dump_json() + "\n")
            count += 1
    fresh.replace(path)
    return count


def read_records(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Yield the records of a file, which must all be of one kind.

    Raises:
        ConfigError: The file is missing, or a line is not such a record.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (an earlier stage writes it)")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ConfigError(
                    f"{path}, line {number}: no {kind.__name__}: {problem}"
                ) from error


def drawn(records: Sequence[T], count: int, seed: int) -> list[T]:
    """Return `count` of the records without repetition, or all if there are fewer, in their order."""
    order = np.random.default_rng(seed).permutation(len(records))[:count]
    return [records[index] for index in sorted(order.tolist())]
