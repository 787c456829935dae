"""Where the samples of SFT come from: dialogues, photos, and how they are put together."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from compeer_core.cer import SPLITS, Split
from compeer_core.config import FrozenModel
from training.data.esconv import read_esconv
from training.data.faces import Face, face_class_of, read_faces, read_readings
from training.data.samples import Sample, write_records
from training.sft.dataset import build_samples

_log = logging.getLogger(__name__)


class SampleSource(FrozenModel):
    """Settings of the samples."""

    esconv: Path
    """Folder with ESConv's `train.txt.gz`, `valid.txt.gz` and `test.txt.gz`."""
    faces: Path
    """Folder of the packed faces."""
    face_share: float = 0.25
    """Share of turns whose last seeker message gets a photo that fits the emotion."""
    held_out_face_share: float | None = Field(default=None, ge=0, le=1)
    """The same in the validation and test splits, so that policies that learn from more or fewer photos are measured
    on turns with as many; None is `face_share`."""
    told_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the turns after a mere greeting in which a face tells the emotion."""
    other_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the photos beside other turns whose face is of any class; the turn's label stays."""
    readings: Path | None = None
    """What an image tower takes each photo for (`readings.json` of a `vision` run): the emotion step says that
    of a photo, and says it first. None says the photo's label."""
    history_characters: int = 1200
    """Older turns are left out beyond this."""


def drawn_samples(
    source: SampleSource, photos: Sequence[Face], split: Split, seed: int
) -> Iterator[Sample]:
    """Yield the samples of a split; photos never cross splits.

    Args:
        source: The dialogues, and how many photos.
        photos: All that `source.faces` holds.
        split: Which of ESConv's splits.
        seed: Draws the wording and the photos.
    """
    by_class: dict[str, list[str]] = {}
    for photo in photos:
        if photo.split == ("train" if split == "train" else "valid"):
            by_class.setdefault(photo.face_class, []).append(photo.file)
    return build_samples(
        read_esconv(source.esconv / f"{split}.txt.gz", split),
        by_class,
        face_class_of(source.faces),
        face_share=_share_of(source, split),
        history_characters=source.history_characters,
        seed=seed,
        told_share=source.told_share,
        other_share=source.other_share,
        read_as=None if source.readings is None else read_readings(source.readings),
    )


def _share_of(source: SampleSource, split: Split) -> float:
    held_out = source.held_out_face_share
    return source.face_share if split == "train" or held_out is None else held_out


def prepare_samples(source: SampleSource, seed: int, output: Path, *, keep: bool = False) -> None:
    """Write the samples of every split.

    Args:
        source: The dialogues, the photos and how many of them.
        seed: Draws the wording and the photos.
        output: Folder that receives `samples.<split>.jsonl`.
        keep: Leave the files that are there: a run that is resumed has already used them.
    """
    photos = read_faces(source.faces)
    for split in SPLITS:
        path = output / f"samples.{split}.jsonl"
        if keep and path.exists():
            continue
        count = write_records(path, drawn_samples(source, photos, split, seed))
        _log.info("%s: %d samples", split, count)
