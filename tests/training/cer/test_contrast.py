"""Opposite versions of judged steps as rows: by hand, and what a line may not be."""

import logging
from pathlib import Path
from typing import Any

import pytest

from compeer_core.cer import Candidate, CerRecord, DecidedBy
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.row_files import write_rows
from tests.training.cer.test_mirror import case, pack, turn
from training.cer import contrast
from training.cer.context_turns import ContextTurn
from training.cer.contrast import Config, contrast_rows
from training.data.records import read_records

READER = DecidedBy(kind="model", name="reader-1")


def judged(name: str, *, both: bool = False) -> CerRecord:
    """A row whose second candidate was judged step by step, or both."""
    written = ContextTurn.model_validate(turn("cat#0")).support_turn()
    candidate = Candidate(
        author="compeer-small",
        reply=written.reply,
        turn=contrast.render(written),
        steps=(True, True, False),
        steps_by=READER,
    )
    corpus = Candidate(author="corpus", reply="Since when?")
    return CerRecord(
        id=name,
        case=case("cat#0", "the cat is gone"),
        first=candidate if both else corpus,
        second=candidate,
    )


def opposite(row: str, **changes: Any) -> dict[str, Any]:
    steps = turn("cat#0", history="The seeker says that the dog is gone.") | {"row": row}
    steps |= {"right": [False, False, True]} | changes
    return {name: value for name, value in steps.items() if name not in {"context", "reply"}}


def config(folder: Path, *opposites: dict[str, Any], rows: tuple[CerRecord, ...]) -> Config:
    path = pack(folder, *opposites)
    write_rows(folder / "judged.jsonl", rows)
    return Config(opposites=path, judged=(folder / "judged.jsonl",), output=folder / "out")


def test_a_row_keeps_its_case_and_reply_and_gets_the_opposite_steps(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = config(tmp_path, opposite("a"), opposite("gone"), rows=(judged("a"), judged("b")))

    contrast.run(settings)

    [row] = read_records(tmp_path / "out" / "rows.jsonl", CerRecord)
    assert row.id == "a/opposite"
    assert row.case == judged("a").case
    assert (row.second, row.preference) == (None, None)
    assert row.first.steps == (False, False, True)
    assert row.first.steps_by is not None
    assert row.first.steps_by.kind == "model"
    written = parse(str(row.first.turn))
    assert written.reasoning.history.text == "The seeker says that the dog is gone."
    assert written.reply == "So the cat is gone."
    assert "dropped: 1 of 2 versions" in caplog.text


def test_a_step_that_the_writer_left_has_no_verdict(tmp_path):
    settings = config(tmp_path, opposite("a", right=[False, None, True]), rows=(judged("a"),))
    [row] = contrast_rows(settings)
    assert row.first.steps == (False, None, True)


@pytest.mark.parametrize(
    ("opposites", "rows", "message"),
    [
        (
            [opposite("a"), opposite("a")],
            (judged("a"),),
            r"jsonl.gz, line 2: a already has an opposite",
        ),
        ([opposite("a")], (judged("b"),), "none of 1 versions belongs to a row"),
        ([opposite("a")], (judged("a", both=True),), "a has 2 turns judged step by step, not one"),
        ([opposite("a", intensity=9)], (judged("a"),), r"jsonl.gz, line 1: .*[Ii]ntensity"),
        ([opposite("a", right=[True])], (judged("a"),), r"jsonl.gz, line 1"),
        ([opposite("a", stage="Later")], (judged("a"),), r"jsonl.gz, line 1: .*stage"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, opposites, rows, message):
    with pytest.raises(ConfigError, match=message):
        list(contrast_rows(config(tmp_path, *opposites, rows=rows)))
