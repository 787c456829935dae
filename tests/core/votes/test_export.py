"""Votes as rows of CER, and back: what is written, what is left out, what training makes of it."""

import csv
import json
from collections import Counter
from dataclasses import replace

import pytest

from compeer_core.cer import CerRecord
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import SideStatus
from compeer_core.votes.export import Moved, export_cer, import_cer
from compeer_core.votes.store import VoteStore
from tests.core.votes.made_up import HISTORY, NOON, TURN, fought, plan, result
from training.data.pictures import Pictures
from training.data.records import read_records
from training.reward_model.conversations import Kind, conversations

FORMS = pytest.mark.parametrize("form", ["jsonl", "csv"])
NASTY = '=1+1\n"quoted", \'; DROP TABLE votes; --\u202e\u200b <b> 我'


def records(path):
    return list(read_records(path, CerRecord))


def asking(text):
    return Dialogue((Utterance(Speaker.SEEKER, text),), id=text)


def test_a_vote_is_a_row_that_says_all_that_was_compared(store, tmp_path):
    battle = fought(store)
    store.cast(battle, "ann", "second", steps=((True, False, None), None))
    [vote] = store.votes()

    assert export_cer(tmp_path / "votes.jsonl", store) == Moved(1, {})

    [row] = records(tmp_path / "votes.jsonl")
    assert row.id.endswith(f"@{battle}")
    assert [(said.speaker, said.text) for said in row.case.history] == [
        (said.speaker, said.text) for said in HISTORY
    ]
    assert (row.case.round, row.case.rounds, row.case.language) == (1, 2, "en")
    assert (row.first.author, row.first.reply) == ("policy", "What happened?")
    assert row.first.turn == TURN.format("What happened?")
    assert row.first.steps == (True, False, None)
    assert (row.second.author, row.second.steps) == ("base", None)
    assert row.preference is Preference.SECOND
    assert (row.preference_by.kind, row.preference_by.name) == ("person", vote.voter)
    assert row.first.steps_by == row.preference_by


def test_training_reads_exported_rows_as_they_are(store, tmp_path):
    store.cast(fought(store), "ann", "second", steps=((True, True, False), None))
    export_cer(tmp_path / "votes.jsonl", store)
    [row] = records(tmp_path / "votes.jsonl")

    [unified] = conversations(row, Kind.UNIFIED)
    answers = [m.content[0] for m in unified if m.role == "assistant"][-4:]
    assert answers == ["True", "True", "False", "Second"]
    assert len(list(conversations(row, Kind.PROCESS))) == 3
    [outcome] = conversations(row, Kind.OUTCOME)
    assert outcome[-1].content == ("Second",)


def test_pictures_lie_beside_the_file_where_training_looks_for_them(store, tmp_path, picture):
    shown = HISTORY.adding(Utterance(Speaker.SEEKER, "Look.", (picture(3),)))
    for _ in range(2):
        store.cast(fought(store, dialogue=shown), "ann", "first")
    export_cer(tmp_path / "votes.jsonl", store)

    opened = Pictures(tmp_path).shown(records(tmp_path / "votes.jsonl")[0].case.history)

    assert [len(of_one) for of_one in opened] == [0, 0, 1]
    assert opened[2][0].to_pil().tobytes() == picture(3).to_pil().tobytes()
    assert len(list((tmp_path / "votes_pictures").iterdir())) == 1


def test_skipped_votes_are_counted_by_reason(store, tmp_path):
    for changes in ({}, {"keep_words": False}, {"blind": False}):
        store.cast(fought(store, **changes), "ann", "first")
    store.cast(fought(store), "ann", "first", dwell_ms=3)
    taken_back = fought(store)
    store.cast(taken_back, "ann", "first")
    store.undo(taken_back, "ann")
    stopped = store.open_battle(plan())
    for side, status in enumerate([SideStatus.STOPPED, SideStatus.FINISHED]):
        store.finish_side(stopped.id, side, result(status=status))
    store.cast(stopped.id, "ann", "first")

    left_out = {
        "stopped": 1,
        "the names were visible": 1,
        "the words are not stored": 1,
        "too_fast": 1,
    }
    assert export_cer(tmp_path / "votes.jsonl", store) == Moved(1, left_out)
    everything = export_cer(tmp_path / "all.jsonl", store, doubtful=True)
    assert everything == Moved(4, {"the words are not stored": 1})


def test_an_export_is_as_of_a_time(store, tmp_path, clock):
    battle = fought(store)
    store.cast(battle, "ann", "first")
    clock.forward(minutes=1)
    store.revise(battle, "ann", "both")

    export_cer(tmp_path / "then.jsonl", store, as_of=NOON)
    export_cer(tmp_path / "now.jsonl", store)

    assert [row.preference for row in records(tmp_path / "then.jsonl")] == [Preference.FIRST]
    assert [row.preference for row in records(tmp_path / "now.jsonl")] == [Preference.BOTH]


def test_talks_that_open_alike_are_in_one_split(sqlite_url, tmp_path):
    with VoteStore(sqlite_url) as store:
        for number in range(60):
            for text in (f"My story {number % 30}.", f" my STORY  {number % 30}."):
                store.cast(fought(store, dialogue=asking(text)), "ann", "first")
        export_cer(tmp_path / "votes.jsonl", store, doubtful=True)
    splits = {}
    for row in records(tmp_path / "votes.jsonl"):
        splits.setdefault(row.case.source_id, set()).add(row.case.split)

    assert len(splits) == 30
    assert all(len(found) == 1 for found in splits.values())
    counted = Counter(next(iter(found)) for found in splits.values())
    assert counted["train"] > 15
    assert set(counted) == {"train", "valid", "test"}


def test_steps_of_a_turn_without_reasoning_are_left_out(store, tmp_path):
    battle = store.open_battle(plan()).id
    store.finish_side(battle, 0, replace(result("Bare."), turn="Bare."))
    store.finish_side(battle, 1, result())
    store.cast(battle, "ann", "first", steps=((True, True, True), None))
    export_cer(tmp_path / "votes.jsonl", store)

    [row] = records(tmp_path / "votes.jsonl")
    assert (row.first.turn, row.first.steps, row.first.reply) == (None, None, "Bare.")


# --- there and back -----------------------------------------------------------------------------


@FORMS
def test_rows_come_back_as_they_went(store, tmp_path, form, sqlite_url, clock):
    for preference in Preference:
        clock.forward(seconds=1)
        battle = store.open_battle(plan("bo", dialogue=asking(f"{preference} {NASTY}"))).id
        for side in (0, 1):
            store.finish_side(battle, side, result(f"{side} {NASTY}"))
        store.cast(battle, "bo", preference, steps=(None, (True, None, False)))
    there, back = tmp_path / f"there.{form}", tmp_path / f"back.{form}"
    export_cer(there, store)

    with VoteStore(f"{sqlite_url}.other") as other:
        assert import_cer(there, other) == Moved(4, {})
        assert import_cer(there, other) == Moved(0, {"already there": 4})
        export_cer(back, other)
        votes = list(other.votes())

    assert sorted(back.read_text("utf-8").splitlines()) == sorted(
        there.read_text("utf-8").splitlines()
    )
    assert {vote.flags for vote in votes} == {("imported",)}
    assert {vote.voter for vote in votes} == {vote.voter for vote in store.votes()}
    assert {vote.preference for vote in votes} == set(Preference)
    assert {(vote.left, vote.right) for vote in votes} == {("policy", "base")}


@FORMS
def test_rows_are_not_read_into_the_store_that_they_are_from(store, tmp_path, form):
    store.cast(fought(store), "ann", "first")
    export_cer(tmp_path / f"votes.{form}", store)

    assert import_cer(tmp_path / f"votes.{form}", store) == Moved(0, {"already there": 1})
    assert len(list(store.votes())) == 1


def test_only_what_people_prefer_is_read(store, tmp_path, sqlite_url):
    store.cast(fought(store), "ann", "first", steps=((True, True, True), None))
    path = tmp_path / "votes.jsonl"
    export_cer(path, store)
    row = json.loads(path.read_text("utf-8"))
    by_rule = row | {"id": "r", "preference_by": {"kind": "rule", "name": "silver"}}
    only_steps = row | {"id": "s", "preference": None, "preference_by": None}
    path.write_text("\n".join(map(json.dumps, (by_rule, only_steps, row))), "utf-8")

    with VoteStore(f"{sqlite_url}.other") as other:
        moved = import_cer(path, other)

    assert moved == Moved(1, {"not decided by people": 1, "without a preference": 1})


def test_what_was_imported_can_be_deleted(store, tmp_path, sqlite_url):
    store.cast(fought(store), "ann", "first")
    export_cer(tmp_path / "votes.jsonl", store)
    [vote] = store.votes()

    with VoteStore(f"{sqlite_url}.other") as other:
        import_cer(tmp_path / "votes.jsonl", other)
        assert other.delete_voter(f"imported:{vote.voter}").votes == 1
        assert list(other.votes()) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("votes.txt", "", "jsonl or .csv"),
        ("votes.jsonl", "{}\n", "line 1: id"),
        ("votes.jsonl", "not json\n", "line 1"),
        ("votes.jsonl", b"\xff\xfe", "not UTF-8"),
        ("votes.csv", "id,preference\n1,first\n", "no column row"),
        ("votes.csv", "row\n{}\n", "row 2"),
    ],
)
def test_invalid_files_are_reported_and_leave_the_store_unchanged(
    store, tmp_path, name, content, said
):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ConfigError, match=said) as caught:
        import_cer(path, store)
    assert str(path) in str(caught.value)
    assert list(store.votes()) == []


def test_of_a_file_with_a_broken_row_nothing_is_read(store, tmp_path, sqlite_url):
    path = tmp_path / "votes.jsonl"
    store.cast(fought(store), "ann", "first")
    export_cer(path, store)
    path.write_text(path.read_text("utf-8") + "{}\n", "utf-8")

    with VoteStore(f"{sqlite_url}.other") as other, pytest.raises(ConfigError, match="line 2"):
        import_cer(path, other)
    with VoteStore(f"{sqlite_url}.other") as other:
        assert list(other.votes()) == []


def test_a_file_that_cannot_be_read_or_written_is_reported(store, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="cannot be read"):
        import_cer(tmp_path / "none.jsonl", store)
    with pytest.raises(ConfigError, match="cannot be written"):
        export_cer(tmp_path / "file" / "votes.jsonl", store)


def test_a_spreadsheet_runs_nothing(store, tmp_path):
    store.cast(fought(store, dialogue=asking("=HYPERLINK(1)")), "ann", "first")
    battle = store.open_battle(plan()).id
    for side in (0, 1):
        store.finish_side(battle, side, result("=1+1"))
    store.cast(battle, "ann", "first")
    export_cer(tmp_path / "votes.csv", store)

    with (tmp_path / "votes.csv").open(encoding="utf-8-sig", newline="") as file:
        cells = [cell for row in csv.DictReader(file) for cell in row.values()]
    assert "'=1+1" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
