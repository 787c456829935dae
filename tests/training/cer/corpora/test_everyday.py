"""Everyday talk, interviews and judged answers: their layouts, and their public files."""

import pytest

from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion
from tests.training.cer.corpora.corpus_files import load, write_csv, write_json
from training.cer.records import Reason


def daily(number: int, split: str) -> dict[str, object]:
    turns = [
        {"speaker": "user", "utterance": "Rain again!", "emotion": "surprise"},
        {"speaker": "system", "utterance": "I love it.", "emotion": "happiness"},
    ]
    return {
        "data_split": split,
        "dialogue_id": f"dailydialog-{split}-{number}",
        "original_id": f"{split}-{number}",
        "domains": ["Weather"],
        "turns": turns,
    }


def test_dailydialog_names_its_splits_and_keeps_surprise_as_a_label(tmp_path):
    path = write_json(tmp_path / "d.json", [daily(0, "train"), daily(0, "validation")])

    both, dropped = load("dailydialog", path)
    (valid,), _ = load("dailydialog", path, "valid")

    assert [dialogue.split for dialogue in both] == ["train", "valid"]
    assert valid == both[1]
    assert [said.emotion for said in valid.utterances] == [None, Emotion.JOY]
    assert valid.utterances[0].labels == {"emotion": "surprise"}
    assert dropped.reasons == {Reason.UNKNOWN_EMOTION: 2}


EMPATHETIC = """\
conv_id,utterance_idx,context,prompt,speaker_idx,utterance,selfeval,tags
hit:0_conv:1,1,sentimental,I remember the lake_comma_ and us.,1,I remember "the lake"_comma_ and us.,5|5|5_2|2|5,
hit:0_conv:1,2,sentimental,I remember the lake_comma_ and us.,0,Was it "cold?,5|5|5_2|2|5,
hit:0_conv:1,3,sentimental,I remember the lake_comma_ and us.,1,Very!,5|5|5_2|2|5,,a_pipe_b|No.|Yes_comma_ sir.
hit:1_conv:2,1,proud,My daughter graduated.,4,She did it.,4|5|5_5|5|5,
hit:1_conv:2,2,proud
hit:1_conv:3,1,proud,My daughter graduated.,9,Hello?,4|5|5_5|5|5,
"""


def test_empathetic_dialogues_quotes_nothing_and_writes_commas_as_words(tmp_path):
    """The third row ends with replies to choose from; the fifth is cut short."""
    path = tmp_path / "valid.csv"
    path.write_text(EMPATHETIC, encoding="utf-8")

    (first, second, third), dropped = load("empathetic_dialogues", path, "valid")

    assert [(said.speaker, said.text) for said in first.utterances] == [
        (Speaker.SEEKER, 'I remember "the lake", and us.'),
        (Speaker.SUPPORTER, 'Was it "cold?'),
        (Speaker.SEEKER, "Very!"),
    ]
    assert first.id == first.source_id == "empathetic_dialogues/hit:0_conv:1"
    assert first.situation == "I remember the lake, and us."
    assert first.labels == {"emotion": "sentimental"}
    assert (first.split, first.licence) == ("valid", "CC BY-NC 4.0")
    assert second.source_id != third.source_id
    assert dropped.reasons == {Reason.ANOTHER_LAYOUT: 1}


ANNOMI = (
    *("mi_quality", "transcript_id", "video_title", "topic", "utterance_id", "interlocutor"),
    *("utterance_text", "annotator_id", "main_therapist_behaviour", "client_talk_type"),
)


def test_annomi_keeps_a_text_once_with_the_first_annotators_label(tmp_path):
    path = write_csv(
        tmp_path / "full.csv.gz",
        ANNOMI,
        ("low", 0, "A talk", "walking ", 0, "therapist", "Do you walk?", 1, "question", "n/a"),
        ("low", 0, "A talk", "walking ", 0, "therapist", "Do you walk?", 2, "other", "n/a"),
        ("low", 0, "A talk", "walking ", 1, "client", "I may.", 1, "n/a", "change"),
    )

    (interview,), dropped = load("annomi", path)

    assert [said.text for said in interview.utterances] == ["Do you walk?", "I may."]
    assert interview.utterances[0].labels == {"main_therapist_behaviour": "question"}
    assert interview.labels == {"mi_quality": "low", "topic": "walking", "video_title": "A talk"}
    assert dropped.reasons == {Reason.REPEATED: 1}


def test_avamerg_is_read_by_its_published_layout(tmp_path):
    context = [{"role": "Speaker", "utterance": "I won!"}]
    longer = [
        *context,
        {"role": "listener", "utterance": "What?"},
        {"role": "speaker", "utterance": "Chess."},
    ]
    turns = [
        {"dialogue_history": context, "response": "What?"},
        {"dialogue_history": longer, "response": "Great!"},
    ]

    (dialogue,), _ = load(
        "avamerg",
        write_json(
            tmp_path / "a.json", [{"conversation_id": "7", "topic": "chess", "turns": turns}]
        ),
    )

    assert [said.text for said in dialogue.utterances] == ["I won!", "What?", "Chess.", "Great!"]
    assert dialogue.utterances[3].speaker is Speaker.SUPPORTER


def test_epitome_has_a_level_for_each_answer(tmp_path):
    path = write_csv(
        tmp_path / "e.csv",
        ("sp_id", "rp_id", "seeker_post", "response_post", "level", "rationales"),
        ("s1", "r1", "I am lost.", "So was I.", "2", "So was I|"),
        ("s1", "r2", "I am lost.", "Okay.", "0", ""),
        ("s2", "r3", "I am lost.", "Okay.", "high", ""),
    )

    (first, second), dropped = load("epitome", path)

    assert first.labels == {"rp_id": "r1", "level": "2", "rationales": "So was I"}
    assert first.source_id == second.source_id
    assert dropped.reasons == {Reason.ANOTHER_LAYOUT: 1}


def test_counselchat_loses_its_html_and_knows_a_question_in_both_files(tmp_path):
    old = write_csv(
        tmp_path / "old.csv",
        ("questionID", "questionTitle", "questionText", "answerText", "upvotes", "topic", "split"),
        (0, "How do I sleep?", "I lie awake.", "Rest.", 3, "Sleep ", "val"),
        (0, "How do I sleep?", "I lie awake.", " ", 3, "Sleep ", "val"),
    )
    new = write_csv(
        tmp_path / "new.csv",
        ("questionID", "questionTitle", "questionText", "answerText", "upvotes", "topics"),
        ("a1", "How do I sleep? ", "", "<p>Rest&nbsp;well.</p><p>Walk &#38; read.</p>", 1, "Sleep"),
    )

    (a,), dropped = load("counselchat", old)
    (b,), _ = load("counselchat", new, "test")

    assert (a.split, b.split) == ("valid", "test")
    assert a.source_id == b.source_id
    assert (a.problem, a.labels) == ("sleep", {"upvotes": "3"})
    assert [said.text for said in b.utterances] == ["How do I sleep?", "Rest well.\nWalk & read."]
    assert dropped.reasons == {Reason.NO_PARTNER: 1}


def test_pairs_share_the_source_of_their_growing_context(tmp_path):
    start = "My old car broke down on the way to the coast last week."
    path = write_csv(
        tmp_path / "pairs.csv",
        ("0", f"{start}<|endoftext|>", "Oh no!<|endoftext|>"),
        ("1", f"{start} It was hot.<|endoftext|>", "i like cars . <|endoftext|>"),
        ("0", "short"),
    )

    (good, bad), dropped = load("ed_pairs", path)

    assert good.source_id == bad.source_id
    assert [said.text for said in bad.utterances] == [f"{start} It was hot.", "i like cars ."]
    assert (good.labels, bad.labels) == ({"label": "0"}, {"label": "1"})
    assert dropped.reasons == {Reason.ANOTHER_LAYOUT: 1}


def test_a_csv_without_the_columns_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"p\.csv: missing column hq2, lq1"):
        load("pair", write_csv(tmp_path / "p.csv", ("prompt", "hq1")))
