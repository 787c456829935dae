"""The same turns with another photo, to see what a policy takes from it."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np

from compeer_core.cer import CerRecord
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.taxonomy import Emotion, Sentiment
from training.data.pictures import FACES


class Condition(StrEnum):
    """What is shown beside the seeker's last message."""

    NONE = "none"
    FITS = "fits"
    """A face of the class that goes with the turn's emotion."""
    CONTRADICTS = "contradicts"
    """A happy face beside a negative emotion, a sad one beside any other."""


def shown(
    samples: Sequence[CerRecord],
    faces: Mapping[str, Sequence[str]],
    face_class_of: Mapping[Emotion, str],
    seed: int,
) -> dict[Condition, list[CerRecord]]:
    """Return the samples under each condition, in their order; earlier photos are taken away too.

    Args:
        samples: Turns of a corpus, whose emotion label is taken for the truth.
        faces: Names of the photos that may be shown, by face class.
        face_class_of: The class shown beside each emotion.
        seed: Draws the photos.

    Raises:
        ConfigError: There is no photo of a class that is needed.
    """
    rng = np.random.default_rng(seed)
    found: dict[Condition, list[CerRecord]] = {condition: [] for condition in Condition}
    for sample in samples:
        emotion = parse(sample.first.turn or "").reasoning.emotion
        assert isinstance(emotion.emotion, Emotion), "a sample's labels are of the closed lists"
        fitting = face_class_of[emotion.emotion]
        other = "happy" if emotion.sentiment is Sentiment.NEGATIVE else "sad"
        for condition, face_class in (
            (Condition.NONE, None),
            (Condition.FITS, fitting),
            (Condition.CONTRADICTS, other),
        ):
            face = None
            if face_class is not None:
                if not faces.get(face_class):
                    raise ConfigError(f"there is no photo of class '{face_class}' to be shown")
                face = str(rng.choice(faces[face_class]))
            found[condition].append(with_face(sample, face))
    return found


def with_face(record: CerRecord, face: str | None) -> CerRecord:
    """Return a row whose last message shows this photo, and no other message any."""
    *before, last = (turn.model_copy(update={"images": ()}) for turn in record.case.history)
    if face is not None:
        last = last.model_copy(update={"images": (f"{FACES}{face}",)})
    case = record.case.model_copy(update={"history": (*before, last)})
    return record.model_copy(update={"case": case})
