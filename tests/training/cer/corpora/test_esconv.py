"""ESConv's layouts give one dialogue one source, keep its labels and name what they drop."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Emotion, Strategy
from tests.training.cer.corpora.corpus_files import load, write
from tests.training.corpora_fixture import esconv_row, write_esconv
from training.cer.records import Reason

TALK = [
    ("usr", "Hi there."),
    ("sys", "Hello, how are you?", "Question"),
    ("usr", "Low."),
    ("usr", " My \u2019job\u2019 is gone, and I can't tell anyone at home about it. \U0001f614"),
    ("sys", "It is hard to lose what you worked for.", "Reflection of feelings"),
]
ORIGINAL = esconv_row([]) | {
    "dialog": [
        {"speaker": "speaker", "annotation": {}, "content": "Hi there.\n"},
        {"speaker": "listener", "annotation": {"strategy": "Questions"}, "content": TALK[1][1]},
        {"speaker": "speaker", "annotation": {"feedback": "2"}, "content": "Low.\n"},
        {"speaker": "speaker", "annotation": {}, "content": TALK[3][1]},
        {"speaker": "listener", "annotation": {"strategy": "Direct Guidance"}, "content": "Rest."},
    ]
}
MULTIESC = {
    "emotion_type": "anxiety",
    "problem_type": "job crisis",
    "situation": "It has been a hard month.",
    "init_intensity": 5,
    "final_intensity": 2,
    "dialog": [
        {"text": "Hi there .", "speaker": "usr", "vad": [0.1, 0.2, 0.3], "feedback": None},
        {
            "text": "Hello , how are you ?",
            "speaker": "sys",
            "strategy": "Greeting",
            "all_strategy": ["Greetings", "Question"],
        },
        {
            "text": "Low . My ’ job ’ is gone , and I can ' t tell anyone at home about it .",
            "speaker": "usr",
            "cause": "My ’ job ’ is gone",
            "feedback": "4",
        },
    ],
}
WINDOWS = (
    "1.0 0 0 Hi there. EOS 1.0 1 1 [Questions] Hello, how are you? \r\n"
    "0.0 0 0 Hi there. EOS 0.0 1 1 [Questions] Hello, how are you?  EOS 0.0 0 2 Low. EOS "
    f"0.0 0 3 {TALK[3][1]} EOS 1.0 1 4 [Other] Rest. \r\n"
    "1.0 0 0 Another one. EOS 1.0 1 1 [Other] Yes? \r\n"
)


def layouts(folder: Path) -> Iterator[tuple[str, Path]]:
    yield "esconv", write_esconv(folder / "valid.txt.gz", [esconv_row(TALK)])
    yield "esconv_original", write(folder / "Failed.json", json.dumps([ORIGINAL], indent=1))
    yield "esconv_multiesc", write(folder / "multi.txt", json.dumps(MULTIESC))
    yield "esconv_windows", write(folder / "dev.tsv", WINDOWS)


def test_a_dialogue_has_one_source_in_all_layouts(tmp_path):
    first = {name: load(name, path)[0][0] for name, path in layouts(tmp_path)}

    assert len({dialogue.source_id for dialogue in first.values()}) == 1
    assert len({dialogue.id for dialogue in first.values()}) == 4


def test_lines_keep_the_labels_of_people(tmp_path):
    (dialogue,), dropped = load(*next(layouts(tmp_path)), "valid")

    assert [said.speaker for said in dialogue.utterances[1:4]] == [
        Speaker.SUPPORTER,
        Speaker.SEEKER,
        Speaker.SEEKER,
    ]
    assert dialogue.utterances[3].text.endswith("about it. \U0001f614")
    assert dialogue.utterances[4].strategy is Strategy.REFLECTION
    assert (dialogue.emotion, dialogue.problem) == (Emotion.ANXIETY, "job crisis")
    assert (dialogue.intensity_before, dialogue.intensity_after) == (5, 2)
    assert dialogue.survey == {"seeker_empathy": 4, "seeker_relevance": 5, "supporter_relevance": 4}
    assert (dialogue.split, dialogue.language, dialogue.licence) == ("valid", "en", "CC BY-NC 4.0")
    assert not dropped.reasons


def test_the_original_layout_has_feedback_and_other_names(tmp_path):
    path = write(tmp_path / "Failed.json", json.dumps([ORIGINAL]))

    (dialogue,), _ = load("esconv_original", path)

    assert [said.feedback for said in dialogue.utterances] == [None, None, 2, None, None]
    assert dialogue.utterances[1].strategy is Strategy.QUESTION
    assert dialogue.utterances[4].strategy is Strategy.SUGGESTIONS


def test_multiesc_keeps_cause_and_all_strategies(tmp_path):
    (dialogue,), _ = load("esconv_multiesc", write(tmp_path / "m.txt", json.dumps(MULTIESC)))

    assert dialogue.utterances[2].feedback == 4
    assert dialogue.utterances[2].labels == {"cause": "My ’ job ’ is gone"}
    assert dialogue.utterances[1].strategy is Strategy.OTHERS
    assert dialogue.utterances[1].labels == {"all_strategy": "Greetings; Question"}
    assert (dialogue.intensity_before, dialogue.intensity_after) == (5, 2)


def test_windows_of_one_dialogue_share_its_source(tmp_path):
    dialogues, _ = load("esconv_windows", write(tmp_path / "dev.tsv", WINDOWS))

    assert [len(dialogue.utterances) for dialogue in dialogues] == [2, 5, 2]
    sources = [dialogue.source_id for dialogue in dialogues]
    assert sources[0] == sources[1] != sources[2]
    assert dialogues[1].utterances[-1].text == "Rest."


def test_bad_lines_are_counted_by_reason_and_the_rest_is_read(tmp_path):
    lines = [
        '{"dialog": [',
        json.dumps(esconv_row(TALK)),
        "",
        "[]",
        json.dumps(esconv_row([("bot", "Hi")])),
        json.dumps(esconv_row([("usr", " ")])),
        json.dumps(esconv_row([("usr", "\ud83d")])),  # half a pair cannot be written anywhere
        json.dumps(esconv_row(TALK, initial="9")),
        json.dumps(esconv_row([("usr", "Hi."), ("sys", "Hm.", "Magic")], emotion="bliss")),
    ]

    dialogues, dropped = load("esconv", write(tmp_path / "v.txt", "\n".join(lines)))

    assert len(dialogues) == 2
    assert dialogues[1].utterances[1].labels == {"strategy": "Magic"}
    assert (dialogues[1].emotion, dialogues[1].labels["emotion"]) == (None, "bliss")
    assert dropped.reasons == {
        Reason.NOT_JSON: 1,
        Reason.ANOTHER_LAYOUT: 4,
        Reason.EMPTY_UTTERANCE: 1,
        Reason.NO_UTTERANCES: 1,
        Reason.UNKNOWN_STRATEGY: 1,
        Reason.UNKNOWN_EMOTION: 1,
    }


def test_a_bad_line_is_named_in_the_log_without_its_text(tmp_path, caplog):
    path = write(tmp_path / "v.txt", '\n{"a secret": ')

    with caplog.at_level("DEBUG", "training.cer"):
        load("esconv", path)

    assert f"{path}, 2: not JSON" in caplog.text
    assert "secret" not in caplog.text


def test_an_array_that_breaks_off_gives_what_came_before(tmp_path):
    whole = json.dumps([ORIGINAL, ORIGINAL, ORIGINAL])

    dialogues, dropped = load("esconv_original", write(tmp_path / "f.json", whole[:-20]))

    assert len(dialogues) == 2
    assert dropped.reasons == {Reason.NOT_JSON: 1}


def test_a_missing_or_damaged_file_is_a_config_error(tmp_path):
    whole = gzip.compress(json.dumps(esconv_row(TALK)).encode() * 50)
    (tmp_path / "cut.txt.gz").write_bytes(whole[:-12])

    with pytest.raises(ConfigError, match=r"none\.txt: no such file"):
        load("esconv", tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"cut\.txt\.gz: damaged"):
        load("esconv", tmp_path / "cut.txt.gz")
    with pytest.raises(ConfigError, match="not a JSON array"):
        load("esconv_original", write(tmp_path / "o.json", "{}"))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_multiesc_and_esconv_share_their_sources(corpora, split):
    folder = corpora / "esconv"
    lines, _ = load("esconv", folder / f"{split}.txt.gz", split)
    multiesc, _ = load("esconv_multiesc", folder / f"multiesc_{split}.txt.gz", split)

    sources = {dialogue.source_id for dialogue in lines}
    assert len(sources) == len(lines)
    assert sources == {dialogue.source_id for dialogue in multiesc}
