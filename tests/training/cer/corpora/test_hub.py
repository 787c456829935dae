"""Data sets of the hub in the place of files.

The library takes a folder `owner/name` of the working directory for the data set of that name, so
real rows are streamed here and no network is needed.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets.exceptions import DatasetNotFoundError

from compeer_core.errors import ConfigError
from tests.training.cer.corpora.corpus_files import load, write_csv
from tests.training.corpora_fixture import esconv_row, esconv_rows
from training.cer.corpora.hub import HubName, hub_parts, read_hub_name
from training.cer.records import Reason


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The folder of a data set named owner/name."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_name_has_four_parts():
    assert read_hub_name("hub:a/b@refs/convert/parquet:plain#train") == HubName(
        "a/b", "refs/convert/parquet", "plain", "train"
    )
    for wrong in ("hub:esconv", "hub:a/b c", "hub:a/b#", "hub:a/b/c"):
        with pytest.raises(ConfigError, match="owner"):
            read_hub_name(wrong)


def test_text_rows_are_the_lines_of_the_file(hub):
    """ESConv's data set is made of text files: its rows have one column, `text`."""
    file = write_lines(hub / "train.txt", esconv_rows(5))
    with file.open("a", encoding="utf-8") as more:
        more.write('{"half": \n')

    from_file, _ = load("esconv", file, "train")
    from_hub, dropped = load("esconv", "hub:owner/name#train", "train")

    assert from_hub == from_file
    assert len(from_hub) == 5
    assert dropped.reasons == {Reason.NOT_JSON: 1}


def test_json_rows_are_the_objects_of_the_file_though_all_have_all_columns(hub):
    """`strategy` is null in every row of a seeker; a file just does not have it."""
    file = write_lines(hub / "train.jsonl", esconv_rows(4))

    assert load("esconv", "hub:owner/name#train", "train") == load("esconv", file, "train")


def test_table_rows_are_those_of_a_csv(hub):
    columns = {
        "conv_id": ["hit:0_conv:1", "hit:0_conv:1"],
        "utterance_idx": [1, 2],
        "context": ["proud", "proud"],
        "prompt": ["I ran_comma_ far", "I ran_comma_ far"],
        "speaker_idx": [1, 0],
        "utterance": ['I ran_comma_ "far"', "Well done!"],
        "selfeval": ["5|5|5_2|2|5", None],
        "tags": [None, None],
    }
    pyarrow.parquet.write_table(pa.table(columns), hub / "test.parquet")

    (dialogue,), dropped = load("empathetic_dialogues", "hub:owner/name#test", "test")

    assert [said.text for said in dialogue.utterances] == ['I ran, "far"', "Well done!"]
    assert dialogue.situation == "I ran, far"
    assert not dropped.reasons


def test_a_column_of_integers_with_a_gap_is_read_as_integers(hub):
    """The library reads such a column as floats: 3.0, and nan or null."""
    rows = [("q", "Why?", "Why me?", "Who knows.", 3), ("q", "Why?", "Why me?", "Nobody.", "")]
    columns = ("questionID", "questionTitle", "questionText", "answerText", "upvotes")
    write_csv(hub / "train.csv", columns, *rows)

    (first, second), _ = load("counselchat", "hub:owner/name#train")

    assert first.labels == {"upvotes": "3"}
    assert second.labels == {}


def test_all_splits_are_listed_with_our_names(hub):
    for split in ("train", "validation", "test"):
        write_lines(
            hub / f"{split}.jsonl", [esconv_row([("usr", "Hi."), ("sys", "Hi.", "Others")])]
        )

    parts = hub_parts("hub:owner/name", None)

    assert {(str(part.path), part.split) for part in parts} == {
        ("hub:owner/name#train", "train"),
        ("hub:owner/name#validation", "valid"),
        ("hub:owner/name#test", "test"),
    }
    (only,) = hub_parts("hub:owner/name", "valid")
    assert str(only.path) == "hub:owner/name#validation"
    (named,) = hub_parts("hub:owner/name#validation", None)
    assert named.split == "valid"
    assert len(load("esconv", "hub:owner/name")[0]) == 3  # a name without a split is all of them
    with pytest.raises(ConfigError, match="no split dev; known"):
        hub_parts("hub:owner/name", "dev")
    with pytest.raises(ConfigError, match="no such split; known"):
        load("esconv", "hub:owner/name#dev")


def test_rows_of_another_layout_are_one_error_and_not_thousands_of_drops(hub):
    """DailyDialog as the hub has it: lists of utterances and numbers, not ConvLab's records."""
    write_lines(hub / "train.jsonl", [{"dialog": ["Hi.", "Hi."], "emotion": [0, 4]}] * 3)

    with pytest.raises(ConfigError, match="do not have the layout of this loader"):
        load("dailydialog", "hub:owner/name#train")


def test_a_table_without_the_columns_says_which(hub):
    write_lines(hub / "train.jsonl", [{"prompt": "Hm."}])

    with pytest.raises(ConfigError, match="missing column hq1"):
        load("pair", "hub:owner/name#train")


@pytest.mark.parametrize("name", ["smile", "cpsycoun_d", "ed_pairs", "esconv_windows"])
def test_a_loader_of_files_rejects_a_hub_name(name):
    with pytest.raises(ConfigError, match=r"read from its own files.*hf download"):
        load(name, "hub:owner/name#train")


def test_without_a_network_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError) as caught:
        load("esconv", "hub:thu-coai/esconv#train", "train")

    assert "hub:thu-coai/esconv#train: the hub is not reachable" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_data_set_made_by_a_script_points_to_its_converted_rows(hub):
    (hub / "name.py").write_text("raise SystemExit", encoding="utf-8")

    with pytest.raises(ConfigError, match="@refs/convert/parquet"):
        load("esconv", "hub:owner/name#train")


def test_an_unknown_name_and_a_lost_network_give_different_errors(tmp_path, monkeypatch):
    def unknown(*_: Any, **__: Any) -> None:
        raise DatasetNotFoundError("Dataset 'a/b' doesn't exist\non the Hub")

    monkeypatch.setattr("datasets.load_dataset", unknown)

    with pytest.raises(
        ConfigError, match="no such data set or revision on the hub, or it is private"
    ):
        load("esconv", "hub:a/b#train")
