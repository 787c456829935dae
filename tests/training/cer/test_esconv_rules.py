"""ESConv's turns with reasoning by rule as rows: one by hand, the stage, and the public corpus."""

from collections import Counter

import pytest

from compeer_core.cer import CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.taxonomy import Strategy
from tests.training.corpora_fixture import esconv_row, write_esconv
from training.cer import esconv_rules
from training.cer.corpora.reading import opening_key
from training.cer.esconv_rules import Config, rule_rows
from training.data.samples import read_records
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
    assert (first.id, second.id) == ("esconv/train/0#0", "esconv/train/0#1")
    case = second.case
    assert (case.dialogue_id, case.round, case.rounds) == ("esconv/train/0", 1, 2)
    assert case.source_id == opening_key(
        ["Welcome!", LOST, "When was that?", "On Monday.", "So it is new."]
    )
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
