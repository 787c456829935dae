"""Closed vocabularies: labels are read strictly, and every corpus label means something or nothing."""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.errors import ConfigError
from compeer_core.taxonomy import (
    ESCONV_STRATEGIES,
    INTENSITIES,
    SENTIMENT_OF,
    Emotion,
    Preference,
    Sentiment,
    Stage,
    Strategy,
    load_strategies,
    map_emotion,
    map_strategy,
    read_label,
)


@pytest.mark.parametrize(
    ("text", "member"),
    [
        ("Question", Strategy.QUESTION),
        ("question.", Strategy.QUESTION),
        ("  SELF-DISCLOSURE ", Strategy.SELF_DISCLOSURE),
        ("Reflection of feelings", Strategy.REFLECTION),
        ("Affirmation  and\nReassurance 。", Strategy.AFFIRMATION),
        ("Questions", None),
        ("Question or Information", None),
        ("*Question*", None),
        ("Self disclosure", None),
        ("", None),
    ],
)
def test_a_label_is_read_but_never_guessed(text, member):
    assert read_label(Strategy, text) is member


@given(st.sampled_from([*Stage, *Sentiment, *Emotion, *Strategy, *Preference]))
def test_every_label_reads_as_itself_in_any_case(member):
    vocabulary = type(member)

    assert read_label(vocabulary, member) is member
    assert read_label(vocabulary, f" {member.upper()}. ") is member


def test_swapping_the_replies_swaps_first_and_second_only():
    assert [preference.swapped() for preference in Preference] == [
        Preference.SECOND,
        Preference.FIRST,
        Preference.BOTH,
        Preference.NEITHER,
    ]


def test_every_emotion_has_a_sentiment():
    assert set(SENTIMENT_OF) == set(Emotion)
    assert SENTIMENT_OF[Emotion.JOY] is Sentiment.POSITIVE
    assert SENTIMENT_OF[Emotion.NEUTRAL] is Sentiment.NEUTRAL
    assert SENTIMENT_OF[Emotion.GUILT] is Sentiment.NEGATIVE


def test_the_sizes_are_those_of_the_sources():
    assert (len(Stage), len(Emotion), len(Strategy), len(Preference)) == (3, 13, 8, 4)
    assert list(INTENSITIES) == [1, 2, 3, 4, 5]


# --- The strategy vocabulary ------------------------------------------------------------------


def test_the_shipped_vocabulary_is_esconvs_in_its_order():
    assert ESCONV_STRATEGIES.names == tuple(Strategy)


def test_every_strategy_is_defined_in_both_languages():
    for entry in ESCONV_STRATEGIES.entries:
        assert entry.definition("en") != entry.definition("zh")
        assert entry.definition("fr") == entry.definition("en")


def test_an_entry_is_found_by_its_name_alone():
    assert ESCONV_STRATEGIES.entry("Others").stages == ()
    assert ESCONV_STRATEGIES.entry("Question").stages == (Stage.EXPLORATION,)
    with pytest.raises(KeyError):
        ESCONV_STRATEGIES.entry("question")


def vocabulary_file(folder: Path, *names: str) -> Path:
    rows = [f'[[strategies]]\nname = {json.dumps(name)}\nen = "e"\nzh = "z"' for name in names]
    path = folder / "own.toml"
    path.write_text("\n".join(['source = "ours"', *rows]), encoding="utf-8")
    return path


def test_a_vocabulary_of_ones_own_is_read_from_a_file(tmp_path):
    vocabulary = load_strategies(vocabulary_file(tmp_path, "Listening", "Emotional mapping"))

    assert vocabulary.names == ("Listening", "Emotional mapping")
    assert vocabulary.read("emotional  MAPPING.") == "Emotional mapping"
    assert vocabulary.read("Question") is None


@pytest.mark.parametrize(
    "names",
    [(), ("",), ("A", "a."), ("two\nlines",), (" space",), ("<reply>",), ("...",)],
)
def test_names_that_could_not_be_read_back_are_refused(tmp_path, names):
    with pytest.raises(ConfigError, match=r"own\.toml"):
        load_strategies(vocabulary_file(tmp_path, *names))


# --- Labels of corpora ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("corpus", "label", "emotion"),
    [
        ("esconv", "anxiety", Emotion.ANXIETY),
        ("mesc", "joy", Emotion.JOY),
        ("meld", "neutral", Emotion.NEUTRAL),
        ("meld", "surprise", None),
        ("emorynlp", "Mad", Emotion.ANGER),
        ("dailydialog", "no emotion", Emotion.NEUTRAL),
        ("dailydialog", "happiness", Emotion.JOY),
        ("escot", "scared", Emotion.FEAR),
        ("escot", "overwhelmed", None),
        ("esconv", "", None),
    ],
)
def test_an_emotion_of_a_corpus(corpus, label, emotion):
    assert map_emotion(corpus, label) is emotion


@pytest.mark.parametrize(
    ("corpus", "label", "strategy"),
    [
        ("esconv", "Reflection of feelings", Strategy.REFLECTION),
        ("esconv", "Questions", Strategy.QUESTION),
        ("esconv", "Greeting", Strategy.OTHERS),
        ("esconv", "Providing Suggestions or Information", Strategy.SUGGESTIONS),
        ("mesc", "open question", Strategy.QUESTION),
        ("mesc", "Advisement", Strategy.SUGGESTIONS),
        ("mesc", "undefined", None),
        ("escot", "Homework Assignments", Strategy.SUGGESTIONS),
        ("meld", "Question", None),
    ],
)
def test_a_strategy_of_a_corpus(corpus, label, strategy):
    assert map_strategy(corpus, label) is strategy


def test_an_unknown_corpus_is_an_error_that_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: esconv, mesc"):
        map_emotion("esconf", "anxiety")


def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode("utf-8-sig")


def esconv_labels(folder: Path) -> Iterator[tuple[str, str]]:
    for split in ("train", "valid", "test"):
        for line in text_of(folder / f"{split}.txt.gz").splitlines():
            dialogue = json.loads(line)
            yield "emotion", dialogue["emotion_type"]
            for turn in dialogue["dialog"]:
                if turn["speaker"] == "sys":
                    yield "strategy", turn["strategy"]
    for dialogue in json.loads(text_of(folder / "FailedESConv.json.gz")):
        yield "emotion", dialogue["emotion_type"]
        for turn in dialogue["dialog"]:
            if strategy := turn["annotation"].get("strategy"):
                yield "strategy", strategy
    for split in ("valid", "test"):
        for line in text_of(folder / f"multiesc_{split}.txt.gz").splitlines():
            for turn in json.loads(line)["dialog"]:
                for strategy in turn.get("all_strategy") or ():
                    yield "strategy", strategy


def mesc_labels(folder: Path) -> Iterator[tuple[str, str]]:
    for row in csv.DictReader(text_of(folder / "MESC.csv.gz").splitlines()):
        yield "emotion", row["Emotion"]
        yield "strategy", row["Strategy"]


def escot_labels(folder: Path) -> Iterator[tuple[str, str]]:
    for split in ("val", "test"):
        for sample in json.loads(text_of(folder / f"data/{split}.json.gz")):
            yield "strategy", sample["cot_data"]["recognized_strategy"]


def dailydialog_labels(folder: Path) -> Iterator[tuple[str, str]]:
    for dialogue in json.loads(text_of(folder / "data/dialogues.json.gz")):
        for turn in dialogue["turns"]:
            yield "emotion", turn["emotion"]


def meld_labels(folder: Path) -> Iterator[tuple[str, str]]:
    for row in csv.DictReader(text_of(folder / "MELD/train_sent_emo.csv.gz").splitlines()):
        yield "emotion", row["Emotion"]


@pytest.mark.parametrize(
    ("corpus", "subfolder", "labels", "unmapped"),
    [
        ("esconv", "esconv", esconv_labels, set()),
        ("mesc", "mesc", mesc_labels, {"undefined"}),
        ("escot", "escot", escot_labels, set()),
        ("dailydialog", "dailydialog", dailydialog_labels, {"surprise"}),
        ("meld", "meld_emorynlp", meld_labels, {"surprise"}),
    ],
)
def test_every_label_of_a_corpus_is_mapped_but_for_those_without_a_counterpart(
    corpora, corpus, subfolder, labels, unmapped
):
    maps = {"emotion": map_emotion, "strategy": map_strategy}
    found = set(labels(corpora / subfolder))

    assert found
    assert {label for kind, label in found if maps[kind](corpus, label) is None} == unmapped
