"""Face photos with an expression label, read from the packed folder of faces.

FER2013 (48 x 48, grey; research use, licence unclear) and muxspace (112 x 112, Apache-2.0), each a
tar.gz and a CSV of labels. `emotion_map.csv` maps the emotion labels of a corpus to the seven
classes of the photos.
"""

import csv
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion

FACE_CLASSES = ("angry", "disgust", "fear", "happy", "neutral", "sad", "surprise")

_PACKS = (
    ("fer2013_48.tar.gz", "fer2013_labels.csv"),
    ("muxspace_112.tar.gz", "muxspace_labels.csv"),
)


@dataclass(frozen=True)
class Face:
    """One photo: its name in the pack, its split ("train" or "valid") and its class."""

    file: str
    split: str
    face_class: str
    data: bytes
    """The JPEG as packed."""


def read_faces(folder: Path, *, valid_of_unsplit: int = 10) -> list[Face]:
    """Return every photo with one of the seven labels.

    muxspace has no validation split: every `valid_of_unsplit`-th photo goes there.

    Raises:
        ConfigError: A pack or its labels are missing.
    """
    mapping = {
        row["source_label"]: row["face_class"]
        for row in _rows(folder / "emotion_map.csv")
        if row["source"] == "muxspace"
    }
    faces: list[Face] = []
    for pack, labels in _PACKS:
        images = _read_tar(folder / pack)
        rows = [row for row in _rows(folder / labels) if row["file"] in images]
        has_validation = any(row["split"] != "train" for row in rows)
        for number, row in enumerate(rows):
            label = mapping.get(row["label"], row["label"])
            if label not in FACE_CLASSES:
                continue  # muxspace's eight photos of contempt
            split = row["split"] if row["split"] == "train" else "valid"
            if not has_validation and number % valid_of_unsplit == 0:
                split = "valid"
            faces.append(Face(row["file"], split, label, images[row["file"]]))
    return faces


def face_class_of(folder: Path) -> Mapping[Emotion, str]:
    """Return the face class that shows each emotion of the taxonomy.

    Raises:
        ConfigError: The map is missing or incomplete.
    """
    path = folder / "emotion_map.csv"
    by_label = {
        row["source_label"]: row["face_class"]
        for row in reversed(_rows(path))
        if row["source"] in {"esconv", "mesc"}
    }
    if unknown := [emotion.value for emotion in Emotion if emotion.value.lower() not in by_label]:
        raise ConfigError(f"{path}: no face class for {', '.join(unknown)}")
    return {emotion: by_label[emotion.value.lower()] for emotion in Emotion}


def read_readings(path: Path) -> dict[str, str]:
    """Return the class that an image tower predicts for each photo, by the photo's name.

    Raises:
        ConfigError: The file is missing or names an unknown class.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (the vision stage writes it)")
    readings: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted({*readings.values()} - {*FACE_CLASSES}):
        raise ConfigError(f"{path}: unknown classes of faces: {', '.join(unknown)}")
    return readings


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (the folder of faces)")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _read_tar(path: Path) -> dict[str, bytes]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (the folder of faces)")
    images: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)) is not None:
                images[member.name.removeprefix("./")] = file.read()
    return images
