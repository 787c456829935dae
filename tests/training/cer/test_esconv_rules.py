"""ESConv's turns with reasoning by rule as rows: one by hand, the stage, and the public corpus."""

from collections import Counter

import pytest

from compeer_core.cer import SPLITS, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.taxonomy import Strategy
from tests.training.corpora_fixture import esconv_row, write_esconv
from training.cer import esconv_rules
from training.cer.corpora.reading import opening_key
from training.cer.esconv_rules import Config, rule_rows
from training.data.faces import read_faces
from training.data.records import read_records
from training.sft.cer import turns_to_learn

LOST = "My boss fired me, and I am worried."


def test_a_turn_becomes_a_row_by_hand(tmp_path):
    talk = esconv_row(
        [
            ("sys", "Welcome!", "Others"),
            ("usr", LOST),
            ("sys", "When was that?", "Question"),
            ("usr", "On Monday."),
            ("sys", "So it is new.", "Restatement or Paraphrasing"),
        ]
    )
    write_esconv(tmp_path / "train.txt.gz", [talk])

    first, second = rule_rows(Config(esconv=tmp_path, output=tmp_path), "train")

    # the opening "Welcome!" answers nobody
    assert (first.id, second.id) == ("esconv/lines/train/1#0", "esconv/lines/train/1#1")
    case = second.case
    assert (case.dialogue_id, case.round, case.rounds) == ("esconv/lines/train/1", 1, 2)
    key = opening_key(["Welcome!", LOST, "When was that?", "On Monday.", "So it is new."])
    assert case.source_id == f"esconv/{key}"  # as in the rows of `cer`
    assert (case.corpus, case.language, case.licence) == ("esconv", "en", "CC BY-NC 4.0")
    assert [said.text for said in first.case.history] == ["Welcome!", LOST]
    assert [said.speaker for said in case.history[-2:]] == [Speaker.SUPPORTER, Speaker.SEEKER]
    assert (second.first.author, second.first.reply, case.original) == (
        "corpus",
        *["So it is new."] * 2,
    )
    assert second.first.steps is None and second.second is None
    assert case.labels.strategies == (Strategy.RESTATEMENT,)
    assert case.labels.problem == "job crisis"
    turn = parse(first.first.turn)
    assert f'"{LOST}"' in turn.reasoning.history.text
    assert list(turns_to_learn(first, unjudged=True)) == [turn]


def test_older_turns_are_dropped_beyond_the_limit(small_corpora, tmp_path):
    def lengths(limit: int) -> list[int]:
        config = Config(esconv=small_corpora / "esconv", output=tmp_path, history_characters=limit)
        return [len(row.case.history) for row in rule_rows(config, "valid")]

    assert set(lengths(0)) == {1}
    assert max(lengths(100_000)) > 8


def test_the_stage_writes_the_rows_of_all_splits_unless_it_is_a_dry_run(
    small_corpora, tmp_path, caplog
):
    caplog.set_level("INFO")
    config = Config(esconv=small_corpora / "esconv", output=tmp_path / "out")

    esconv_rules.run(config, dry_run=True)
    assert not config.output.exists()
    # five turns of each of 12, 8 and 8 dialogues answer the seeker
    assert "train: 60 turns" in caplog.text and "test: 40 turns" in caplog.text
    with pytest.raises(ConfigError, match="cannot be resumed"):
        esconv_rules.run(config, resume=tmp_path)
    with pytest.raises(ConfigError, match=r"train\.txt\.gz: no such file"):
        esconv_rules.run(config.model_copy(update={"esconv": tmp_path}))

    esconv_rules.run(config)

    rows = list(read_records(config.output / "rows.jsonl", CerRecord))
    assert Counter(row.case.split for row in rows) == {"train": 60, "valid": 40, "test": 40}
    assert len({row.id for row in rows}) == 140
    assert all(not said.images for row in rows for said in row.case.history)


def test_photos_of_one_split_are_never_shown_in_another(small_corpora, tmp_path):
    faces = small_corpora / "faces"
    config = Config(esconv=small_corpora / "esconv", output=tmp_path, faces=faces, face_share=0.8)
    split_of = {f"faces/{face.file}": face.split for face in read_faces(faces)}
    class_of = {f"faces/{face.file}": face.face_class for face in read_faces(faces)}

    for split in SPLITS:
        shown = {
            name
            for row in rule_rows(config, split)
            for utterance in row.case.history
            for name in utterance.images
        }
        assert {split_of[name] for name in shown} == {"train" if split == "train" else "valid"}
        assert len({class_of[name] for name in shown}) > 2


@pytest.mark.parametrize("changes", [{"emotion_type": "bliss"}, {"dialog": None}])
def test_lines_of_another_layout_are_skipped_and_a_file_of_nothing_else_is_an_error(
    tmp_path, caplog, changes
):
    caplog.set_level("INFO")
    dialog = [("usr", LOST), ("sys", "When?", "Question")]
    good, bad = esconv_row(dialog), esconv_row(dialog) | changes
    config = Config(esconv=tmp_path, output=tmp_path)

    write_esconv(tmp_path / "train.txt.gz", [good, bad])
    assert len(list(rule_rows(config, "train"))) == 1
    assert "1 x not in the corpus's layout" in caplog.text
    write_esconv(tmp_path / "train.txt.gz", [bad])
    with pytest.raises(ConfigError, match=r"train\.txt\.gz: no dialogue in ESConv's layout"):
        list(rule_rows(config, "train"))


@pytest.mark.corpora
def test_the_public_corpus_as_rows(corpora, tmp_path):
    config = Config(esconv=corpora / "esconv", output=tmp_path)
    splits: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    for split in ("train", "valid", "test"):
        for row in rule_rows(config, split):
            counts[split] += 1
            splits.setdefault(row.case.source_id, set()).add(split)

    assert counts == {"train": 10_191, "valid": 2156, "test": 1839}
    assert all(len(result) == 1 for result in splits.values())
