"""SFT on turns of CER: which turns are learnt, as which rows, and a run that leaves a policy."""

import json
from pathlib import Path

import pytest

from compeer_core.cer import CerRecord
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import parse, render
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from tests.training.reward_model.test_train import RULE, record
from training.data.faces import read_faces
from training.finetune.base_model import LoraShape
from training.finetune.sft_trainer import FineTuning
from training.sft import cer
from training.sft.cer import Config, training_rows, turns_to_learn

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


def judged(number: int = 0, **changes) -> CerRecord:
    """A row whose first turn has three right steps, and whose second is the corpus's reply."""
    row = record(number, **changes)
    first = row.first.model_copy(update={"steps": (True, True, True)})
    return row.model_copy(update={"first": first, "preference": Preference.FIRST})


def learnt(row: CerRecord, **options) -> list[str]:
    return [one if isinstance(one, str) else "learnt" for one in turns_to_learn(row, **options)]


def test_a_turn_without_a_fault_is_learnt_by_hand():
    assert learnt(judged()) == ["learnt", "without reasoning"]
    (turn, _) = turns_to_learn(judged())
    assert turn == parse(judged().first.turn)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"preference": Preference.SECOND}, "with the worse reply"),
        ({"preference": Preference.NEITHER}, "with the worse reply"),
        ({"preference": Preference.BOTH}, "learnt"),
        ({"preference": None, "preference_by": None}, "learnt"),
        ({"steps": (True, False, True)}, "with a step that is judged wrong"),
        ({"steps": (True, None, True)}, "with a step that nobody judged"),
        ({"steps": None, "steps_by": None}, "with a step that nobody judged"),
        ({"turn": "<reply>Why?</reply>"}, "incomplete"),
    ],
)
def test_a_turn_with_a_fault_is_left_out_unless_faults_are_learnt_too(changes, reason):
    row = judged()
    of_turn = {key: value for key, value in changes.items() if key in type(row.first).model_fields}
    row = row.model_copy(
        update={
            "first": row.first.model_copy(update=of_turn),
            **{key: value for key, value in changes.items() if key not in of_turn},
        }
    )

    assert learnt(row)[0] == reason
    assert learnt(row, with_faults=True)[0] == (reason if reason == "incomplete" else "learnt")


def test_both_turns_of_a_row_may_be_learnt_and_the_worse_is_not():
    row = judged()
    second = row.first.model_copy(update={"author": "other"})
    row = row.model_copy(update={"second": second})

    assert learnt(row) == ["learnt", "with the worse reply"]
    assert learnt(row.model_copy(update={"preference": Preference.BOTH})) == ["learnt", "learnt"]
    swapped = row.model_copy(update={"preference": Preference.SECOND, "preference_by": RULE})
    assert learnt(swapped) == ["with the worse reply", "learnt"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": None, "steps_by": None}, "learnt"),
        ({"steps": (True, None, True)}, "learnt"),
        ({"steps": (False, None, True)}, "with a step that is judged wrong"),
        ({"turn": "<reply>Why?</reply>", "steps": None, "steps_by": None}, "incomplete"),
    ],
)
def test_a_turn_that_nobody_judged_is_learnt_where_that_is_allowed(changes, reason):
    row = judged()
    row = row.model_copy(update={"first": row.first.model_copy(update=changes)})

    assert learnt(row, unjudged=True)[0] == reason
    worse = row.model_copy(update={"preference": Preference.SECOND})
    assert learnt(worse, unjudged=True)[0] == (
        "with the worse reply" if reason == "learnt" else reason
    )


@pytest.fixture
def config(small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    face = f"faces/{read_faces(small_corpora / 'faces')[0].file}"
    rows = [judged(number, images=(face,) if number == 0 else ()) for number in range(4)]
    write_rows(tmp_path / "train.jsonl", [*rows, record(5), judged(6, split="test")])
    return Config(
        records=(tmp_path / "train.jsonl",),
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "run",
        training=FineTuning(batch_size=2, max_steps=2, lr=1e-3, log_steps=1, freeze_vision=False),
    )


def test_a_row_has_the_prompt_of_the_policy_and_the_turn_as_completion(config):
    rows = training_rows(config)

    assert len(rows) == 4  # neither the faulty turn nor that of the test split
    first = judged(0)
    (asked,) = policy_messages(first.case.dialogue(), "trained")
    assert rows[1]["prompt"][0]["content"] == [{"type": "text", "text": "I lost my job 1."}]
    assert [block["type"] for block in rows[0]["prompt"][0]["content"]] == ["image", "text"]
    assert rows[0]["prompt"][0]["content"][1]["text"] == asked.text
    assert len(rows[0]["images"]) == 1 and rows[1]["images"] == []
    (answer,) = rows[0]["completion"]
    assert answer["content"][0]["text"] == render(parse(first.first.turn))


def test_the_stage_leaves_metrics_and_a_policy_that_loads(config, caplog):
    caplog.set_level("INFO")
    cer.run(config, dry_run=True)
    assert not config.output.exists()
    told = "4 turns to learn; skipped: 2 of another split, 1 with a step that is judged wrong, "
    assert f"{told}5 without reasoning" in caplog.text

    cer.run(config)

    rows = (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss"] for row in map(json.loads, rows) if "loss" in row]
    # 600 tokens, none of them learnt yet: ln 600 = 6.4
    assert losses == pytest.approx([6.4, 6.4], abs=0.3)
    assert (config.output / "model" / "model.safetensors").is_file()


def test_unusable_data_is_reported_before_anything_is_written(config, tmp_path):
    def changed(**changes) -> Config:
        return Config.model_validate(config.model_dump() | changes)

    write_rows(tmp_path / "faulty.jsonl", [record(1)])
    with pytest.raises(ConfigError, match=r"no turn of the train split to learn .*judged wrong"):
        cer.run(changed(records=[tmp_path / "faulty.jsonl"]))
    with pytest.raises(ConfigError, match="4 longer than 10 characters"):
        cer.run(changed(longest=10))
    with pytest.raises(CheckpointError, match="no such folder"):
        cer.run(changed(base="no/where/at-all"))
    with pytest.raises(ConfigError, match="no such file"):
        cer.run(changed(records=[tmp_path / "none.jsonl"]))
    assert not config.output.exists()


def test_rows_that_nobody_judged_are_learnt_where_the_config_says_so(config, tmp_path):
    row = judged()
    first = row.first.model_copy(update={"steps": None, "steps_by": None})
    write_rows(tmp_path / "unjudged.jsonl", [row.model_copy(update={"first": first})])
    changed = config.model_copy(update={"records": (tmp_path / "unjudged.jsonl",)})

    with pytest.raises(ConfigError, match="1 with a step that nobody judged"):
        training_rows(changed)
    assert len(training_rows(changed.model_copy(update={"unjudged": True}))) == 1


def test_an_adapter_is_trained_where_a_shape_is_given(config):
    lora = config.training.model_copy(update={"lora": LoraShape(rank=2, alpha=4)})

    cer.run(config.model_copy(update={"training": lora}))

    assert (config.output / "adapter" / "adapter_model.safetensors").is_file()
    assert not (config.output / "model").exists()


def test_a_share_of_the_turns_is_drawn_by_the_seed(config):
    half = training_rows(config.model_copy(update={"row_share": 0.5}))

    assert len(half) == 2
    texts = [row["prompt"][0]["content"][-1]["text"] for row in training_rows(config)]
    drawn = [row["prompt"][0]["content"][-1]["text"] for row in half]
    assert drawn == [text for text in texts if text in drawn]
