"""Graded replies as pairs: by hand, and what a line may not be."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from compeer_core.cer import Candidate, CerRecord
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.taxonomy import Preference
from tests.training.cer.test_corrected import correction
from tests.training.cer.test_mirror import case, contexts, pack
from training.cer import graded
from training.cer.graded import Config, graded_rows

REPLIES = ["The cat is gone.", "So sad, your cat is gone.", "Good for the cat."]


def line(**changes: Any) -> dict[str, Any]:
    line = {"context": "cat#0", "replies": REPLIES, "grades": [1, 2, 0]}
    return line | {"pairs": [[1, 2], [0, 2]], "held_out": False} | changes


def config(folder: Path, *lines: dict[str, Any]) -> Config:
    file = folder / "graded.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    known = contexts(folder, case("cat#0", "the cat is gone"))
    turns = pack(folder, correction(emotion_text="They feel sad."))
    return Config(replies=file, turns=(turns,), contexts=(known,), output=folder / "out")


def by_preference(row: CerRecord) -> tuple[Candidate, ...]:
    """Return the better and the worse turn."""
    is_first = row.preference is Preference.FIRST
    return row.candidates if is_first else row.candidates[::-1]


def test_pairs_follow_the_corrected_steps_by_hand(tmp_path):
    rows = list(graded_rows(config(tmp_path, line())))

    assert [tuple(turn.reply for turn in by_preference(row)) for row in rows] == [
        ("So sad, your cat is gone.", "Good for the cat."),
        ("The cat is gone.", "Good for the cat."),
    ]
    assert [row.id for row in rows] == ["cat#0/graded-0", "cat#0/graded-1"]
    assert rows[0].preference_by.kind == "model"
    better, worse = (parse(turn.turn) for turn in by_preference(rows[0]))
    assert better.reasoning == worse.reasoning
    assert better.reasoning.emotion.text == "They feel sad."
    assert better.reply == "So sad, your cat is gone."
    assert rows[0].case.split == "train"


def test_the_better_reply_is_on_either_side_about_as_often(tmp_path):
    lines = [line(context=f"cat#{number}") for number in range(100)]
    cases = [case(f"cat#{number}", "the cat is gone") for number in range(100)]
    settings = config(tmp_path, *lines)
    turns = pack(tmp_path, *(correction(context=f"cat#{number}") for number in range(100)))
    known = contexts(tmp_path, *cases)

    rows = list(graded_rows(settings.model_copy(update={"turns": (turns,), "contexts": (known,)})))

    first = sum(row.preference is Preference.FIRST for row in rows)
    assert len(rows) == 200 and 70 < first < 130


def test_pairs_that_are_held_out_are_for_validation(tmp_path, caplog):
    caplog.set_level("INFO")
    graded.run(config(tmp_path, line(held_out=True)))

    assert "train: 0 pairs, valid: 2 pairs" in caplog.text
    assert len((tmp_path / "out" / "rows.jsonl").read_text("utf-8").splitlines()) == 2


def test_replies_may_follow_the_policys_own_steps(tmp_path):
    corrected = next(graded_rows(config(tmp_path, line())))
    steps = corrected.first.turn.partition("<reply>")[0].replace("They feel sad.", "They are sad.")
    own = line(steps=steps, policy="small-3")

    rows = list(graded_rows(config(tmp_path, own).model_copy(update={"turns": ()})))

    assert [row.first.author for row in rows] == ["small-3", "small-3"]
    assert parse(rows[0].first.turn).reasoning.emotion.text == "They are sad."
    assert rows[0].second.reply == corrected.second.reply


def test_a_dry_run_writes_nothing(tmp_path):
    graded.run(config(tmp_path, line()), dry_run=True)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(), line()], "line 2: context cat#0 occurs twice"),
        ([line(context="dog#0")], "line 1: context dog#0 has no corrected turn"),
        ([line(steps="<history>a cat")], "line 1: steps: "),
        ([line(grades=[1, 2])], "line 1: .*3 replies, but 2 grades"),
        ([line(grades=[1, 2, 3])], "line 1: grades"),
        ([line(pairs=[[1, 3]])], r"line 1: .*pair \[1, 3\]: there are 3 replies"),
        ([line(pairs=[[2, 1]])], r"line 1: .*pair \[2, 1\]: the first has no better grade"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        list(graded_rows(config(tmp_path, *lines)))
