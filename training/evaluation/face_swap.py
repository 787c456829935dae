"""Replaces the photo of a turn, to measure its effect on a policy."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np

from compeer_core.cer import CerRecord
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.taxonomy import Emotion, Sentiment
from training.data.pictures import FACES


class Condition(StrEnum):
    """The photo shown with the seeker's last message."""

    NONE = "none"
    FITS = "fits"
    """A face of the class that matches the turn's emotion."""
    CONTRADICTS = "contradicts"
    """A happy face for a negative emotion, a sad one for any other."""


def with_swapped_faces(
    samples: Sequence[CerRecord],
    faces: Mapping[str, Sequence[str]],
    face_class_of: Mapping[Emotion, str],
    seed: int,
) -> dict[Condition, list[CerRecord]]:
    """Return the samples under each condition, in order; photos of earlier messages are removed.

    Args:
        samples: Turns of a corpus, whose emotion labels are assumed to be correct.
        faces: File names of photos, by face class.
        face_class_of: The face class that matches each emotion.
        seed: Seed of the choice of photos.

    Raises:
        ConfigError: There is no photo of a required class.
    """
    rng = np.random.default_rng(seed)
    by_condition: dict[Condition, list[CerRecord]] = {condition: [] for condition in Condition}
    for sample in samples:
        emotion = parse(sample.first.turn or "").reasoning.emotion
        assert isinstance(emotion.emotion, Emotion), "labels of samples are from closed lists"
        classes = {
            Condition.NONE: None,
            Condition.FITS: face_class_of[emotion.emotion],
            Condition.CONTRADICTS: "happy" if emotion.sentiment is Sentiment.NEGATIVE else "sad",
        }
        for condition, face_class in classes.items():
            face = None
            if face_class is not None:
                if not faces.get(face_class):
                    raise ConfigError(f"the folder of faces has no photo of class '{face_class}'")
                face = str(rng.choice(faces[face_class]))
            by_condition[condition].append(with_face(sample, face))
    return by_condition


def with_face(record: CerRecord, face: str | None) -> CerRecord:
    """Return a row with this photo at the last message, and no others."""
    *before, last = (turn.model_copy(update={"images": ()}) for turn in record.case.history)
    if face is not None:
        last = last.model_copy(update={"images": (f"{FACES}{face}",)})
    case = record.case.model_copy(update={"history": (*before, last)})
    return record.model_copy(update={"case": case})
