"""Items out of files: rows of CER, items of the pipeline with and without their key, pictures."""

import json

import PIL.Image
import pytest

from compeer_core.annotation.annotations import read_annotations
from compeer_core.annotation.desk import Desk
from compeer_core.cer import Candidate, CerRecord, DecidedBy
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from compeer_core.votes.__main__ import main
from compeer_core.votes.store import VoteStore
from tests.cases import case_of
from tests.core.votes.made_up import TURN
from training.cer.steps.annotation import items
from training.data.records import read_records

PERSON = DecidedBy(kind="person", name="somebody")


def case(number, images=()):
    return case_of(f"d{number}", f"I failed {number}.", images)


def record(number, turn=TURN, images=()):
    return CerRecord(
        id=f"policy-{number}",
        case=case(number, images),
        first=Candidate(author="corpus", reply="Oh no."),
        second=Candidate(
            author="policy",
            reply="Tell me.",
            turn=turn.format("Tell me."),
            steps=(True, False, True),
            steps_by=PERSON,
        ),
        preference=Preference.FIRST,
        preference_by=PERSON,
    )


def added(path, url, *options):
    return main(["items", str(path), "--database-url", url, *map(str, options)])


def answered_by_two(url):
    """Let two people say the same about all there is; return what they were shown."""
    shown = []
    with VoteStore(url) as store:
        desk = Desk(store)
        for name in ("ann", "bo"):
            person = desk.log_in(desk.add_annotator(name))
            while work := desk.next_item(person, "tab"):
                shown.append(work.item)
                wanted = Preference.SECOND
                given = wanted if work.shown_first == "first" else wanted.swapped()
                desk.answer(person, work.item.id, steps=(True, True, False), preference=given)
    return shown


def test_rows_of_cer_become_items_without_their_labels_and_come_out_with_new_ones(
    url, tmp_path, capsys
):
    rows = [record(1), record(2, turn="<history>Nothing"), record(3)]
    write_rows(tmp_path / "rows.jsonl", rows)

    assert added(tmp_path / "rows.jsonl", url) == 0
    assert capsys.readouterr().out == "2 items\nleft out, no complete reasoning to judge: 1\n"
    assert added(tmp_path / "rows.jsonl", url) == 0
    assert "0 items\nleft out, already there: 2" in capsys.readouterr().out
    shown = answered_by_two(url)
    told = "".join(item.model_dump_json() for item in shown)
    assert not any(word in told for word in ("policy", "corpus", "somebody"))

    out = tmp_path / "out" / "desk.jsonl"
    assert main(["export", str(out), "--what", "desk", "--database-url", url]) == 0
    assert capsys.readouterr().out == "2 rows\n"
    written = list(read_records(out, CerRecord))
    assert [each.id for each in written] == ["policy-1", "policy-3"]
    assert [each.preference for each in written] == [Preference.SECOND] * 2
    assert written[0].second.steps == (True, True, False)
    assert written[0].second.steps_by == DecidedBy(kind="people", name="ann, bo")


@pytest.mark.parametrize("with_key", [True, False])
def test_items_of_the_pipeline_come_with_their_key_or_without(url, tmp_path, with_key, capsys):
    shown, key = tmp_path / "items.jsonl", tmp_path / "key.jsonl"
    items([(case(n), "policy", TURN.format("Tell me.")) for n in range(3)], shown, key, seed=3)

    assert added(shown, url, *(["--key", key] if with_key else [])) == 0
    answered_by_two(url)
    capsys.readouterr()
    out, answers = tmp_path / "desk.jsonl", tmp_path / "answers.csv"
    assert main(["export", str(out), "--what", "desk", "--database-url", url]) == 0
    assert main(["export", str(answers), "--what", "annotations", "--database-url", url]) == 0

    assert capsys.readouterr().out == f"{3 if with_key else 0} rows\n6 annotations\n"
    assert len(list(read_annotations(answers))) == 6
    for each in read_records(out, CerRecord):
        assert each.preference is Preference.SECOND
        judged = each.first if each.first.turn else each.second
        assert judged.steps == (True, True, False)


def test_pictures_are_stored_with_the_item(url, tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", [record(1, images=("faces/a.png",))])
    assert added(tmp_path / "rows.jsonl", url) == 2
    assert "a.png" in capsys.readouterr().err

    (tmp_path / "faces").mkdir()
    PIL.Image.new("RGB", (4, 3), "teal").save(tmp_path / "faces" / "a.png")
    assert added(tmp_path / "rows.jsonl", url) == 0
    with VoteStore(url) as store:
        desk = Desk(store)
        ann = desk.log_in(desk.add_annotator("ann"))
        work = desk.next_item(ann, "tab")
        assert desk.picture(ann, work.item.id, 0).width == 4


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname"])
def test_no_picture_is_read_outside_the_folder(sqlite_url, tmp_path, name, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    PIL.Image.new("RGB", (4, 3)).save(tmp_path / "secret.png")
    write_rows(folder / "rows.jsonl", [record(1, images=(name,))])

    assert added(folder / "rows.jsonl", sqlite_url) == 2
    assert "is not a picture below" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        (["nothing"], "line 1: is not JSON"),
        (["{}"], "line 1: id: Field required"),
        ([record(1).model_dump_json(), '{"case": 1}'], "line 2"),
    ],
)
def test_a_wrong_file_is_one_sentence_and_adds_nothing(sqlite_url, tmp_path, lines, said, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))

    assert added(path, sqlite_url) == 2
    assert said in capsys.readouterr().err
    with VoteStore(sqlite_url) as store:
        desk = Desk(store)
        assert desk.progress(desk.log_in(desk.add_annotator("ann"))).to_do == 0


def test_a_key_of_other_items_is_rejected(sqlite_url, tmp_path, capsys):
    shown, key = tmp_path / "items.jsonl", tmp_path / "key.jsonl"
    items([(case(1), "policy", TURN.format("Tell me."))], shown, key, seed=3)
    row = json.loads(key.read_text())
    key.write_text(json.dumps({**row, "original": None}))
    assert added(shown, sqlite_url, "--key", key) == 2
    assert "different replies" in capsys.readouterr().err
    key.write_text(json.dumps({**row, "item_id": "x"}))
    assert added(shown, sqlite_url, "--key", key) == 2
    assert "the key has no item" in capsys.readouterr().err
