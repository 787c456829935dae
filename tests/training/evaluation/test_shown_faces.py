"""The same turns with another photo: which photo, whose, and nothing else changed."""

import pytest

from compeer_core.cer import Candidate, CaseUtterance, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion
from tests.training.grpo.world import record
from training.data.pictures import FACES as PREFIX
from training.evaluation.shown_faces import Condition, shown, with_face

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


def test_each_condition_has_its_photo_at_the_last_message_alone():
    rows = [sample("Anxiety", "Negative"), sample("Joy", "Positive")]

    found = shown(rows, FACES, CLASS_OF, seed=0)

    assert faces_of(found[Condition.NONE]) == [[None, None, None]] * 2
    assert faces_of(found[Condition.FITS])[0] == [None, None, "f1.jpg"]
    assert faces_of(found[Condition.FITS])[1][2] in FACES["happy"]
    assert faces_of(found[Condition.CONTRADICTS])[0][2] in FACES["happy"]
    assert faces_of(found[Condition.CONTRADICTS])[1][2] in FACES["sad"]
    for rows_shown in found.values():
        assert [row.first for row in rows_shown] == [row.first for row in rows]
    assert shown(rows, FACES, CLASS_OF, seed=0) == found


def test_a_class_without_a_photo_is_named():
    with pytest.raises(ConfigError, match="no photo of class 'fear'"):
        shown([sample("Anxiety", "Negative")], {**FACES, "fear": []}, CLASS_OF, seed=0)


def test_the_text_stays_as_it_was():
    row = sample("Joy", "Positive")

    assert [turn.text for turn in with_face(row, "x.jpg").case.history] == [
        turn.text for turn in row.case.history
    ]
