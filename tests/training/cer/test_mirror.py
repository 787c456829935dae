"""Mirroring turns as rows: by hand, photo draws, and what a line may not be."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from compeer_core.cer import Candidate, Case, CerRecord
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.row_files import write_rows
from tests.cases import case_of, said
from training.cer import mirror
from training.cer.context_turns import ContextTurn
from training.cer.mirror import Config, mirror_rows
from training.data.records import read_records

ASSETS = Path(__file__).resolve().parents[3] / "assets" / "cer"


def case(name: str, *messages: str) -> Case:
    return case_of(
        name.partition("#")[0],
        id=name,
        source_id="cat",
        corpus="written",
        history=said(*messages),
        original="Since when?",
    )


def contexts(folder: Path, *cases: Case) -> Path:
    path = folder / "contexts.jsonl"
    first = Candidate(author="corpus", reply="Since when?")
    write_rows(path, [CerRecord(id=case.id, case=case, first=first) for case in cases])
    return path


def turn(context: str, **changes: Any) -> dict[str, Any]:
    return {
        "context": context,
        "history": "The seeker says that the cat is gone.",
        "stage": "Exploration",
        "emotion_text": 'They feel sad because "the cat is gone".',
        "sentiment": "Negative",
        "emotion": "Sadness",
        "intensity": 4,
        "strategy_text": "Saying the loss of the cat back shows that we heard it.",
        "strategy": "Restatement or Paraphrasing",
        "reply": "So the cat is gone.",
    } | changes


def pack(folder: Path, *turns: dict[str, Any]) -> Path:
    path = folder / "mirror.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(t) + "\n" for t in turns).encode()))
    return path


def config(folder: Path, turns: Path, *paths: Path) -> Config:
    return Config(turns=(turns,), contexts=paths, output=folder / "out")


def test_a_turn_answers_its_context_by_hand(tmp_path):
    known = contexts(tmp_path, case("cat#0", "the cat is gone"), case("dog#0", "the dog is gone"))
    settings = config(tmp_path, pack(tmp_path, turn("cat#0")), known)

    mirror.run(settings)

    (row,) = read_records(tmp_path / "out" / "rows.jsonl", CerRecord)
    assert (row.id, row.case.id, row.first.author) == ("cat#0/mirror", "cat#0", "llm")
    assert row.case.history[-1].text == "the cat is gone"
    assert row.case.original == "Since when?"
    assert row.first.reply == parse(row.first.turn).reply == "So the cat is gone."
    assert row.first.steps is None and row.second is None


def test_every_draw_of_a_photo_gets_the_turn(tmp_path):
    draws = [case(name, "the cat is gone") for name in ("cat#0", "cat~2#0", "cat~2x#0")]
    settings = config(tmp_path, pack(tmp_path, turn("cat#0")), contexts(tmp_path, *draws))

    assert [row.case.id for row in mirror_rows(settings)] == ["cat#0", "cat~2#0"]


def test_turns_without_their_context_are_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    turns = pack(tmp_path, turn("cat#0"), turn("esconv/lines/train/1#0"))

    mirror.run(config(tmp_path, turns, contexts(tmp_path, case("cat#0", "the cat is gone"))))

    assert "dropped: 1 of 2 turns" in caplog.text
    assert "train: 1 turns, valid: 0 turns, test: 0 turns" in caplog.text


def test_a_dry_run_writes_nothing(tmp_path):
    known = contexts(tmp_path, case("cat#0", "the cat is gone"))

    mirror.run(config(tmp_path, pack(tmp_path, turn("cat#0")), known), dry_run=True)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([turn("dog#0")], "contexts.jsonl: holds the context of none of 1 turns; name the rows"),
        ([turn("cat#0"), turn("cat#0")], "line 2: context cat#0 already has a turn, in .*line 1"),
        ([turn("cat")], "line 1: context: String should match"),
        ([turn("cat#0", intensity=9)], "line 1: "),
        ([turn("cat#0", reply="")], "line 1: "),
        ([turn("cat#0", emotion_text='They say "my dog".')], 'line 1: "my dog" is quoted, but no'),
        ([turn("cat#0", emotion_text='They say "Since when".')], 'line 1: "Since when" is quoted'),
    ],
)
def test_a_wrong_line_is_named(tmp_path, turns, message):
    known = contexts(tmp_path, case("cat#0", "the cat is gone", "Since when?", "the cat is gone"))

    with pytest.raises(ConfigError, match=message):
        list(mirror_rows(config(tmp_path, pack(tmp_path, *turns), known)))


def test_a_missing_file_and_a_resume_are_refused(tmp_path):
    missing = config(tmp_path, tmp_path / "none.jsonl.gz", tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"none.jsonl.gz: no such file"):
        list(mirror_rows(missing))
    with pytest.raises(ConfigError, match="leave out --resume"):
        mirror.run(missing, resume=tmp_path)


def test_the_shipped_turns_are_readable_and_hold_no_context():
    with gzip.open(ASSETS / "mirror.jsonl.gz", "rt", encoding="utf-8") as file:
        turns = [ContextTurn.model_validate_json(line) for line in file]

    assert len({turn.context for turn in turns}) == len(turns)
    assert {turn.context.partition("/")[0] for turn in turns} > {"esconv"}
    assert all(turn.reply.count("?") <= 1 for turn in turns)
