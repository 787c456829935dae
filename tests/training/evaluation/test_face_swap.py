"""Turns with swapped photos: the right photo at the last message, and nothing else changed."""

import pytest

from compeer_core.cer import Candidate, CaseUtterance, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion
from tests.training.grpo.world import record
from training.data.pictures import FACES as PREFIX
from training.evaluation.face_swap import Condition, with_face, with_swapped_faces

FACES = {"happy": ["h1.jpg", "h2.jpg"], "sad": ["s1.jpg", "s2.jpg"], "fear": ["f1.jpg"]}
CLASS_OF = dict.fromkeys(Emotion, "sad") | {Emotion.ANXIETY: "fear", Emotion.JOY: "happy"}


def sample(emotion: str, sentiment: str) -> CerRecord:
    turn = (
        "<history>A talk.\nStage: Exploration</history>\n"
        f"<emotion>A word.\nSentiment: {sentiment}\nEmotion: {emotion}\nIntensity: 3</emotion>\n"
        "<strategy>Ask.\nStrategy: Question</strategy>\n<reply>Why?</reply>"
    )
    history = (
        CaseUtterance(speaker=Speaker.SEEKER, text="Hi.", images=("faces/old.jpg",)),
        CaseUtterance(speaker=Speaker.SUPPORTER, text="Hello."),
        CaseUtterance(speaker=Speaker.SEEKER, text="I feel low.", images=("faces/older.jpg",)),
    )
    answer = Candidate(author="corpus", reply="Why?", turn=turn)
    return record(0, "test", history=history).model_copy(update={"first": answer})


def faces_of(rows: list[CerRecord]) -> list[list[str | None]]:
    """The names of the photos, without their prefix."""
    return [
        [
            next((name.removeprefix(PREFIX) for name in turn.images), None)
            for turn in row.case.history
        ]
        for row in rows
    ]


def test_each_condition_has_its_photo_at_the_last_message_only():
    rows = [sample("Anxiety", "Negative"), sample("Joy", "Positive")]

    swapped = with_swapped_faces(rows, FACES, CLASS_OF, seed=0)

    assert faces_of(swapped[Condition.NONE]) == [[None, None, None]] * 2
    assert faces_of(swapped[Condition.FITS])[0] == [None, None, "f1.jpg"]
    assert faces_of(swapped[Condition.FITS])[1][2] in FACES["happy"]
    assert faces_of(swapped[Condition.CONTRADICTS])[0][2] in FACES["happy"]
    assert faces_of(swapped[Condition.CONTRADICTS])[1][2] in FACES["sad"]
    for swapped_rows in swapped.values():
        assert [row.first for row in swapped_rows] == [row.first for row in rows]
    assert with_swapped_faces(rows, FACES, CLASS_OF, seed=0) == swapped


def test_reports_a_class_without_photos():
    with pytest.raises(ConfigError, match="no photo of class 'fear'"):
        with_swapped_faces([sample("Anxiety", "Negative")], {**FACES, "fear": []}, CLASS_OF, seed=0)


def test_text_is_unchanged():
    row = sample("Joy", "Positive")

    assert [turn.text for turn in with_face(row, "x.jpg").case.history] == [
        turn.text for turn in row.case.history
    ]
