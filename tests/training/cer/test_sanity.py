"""Pairs of a reply and its corruption: by hand, by split, and one of a dialogue."""

from collections import Counter
from pathlib import Path

import pytest

from compeer_core.cer import Candidate, CerRecord
from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from tests.cases import case_of
from training.cer import sanity
from training.cer.sanity import FILLER, INSULTS, Config, sanity_rows
from training.data.records import read_records

NAMES = {"other-dialogue", "shuffled", "doubled", "filler", "gibberish", "insult", "sugar"}


def reply_of(number: int) -> str:
    return f"You said that exam {number} went badly. What will you do now?"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    rows = [
        CerRecord(
            id=f"r{number}-{round_}",
            case=case_of(
                f"d{number}", split=split, id=f"d{number}#{round_}", round=round_, rounds=2
            ),
            first=Candidate(author="llm", reply=reply_of(number)),
        )
        for number in range(60)
        for round_ in range(2)
        for split in [("train", "valid", "test")[number % 3]]
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    return Config(
        records=(tmp_path / "rows.jsonl",),
        output=tmp_path / "out",
        pairs={"train": 10, "test": 15},
    )


def test_corruptions_by_hand(config):
    rows = list(sanity_rows(config))

    counts = Counter((row.case.split, row.id.rpartition("/")[2]) for row in rows)
    assert {name for _, name in counts} == NAMES
    assert {split for split, _ in counts} == {"train", "test"}
    assert counts["test", "gibberish"] == 15 and 13 <= counts["test", "other-dialogue"] <= 15
    for row in rows:
        name = row.id.rpartition("/")[2]
        replies = (row.first.reply, row.second.reply)
        own, corrupted = replies if row.preference is Preference.FIRST else replies[::-1]
        assert own == reply_of(int(row.case.dialogue_id[1:]))
        assert row.preference_by.kind == "rule" and row.preference_by.name == f"sanity/{name}"
        lengths = [len(word) for word in own.split()]
        match name:
            case "doubled":
                assert corrupted == f"{own} {own}"
            case "shuffled":
                assert sorted(corrupted.split()) == sorted(own.split()) and corrupted != own
            case "gibberish":
                assert [len(word) for word in corrupted.split()] == lengths
            case "sugar":
                assert own in corrupted and len(corrupted) > len(own) + 20
            case "other-dialogue":
                assert corrupted != own and corrupted.startswith("You said that exam")


def test_fixed_texts_of_train_and_test_differ_and_both_sides_occur(config):
    rows = list(sanity_rows(config))

    for texts in (FILLER, INSULTS):
        used = {
            split: {c.reply for row in rows if row.case.split == split for c in row.candidates}
            & {*texts}
            for split in ("train", "test")
        }
        assert used["train"] <= {*texts[:4]} and used["test"] <= {*texts[4:]}
        assert used["train"] and used["test"]
    sides = Counter(row.preference for row in rows)
    assert min(sides[Preference.FIRST], sides[Preference.SECOND]) > len(rows) / 4


def test_a_dialogue_gives_one_pair_of_each_corruption(config):
    rows = list(sanity_rows(config))

    pairs = Counter((row.case.source_id, row.id.rpartition("/")[2]) for row in rows)
    assert max(pairs.values()) == 1
    assert rows == list(sanity_rows(config))


def test_the_stage_writes_rows_and_refuses_to_resume(config, caplog):
    caplog.set_level("INFO")
    sanity.run(config, dry_run=True)
    assert not config.output.exists() and "test, insult: 15 pairs" in caplog.text

    sanity.run(config)
    assert [*read_records(config.output / "rows.jsonl", CerRecord)] == [*sanity_rows(config)]
    with pytest.raises(ConfigError, match="leave out --resume"):
        sanity.run(config, resume=config.output)
