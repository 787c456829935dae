"""Corrections of a policy's turns as rows: by hand, turns without a mistake, and what a line may not be."""

from pathlib import Path
from typing import Any

import pytest

from compeer_core.cer import Candidate, CerRecord
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse, render
from compeer_core.taxonomy import Preference
from tests.training.cer.test_mirror import case, contexts, pack, turn
from training.cer import corrected
from training.cer.context_turns import ContextTurn
from training.cer.corrected import Config, corrected_rows

OWN = "So the cat is gone. What do you like most about it?"


def correction(context: str = "cat#0", *, own: str = OWN, **changes: Any) -> dict[str, Any]:
    """A turn as the writer left it, beside the policy's, which replies `own`."""
    by_policy = ContextTurn.model_validate(turn(context, reply=own))
    return turn(
        context,
        policy="small",
        own=render(by_policy.support_turn()),
        answers=own != OWN,
        may_hurt=False,
        **changes,
    )


def rows(folder: Path, *turns: dict[str, Any]) -> list[Any]:
    known = contexts(folder, case("cat#0", "the cat is gone"), case("dog#0", "the dog is gone"))
    config = Config(turns=(pack(folder, *turns),), contexts=(known,), output=folder / "out")
    return list(corrected_rows(config))


def by_author(row: CerRecord) -> dict[str, Candidate]:
    return {candidate.author: candidate for candidate in row.candidates}


def test_a_corrected_turn_is_preferred_to_the_policys_own_by_hand(tmp_path):
    (row,) = rows(tmp_path, correction())

    turns = by_author(row)
    assert row.id == "cat#0/corrected"
    assert turns["llm"].reply == parse(turns["llm"].turn).reply == "So the cat is gone."
    assert turns["small"].reply == parse(turns["small"].turn).reply == OWN
    preferred = row.candidates[[Preference.FIRST, Preference.SECOND].index(row.preference)]
    assert preferred.author == "llm"
    assert turns["llm"].steps == turns["small"].steps == (True, True, True)
    assert row.preference_by.kind == turns["small"].steps_by.kind == "model"


def test_a_corrected_step_was_wrong_but_a_strategy_may_only_differ(tmp_path):
    changes = {"emotion_text": "They feel sad.", "strategy_text": "Saying it back helps."}
    (row,) = rows(tmp_path, correction(own="So the cat is gone.", **changes))

    turns = by_author(row)
    assert turns["small"].steps == (True, False, None)
    assert turns["llm"].steps == (True, True, True)
    assert row.preference is row.preference_by is None  # both replies are the same


def test_the_corrected_turn_comes_first_in_half_of_the_rows(tmp_path):
    names = [f"cat{number}#0" for number in range(200)]
    known = contexts(tmp_path, *(case(name, "the cat is gone") for name in names))
    turns = pack(tmp_path, *map(correction, names))

    made = corrected_rows(Config(turns=(turns,), contexts=(known,), output=tmp_path))

    assert 70 < sum(row.first.author == "llm" for row in made) < 130


def test_a_turn_without_a_mistake_has_no_rival(tmp_path):
    (row,) = rows(tmp_path, correction(own="So the cat is gone."))

    assert (row.first.author, row.second, row.preference) == ("small", None, None)


def test_the_stage_counts_and_a_dry_run_writes_nothing(tmp_path, caplog):
    caplog.set_level("INFO")
    known = contexts(tmp_path, case("cat#0", "the cat is gone"), case("dog#0", "the dog is gone"))
    turns = pack(
        tmp_path,
        correction(),
        correction("dog#0", own="So the cat is gone.", emotion_text="They feel sad."),
    )
    config = Config(turns=(turns,), contexts=(known,), output=tmp_path / "out")

    corrected.run(config, dry_run=True)
    assert not (tmp_path / "out").exists()
    corrected.run(config)

    assert "train: 2 turns corrected, 0 right as they are" in caplog.text
    assert len((tmp_path / "out" / "rows.jsonl").read_text("utf-8").splitlines()) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (correction() | {"own": "So the cat is gone."}, "line 1: own: not a complete supporter"),
        (correction(reply=OWN), "line 1: the reply was called wrong and is not corrected"),
        (correction(emotion_text='They say "my cat".'), 'line 1: "my cat" is quoted'),
        ({k: v for k, v in correction().items() if k != "answers"}, "line 1: answers"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path, wrong)
