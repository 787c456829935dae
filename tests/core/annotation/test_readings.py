"""A language model's answers: their file, the random share, and the agreement of people with them."""

import gzip
import json

import pytest

from compeer_core.annotation.annotations import Annotation
from compeer_core.annotation.desk import Desk
from compeer_core.annotation.items import CHECK, add_items
from compeer_core.annotation.owner import DeskOwner
from compeer_core.annotation.readings import draw, read_readings, reader_agreement
from compeer_core.errors import ConfigError
from compeer_core.reasoning import Part
from compeer_core.taxonomy import Preference
from compeer_core.votes.__main__ import main
from compeer_core.votes.store import VoteStore
from tests.cases import case_of
from tests.core.votes.made_up import TURN
from training.cer.steps.annotation import items

ANSWER = {
    "item_id": "i0",
    "annotator": "reader-1",
    "steps": [True, False, True],
    "preference": "first",
    "date": "2026-11-24T12:00:00Z",
}


def written(path, *rows):
    path.write_text("".join(json.dumps({**ANSWER, **row}) + "\n" for row in rows), "utf-8")
    return path


def said(annotator, steps, preference=None, minute=0):
    return Annotation(
        item_id="i",
        annotator=annotator,
        steps=steps,
        preference=preference,
        date=f"2026-11-24T12:{minute:02}:00Z",
    )


# --- the file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"steps": [True, None, True]}, "line 2: item i0: the emotion step has no verdict"),
        ({"steps": [True, True]}, "line 2, column steps: got nothing"),
        ({}, r"line 2: reader-1 has answered about item i0 already \(.*line 1\); give each reader"),
        ({"steps": [True, "maybe", True]}, "line 2, column steps: got 'maybe', allowed"),
        ({"preference": "left"}, "line 2, column preference: got 'left', allowed: first, second"),
        ({"annotator": ""}, "line 2, column annotator: got '', allowed: a text"),
        ({"annotator": None}, "line 2, column annotator: got None, allowed: a text"),
        ({"steps_by": "reader"}, "line 2: unknown column 'steps_by'"),
    ],
)
def test_a_wrong_answer_is_named_by_file_and_line(tmp_path, row, problem):
    path = written(tmp_path / "answers.jsonl", {}, row)

    with pytest.raises(ConfigError, match=rf"answers\.jsonl, {problem}"):
        read_readings(path)


def test_an_empty_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"answers\.jsonl: is empty"):
        read_readings(written(tmp_path / "answers.jsonl"))


def test_two_readers_may_answer_about_one_item(tmp_path):
    path = tmp_path / "answers.jsonl.gz"
    lines = [ANSWER, {**ANSWER, "annotator": "reader-2"}, {**ANSWER, "item_id": "i1"}]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))

    readings = read_readings(path)
    assert {item: [r.annotation.annotator for r in of] for item, of in readings.items()} == {
        "i0": ["reader-1", "reader-2"],
        "i1": ["reader-1"],
    }


# --- the share ----------------------------------------------------------------------------------


def test_the_share_is_exact_repeatable_and_does_not_depend_on_the_order():
    ids = [f"i{number}" for number in range(40)]
    drawn = draw(ids, ids, 0.25, seed=1)

    assert len(drawn) == 10
    assert drawn == sorted(drawn, key=ids.index)
    assert set(draw(ids[::-1], ids[::-1], 0.25, seed=1)) == set(drawn)
    assert draw(ids, ids, 0.25, seed=2) != drawn
    assert draw(ids, ids, 0.001) == draw(ids, ids, 1 / 40)
    assert draw(ids, ids, 1.0) == ids


# --- agreement ----------------------------------------------------------------------------------


def test_agreement_with_the_reader_by_hand():
    """Four items, the history step: equal, equal, stricter, milder: 2 of 4 agree."""
    person = [True, False, False, True]
    reader = [True, False, True, False]
    answers = {f"i{n}": [said("ann", (person[n], True, True), Preference.FIRST)] for n in range(4)}
    readings = {
        f"i{n}": [said("reader", (reader[n], True, True), Preference.FIRST)] for n in range(4)
    }

    measured = reader_agreement(9, answers, readings)
    history = measured.questions[Part.HISTORY]
    assert (measured.items, measured.answered, history.n_items) == (9, 4, 4)
    assert history.raw.value == 0.5
    assert (measured.stricter[Part.HISTORY], measured.milder[Part.HISTORY]) == (1, 1)
    assert measured.questions[Part.EMOTION].raw.value == 1.0
    assert measured.stricter[Part.EMOTION] == measured.milder[Part.EMOTION] == 0
    assert measured.questions[Part.REPLY].n_items == 4


def test_the_person_who_answered_first_is_compared_with_the_label_readers_agree_on():
    answers = {"i": [said("ann", (True,) * 3), said("bo", (False,) * 3, minute=1)]}
    readings = {"i": [said("r1", (True, True, False)), said("r2", (True, False, False))]}

    measured = reader_agreement(1, answers, readings)
    assert [measured.questions[part].n_items for part in (Part.HISTORY, Part.EMOTION)] == [1, 0]
    assert measured.questions[Part.HISTORY].raw.value == 1.0
    assert measured.milder[Part.STRATEGY] == 1
    assert measured.questions[Part.REPLY].n_items == 0


# --- the batch ----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Twenty items of the pipeline with their key, and a reader's answers about them."""
    shown, key = tmp_path / "items.jsonl", tmp_path / "key.jsonl"
    cases = [case_of(f"d{n}", f"I failed {n}.", ("faces/a.png",)) for n in range(20)]
    items([(case, "policy", TURN.format("Tell me.")) for case in cases], shown, key, seed=3)
    ids = [json.loads(line)["id"] for line in shown.read_text().splitlines()]
    answers = written(tmp_path / "answers.jsonl", *({"item_id": item} for item in ids))
    return shown, key, answers, ids


def test_people_answer_a_random_share_without_seeing_the_reader(store, files):
    shown, key, answers, _ = files
    desk, owner = Desk(store), DeskOwner(store)
    added = add_items(desk, shown, key=key, read_by=answers, share=0.25, seed=1)

    assert (added.items, added.left_out) == (5, {"not in the random share": 15})
    ann = desk.log_in(desk.add_annotator("ann"))
    [batch] = owner.batches()
    assert (batch.name, batch.read, batch.twice) == (CHECK, 5, 0)
    while work := desk.next_item(ann, "tab"):
        assert "reader" not in work.item.model_dump_json()
        assert work.pictures == frozenset()
        wanted = Preference.SECOND
        given = wanted if work.shown_first == "first" else wanted.swapped()
        desk.answer(ann, work.item.id, steps=(True, True, True), preference=given)

    measured = owner.reader_agreement(CHECK)
    assert (measured.items, measured.answered) == (5, 5)
    assert measured.questions[Part.HISTORY].raw.value == 1.0
    assert measured.questions[Part.EMOTION].raw.value == 0.0
    assert measured.milder[Part.EMOTION] == 5
    assert measured.questions[Part.REPLY].raw.value == 0.0
    assert [each.annotator for each in owner.readings(CHECK)] == ["reader-1"] * 5
    assert list(owner.readings("other")) == []
    assert {each.annotator for each in desk.annotations(batch=CHECK)} == {"ann"}
    assert list(desk.settled()) == []  # one person's answer and a model's are no people's label


def test_an_answer_about_an_unknown_item_imports_nothing(sqlite_url, files, capsys):
    shown, _, answers, ids = files
    written(answers, {"item_id": ids[0]}, {"item_id": "d9/nowhere"})
    command = ["items", str(shown), "--read-by", str(answers), "--no-pictures"]

    assert main([*command, "--database-url", sqlite_url]) == 2
    assert "answers.jsonl, line 2: there is no item d9/nowhere in" in capsys.readouterr().err
    written(answers, {"item_id": ids[0]}, {"item_id": ids[1], "preference": None})
    assert main([*command, "--database-url", sqlite_url]) == 2
    assert "line 2: item " in (told := capsys.readouterr().err)
    assert "has two replies, and no preference is given" in told
    with VoteStore(sqlite_url) as store:
        assert DeskOwner(store).batches() == []
    written(answers, {"item_id": ids[0]})
    assert main([*command, "--database-url", sqlite_url]) == 0
    assert capsys.readouterr().out == "1 items\nleft out, the reader has not answered: 19\n"


def test_a_key_or_row_whose_source_is_missing_is_named(sqlite_url, files, capsys):
    shown, key, _, _ = files
    lines = [json.loads(line) for line in key.read_text().splitlines()]
    del lines[2]["case"]["source_id"]
    key.write_text("\n".join(map(json.dumps, lines)))
    command = ["items", str(shown), "--key", str(key), "--no-pictures"]

    assert main([*command, "--database-url", sqlite_url]) == 2
    assert "key.jsonl, line 3: case.source_id: Field required" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "-1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(sqlite_url, files, share, capsys):
    command = ["items", str(files[0]), "--no-pictures", f"--share={share}"]

    assert main([*command, "--database-url", sqlite_url]) == 2
    assert "must be above 0 and at most 1" in capsys.readouterr().err
