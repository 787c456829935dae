"""Decontamination of the train split: near-duplicates of held-out dialogues, sources of role cards."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from compeer_core.errors import ConfigError
from compeer_core.row_files import write_rows
from tests.training.cer.source_dialogues import source_dialogue
from training.cer.records import DroppedDialogue, SourceDialogue, StepReport
from training.cer.steps.decontamination import (
    SOURCE_OF_CARD,
    RoleCard,
    decontaminate,
    read_cards,
    terms,
)
from training.cer.steps.ingest import CorpusFile, collect
from training.data.near_duplicates import Rule
from training.data.records import read_records

LONG = "nobody told me that the old house by the river would be sold before the winter came round again"
OTHER = "my sister has not called me once since the storm and she will not answer the door to me"


def talk(id: str, split: str, *texts: str, source: str | None = None, **fields: str):
    values = {"corpus": "esconv", "source_id": source or id} | fields
    return source_dialogue(id, *texts, split=split, **values)


def cleaned(
    folder: Path,
    dialogues: Iterable[SourceDialogue],
    cards: Sequence[RoleCard] = (),
    **keys: float,
) -> tuple[list[str], list[DroppedDialogue], StepReport]:
    write_rows(folder / "in.jsonl", dialogues)
    report = decontaminate(
        folder / "in.jsonl",
        folder / "kept.jsonl",
        folder / "dropped.jsonl",
        Rule.model_validate(keys),
        cards,
    )
    kept = [dialogue.id for dialogue in read_records(folder / "kept.jsonl", SourceDialogue)]
    return kept, list(read_records(folder / "dropped.jsonl", DroppedDialogue)), report


# --- Near-duplicates --------------------------------------------------------------------------


def test_near_duplicates_leave_train_and_are_named_with_their_split(tmp_path):
    kept, dropped, report = cleaned(
        tmp_path,
        [
            talk("train/same", "train", "Hello!", "Oh?", LONG.upper() + "!!"),
            talk("train/greeting", "train", "Good evening to you, how are you?", "Oh?"),
            talk("train/inserted", "train", f"well {OTHER} now", "Right, yes?"),
            talk("test/1", "test", "Good evening to you, how are you?", f"{LONG}.", "Hm."),
            talk("valid/1", "valid", f"{OTHER}!", "Yes?"),
        ],
    )

    assert kept == ["train/greeting", "test/1", "valid/1"]
    assert [(each.id, each.reason, each.detail) for each in dropped] == [
        ("train/same", "near-duplicate of a test dialogue", "test/1"),
        ("train/inserted", "near-duplicate of a valid dialogue", "valid/1"),
    ]
    assert report.dropped == {
        "esconv": {
            "near-duplicate of a test dialogue": 1,
            "near-duplicate of a valid dialogue": 1,
        }
    }
    assert (report.read, report.written) == (5, 3)
    assert report.figures["held-out dialogues repeated in train"] == 2


def test_valid_and_test_stay_although_they_repeat_each_other(tmp_path):
    rows = [talk(f"{split}/1", split, LONG, "Oh?") for split in ("valid", "test")]

    assert cleaned(tmp_path, rows)[0] == ["valid/1", "test/1"]


# --- Role cards -------------------------------------------------------------------------------


def write_cards(path: Path) -> Path:
    cards = [
        {
            "base": "Age: Not mentioned\nGender: Male\nOccupation: Student\nProblem: His dog"
            " Rufus was run over, and his landlord refuses another one.",
            "res": "家庭生活",
            "source": "ESconv",
            "base_biaozhu": "年龄：未提及",
            "language": "english",
            "id": 32001,
        },
        {"base": "年龄：青年\n问题：失眠，担心高考失败。", "source": "smile", "id": 21026},
        {"base": "Problem: Lost a bag.", "source": "ExTES", "id": 53096},
    ]
    path.write_text(json.dumps(cards, ensure_ascii=False), encoding="utf-8")
    return path


def test_cards_are_read_by_their_problem_and_their_corpus(tmp_path):
    dog, exam, bag = read_cards([write_cards(tmp_path / "card.json")])

    assert dog.problem == "His dog Rufus was run over, and his landlord refuses another one."
    assert (dog.name, dog.corpus) == ("card.json#32001", "esconv")
    assert (exam.problem, exam.corpus) == ("失眠，担心高考失败。", "smile")
    assert bag.corpus == ""


def test_the_source_of_a_card_leaves_training_in_all_its_layouts(tmp_path):
    others = [
        talk(f"train/{number}", "train", f"I lost my job in month {number}.", "Oh?")
        for number in range(8)
    ]
    dog = "My landlord will not let me have another dog."
    rows = [
        *others,
        talk("train/dog", "train", dog, "Why?", situation="Rufus was run over.", source="dog"),
        talk("train/window", "train", "Hello.", "Hello.", source="dog"),
        talk("train/other corpus", "train", dog, "Rufus was run over.", corpus="mesc"),
        talk("train/said by the supporter", "train", "Yes.", f"{dog} Rufus was run over."),
    ]

    kept, dropped, report = cleaned(
        tmp_path, rows, read_cards([write_cards(tmp_path / "card.json")])
    )

    assert {each.id for each in dropped} == {"train/dog", "train/window"}
    assert {(each.reason, each.detail) for each in dropped} == {(SOURCE_OF_CARD, "card.json#32001")}
    assert report.figures["role cards of ESconv"] == "1 of 1 matched"
    assert report.figures["role cards of smile"] == "0 of 1 matched"
    assert report.figures["role cards of ExTES"] == "1, no loader for this corpus"
    assert len(kept) == 10


def test_a_source_that_is_tested_anyway_stays(tmp_path):
    rows = [
        talk("test/dog", "test", "My dog Rufus was run over.", "Oh."),
        *(talk(f"train/{n}", "train", f"I lost my job in month {n}.", "Oh?") for n in range(8)),
    ]

    kept, _, report = cleaned(tmp_path, rows, read_cards([write_cards(tmp_path / "card.json")]))

    assert "test/dog" in kept
    assert report.dropped == {}
    assert report.figures["role cards of ESconv"] == "1 of 1 matched"


def test_without_cards_the_report_says_so(tmp_path):
    _, _, report = cleaned(tmp_path, [talk("train/1", "train", "Hi.", "Hi.")])

    assert "none given" in str(report.figures["role cards"])


def test_words_are_compared_by_their_stems_and_chinese_by_pairs():
    assert terms("Studying, studied & STUDIES") == ["study", "stud", "stud"]
    assert terms("worried worries worry") == ["worr", "worr", "worr"]
    assert terms("don't") == ["dont"]
    assert terms("我失眠") == ["我失", "失眠"]


@pytest.mark.parametrize(
    "content", ["", "{}", '[{"base": "x"}]', "[1]", '[{"base": 1, "source": 2}]']
)
def test_a_file_in_another_format_is_rejected(tmp_path, content):
    path = tmp_path / "card.json"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"card\.json: not an array of role cards"):
        read_cards([path])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cards([tmp_path / "none.json"])


# --- Public corpora ---------------------------------------------------------------------------

KNOWN_SOURCES = {
    # By their words, read by a person: the id of a card, and how the situation of its source begins.
    32365: "I love my parents but they want me to pursue business major",
    32032: "I had a huge fight with my girlfriend and she left me.",
    32194: "I lost my job, my car was just repossessed",
    32063: "No money to celebrate christiamass",
    32059: "I had my heart set on a Veterinary Technology program",
    32097: "I have been dismissed from medical school.",
    32382: "Working as a teacher, I find it very hard",
}


def test_esconv_sources_of_the_cards_leave_training(corpora, tmp_path):
    """79 of 80 cards find a dialogue; 7 whose source is plain to a reader find that one."""
    collect(
        [
            CorpusFile(loader="esconv", path=f"esconv/{split}.txt.gz", split=split)
            for split in ("train", "valid", "test")
        ],
        corpora,
        tmp_path / "in.jsonl",
        seed=0,
    )
    cards = corpora / "esc_eval" / "data" / "card_high_en.json"

    report = decontaminate(
        tmp_path / "in.jsonl",
        tmp_path / "kept.jsonl",
        tmp_path / "dropped.jsonl",
        Rule(),
        read_cards([cards]),
    )

    assert report.figures["role cards of ESconv"] == "79 of 80 matched"
    left_out = {
        each.id: each.detail for each in read_records(tmp_path / "dropped.jsonl", DroppedDialogue)
    }
    by_situation = {
        dialogue.situation or "": dialogue.id
        for dialogue in read_records(tmp_path / "in.jsonl", SourceDialogue)
    }
    for card, beginning in KNOWN_SOURCES.items():
        (result,) = (
            id for situation, id in by_situation.items() if situation.startswith(beginning)
        )
        assert left_out[result].endswith(f"#{card}")
    assert 30 < report.dropped["esconv"][SOURCE_OF_CARD] < 80


def test_dailydialog_loses_what_its_test_set_repeats(corpora, tmp_path):
    collect(
        [CorpusFile(loader="dailydialog", path="dailydialog/data/dialogues.json.gz")],
        corpora,
        tmp_path / "in.jsonl",
        seed=0,
    )

    report = decontaminate(
        tmp_path / "in.jsonl", tmp_path / "kept.jsonl", tmp_path / "dropped.jsonl", Rule()
    )

    assert report.dropped["dailydialog"].keys() == {
        "near-duplicate of a test dialogue",
        "near-duplicate of a valid dialogue",
    }
    assert report.dropped_count == 623
