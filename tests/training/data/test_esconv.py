"""ESConv's layout, its oddities, and what is said of a line that is none of it."""

import gzip
import json
from pathlib import Path

import pytest

from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion, Strategy
from tests.training.corpora_fixture import esconv_row, write_esconv
from training.esconv import AnnotatedDialogue, read_esconv

TALK = [
    ("usr", "Hi."),
    ("sys", "Hello, how are you?", "Question"),
    ("usr", "Low."),
    ("usr", " My \u2019job\u2019 is gone. "),
    ("sys", "Oh no.", "Others"),
    ("sys", "It is hard to lose what you worked for.", "Reflection of feelings"),
]


def read(tmp_path: Path, *rows: object) -> list[AnnotatedDialogue]:
    return list(read_esconv(write_esconv(tmp_path / "valid.txt.gz", rows), "valid"))


def test_runs_of_one_speaker_become_one_turn(tmp_path):
    (talk,) = read(tmp_path, esconv_row(TALK))

    said = [(u.speaker, u.text) for u in talk.dialogue]
    assert said == [
        (Speaker.SEEKER, "Hi."),
        (Speaker.SUPPORTER, "Hello, how are you?"),
        (Speaker.SEEKER, "Low.\nMy \u2019job\u2019 is gone."),
        (Speaker.SUPPORTER, "Oh no.\nIt is hard to lose what you worked for."),
    ]
    # the longest part of the last turn is a reflection
    assert talk.strategies == (None, Strategy.QUESTION, None, Strategy.REFLECTION)


def test_labels_come_from_the_dialogue_and_its_survey(tmp_path):
    (talk,) = read(
        tmp_path,
        esconv_row(TALK, emotion="shame", problem="Sleep Problems", initial="4", final="1"),
    )

    assert talk.emotion is Emotion.SHAME
    assert (talk.problem, talk.initial_intensity, talk.final_intensity) == ("sleep problems", 4, 1)


def test_without_a_final_survey_nothing_changed(tmp_path):
    # 150 of 1,300 dialogues have null there
    missing = esconv_row(TALK, initial="4")
    del missing["survey_score"]["seeker"]["final_emotion_intensity"]

    talks = read(tmp_path, esconv_row(TALK, initial="4", final=None), missing)

    assert [talk.final_intensity for talk in talks] == [4, 4]


def test_the_supporter_may_begin_and_empty_texts_are_no_turns(tmp_path):
    begun = [("sys", "Welcome.", "Others"), ("usr", " "), ("sys", "Anyone?", "Question")]

    (talk,) = read(tmp_path, esconv_row([*begun, ("usr", "Yes.")]))

    assert [u.text for u in talk.dialogue] == ["Welcome.\nAnyone?", "Yes."]
    assert talk.strategies == (Strategy.OTHERS, None)  # of equals the first: 8 letters each
    assert talk.every_strategy == ((Strategy.OTHERS, Strategy.QUESTION), ())


def test_the_id_names_split_and_line_and_blank_lines_count(tmp_path):
    path = tmp_path / "test.txt.gz"
    line = json.dumps(esconv_row(TALK))
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(f"{line}\n\n{line}\n")

    assert [talk.dialogue.id for talk in read_esconv(path, "test")] == [
        "esconv/test/0",
        "esconv/test/2",
    ]


def test_an_uncompressed_file_is_read_as_well(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(json.dumps(esconv_row(TALK)), encoding="utf-8")

    assert len(list(read_esconv(path, "train"))) == 1


def changed(**values: object) -> dict[str, object]:
    return esconv_row(TALK) | values


NO_STRATEGY = esconv_row([("usr", "Hi."), ("sys", "Hello.")])
FAILED_LAYOUT = [{"speaker": "listener", "annotation": {"strategy": "Others"}, "content": "Hi\n"}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "dialog"),
        ([], "TypeError"),
        (changed(emotion_type="bliss"), "unknown emotion_type 'bliss'"),
        (changed(emotion_type=None), "Error"),
        (changed(problem_type=7), "AttributeError"),
        (changed(dialog=None), "TypeError"),
        (changed(dialog=FAILED_LAYOUT), "listener"),
        (changed(dialog=[{"speaker": "usr", "text": None}]), "AttributeError"),
        (changed(dialog=[{"speaker": "bot", "text": "Hi"}]), "unknown speaker 'bot'"),
        (changed(survey_score={"seeker": {"initial_emotion_intensity": "high"}}), "high"),
        (NO_STRATEGY, "strategy"),
        (esconv_row([("usr", "Hi."), ("sys", "Hello.", "Magic")]), "unknown strategy 'Magic'"),
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path, row, says):
    with pytest.raises(ConfigError, match=r"valid\.txt\.gz, line 2: not an ESConv dial") as caught:
        read(tmp_path, esconv_row(TALK), row)

    assert says in str(caught.value)


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "train.txt.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write('{"dialog": [\n')

    with pytest.raises(ConfigError, match=r"train\.txt\.gz, line 1: not an ESConv dialogue"):
        list(read_esconv(path, "train"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"valid\.txt\.gz: no such file \(ESConv's valid split"):
        list(read_esconv(tmp_path / "valid.txt.gz", "valid"))


@pytest.mark.corpora
@pytest.mark.parametrize(("split", "count"), [("train", 910), ("valid", 195), ("test", 156)])
def test_the_public_corpus_is_read_whole(corpora, split, count):
    talks = list(read_esconv(corpora / "esconv" / f"{split}.txt.gz", split))

    assert len(talks) == count
    assert all(1 <= talk.final_intensity <= 5 for talk in talks)
