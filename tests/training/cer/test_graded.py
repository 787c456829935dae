"""Graded turns as pairs and judged turns: by hand, and what a line may not be."""

from pathlib import Path
from typing import Any

import pytest

from compeer_core.cer import Candidate, CerRecord
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Preference
from tests.cases import turn_text
from tests.training.cer.test_mirror import case, contexts, pack
from training.cer import graded
from training.cer.graded import Config, graded_rows

REPLIES = ["The cat is gone.", "So sad, your cat is gone.", "Good for the cat."]
TURNS = [
    {"text": turn_text(reply), "grade": grade}
    for reply, grade in zip(REPLIES, (1, 2, 0), strict=True)
]


def line(**changes: Any) -> dict[str, Any]:
    line = {"context": "cat#0", "policy": "small", "turns": TURNS}
    return line | {"pairs": [[1, 2], [0, 2]], "held_out": False} | changes


def config(folder: Path, *lines: dict[str, Any]) -> Config:
    known = contexts(folder, case("cat#0", "the cat is gone"))
    return Config(turns=pack(folder, *lines), contexts=(known,), output=folder / "out")


def by_preference(row: CerRecord) -> tuple[Candidate, ...]:
    """Return the better and the worse turn."""
    is_first = row.preference is Preference.FIRST
    return row.candidates if is_first else row.candidates[::-1]


def test_pairs_by_hand(tmp_path):
    rows = list(graded_rows(config(tmp_path, line())))

    assert [tuple(turn.reply for turn in by_preference(row)) for row in rows] == [
        ("So sad, your cat is gone.", "Good for the cat."),
        ("The cat is gone.", "Good for the cat."),
    ]
    assert [row.id for row in rows] == ["cat#0/graded-0", "cat#0/graded-1"]
    assert rows[0].preference_by.kind == "model"
    assert by_preference(rows[0])[0].turn == TURNS[1]["text"]
    assert rows[0].case.split == "train" and rows[0].first.author == "small"


def test_judged_steps_have_a_row_of_their_own(tmp_path):
    judged = [TURNS[0] | {"steps": [True, False, True]}, *TURNS[1:]]

    *pairs, row = graded_rows(config(tmp_path, line(turns=judged)))

    assert len(pairs) == 2 and pairs[1].first.steps is None
    assert row.id == "cat#0/turn-0" and row.second is None
    assert row.first.steps == (True, False, True) and row.first.steps_by.kind == "model"


def test_a_line_may_bring_its_own_history(tmp_path):
    history = ["my dog died", "I am sorry.", "he was nine"]

    row, _ = graded_rows(config(tmp_path, line(context="short-1#2", history=history)))

    assert [(turn.speaker, turn.text) for turn in row.case.history] == [
        ("seeker", "my dog died"),
        ("supporter", "I am sorry."),
        ("seeker", "he was nine"),
    ]
    assert (row.case.dialogue_id, row.case.round, row.case.rounds) == ("short-1", 1, 2)


def test_the_better_reply_is_on_either_side_about_as_often(tmp_path):
    lines = [line(context=f"cat#{number}") for number in range(100)]
    cases = [case(f"cat#{number}", "the cat is gone") for number in range(100)]
    settings = config(tmp_path, *lines)
    known = contexts(tmp_path, *cases)

    rows = list(graded_rows(settings.model_copy(update={"contexts": (known,)})))

    first = sum(row.preference is Preference.FIRST for row in rows)
    assert len(rows) == 200 and 70 < first < 130


def test_pairs_that_are_held_out_are_for_validation(tmp_path, caplog):
    caplog.set_level("INFO")
    graded.run(config(tmp_path, line(held_out=True)))

    assert "train: 0 pairs, 0 turns, valid: 2 pairs, 0 turns" in caplog.text
    assert len((tmp_path / "out" / "rows.jsonl").read_text("utf-8").splitlines()) == 2


def test_a_dry_run_writes_nothing(tmp_path):
    graded.run(config(tmp_path, line()), dry_run=True)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(), line()], "line 2: context cat#0 occurs twice"),
        ([line(turns=[{"text": "<history>a cat", "grade": 1}], pairs=[])], "line 1: a turn: "),
        ([line(turns=[TURNS[0] | {"grade": 3}], pairs=[])], "line 1: turns.*grade"),
        ([line(pairs=[[1, 3]])], r"line 1: .*pair \[1, 3\]: there are 3 turns"),
        ([line(pairs=[[2, 1]])], r"line 1: .*pair \[2, 1\]: the first has no better grade"),
        ([line(context="dog#0")], "holds the context of none of 1 turns"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        list(graded_rows(config(tmp_path, *lines)))
