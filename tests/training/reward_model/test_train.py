"""The reward stage: from rows of CER to an adapter."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from compeer_core.cer import Candidate, CerRecord, DecidedBy
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from tests.cases import case_of
from training.finetune.base_model import LoraShape
from training.finetune.sft_trainer import FineTuning
from training.reward_model import train as reward
from training.reward_model.conversations import Kind
from training.reward_model.train import Config, training_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

RULE = DecidedBy(kind="rule", name="r/1")


def record(number: int, *, split="train", images=(), text="I lost my job") -> CerRecord:
    turn = (
        f"<history>Work {number}.\nStage: Exploration</history><emotion>Low.\nSentiment: Negative\n"
        "Emotion: Sadness\nIntensity: 3</emotion><strategy>Ask.\nStrategy: Question</strategy>"
        "<reply>Why?</reply>"
    )
    case = case_of(f"d{number}", f"{text} {number}.", images, split=split)
    steps = (True, number % 2 == 0, False)
    return CerRecord(
        id=f"r{number}",
        case=case,
        first=Candidate(author="policy", reply="Why?", turn=turn, steps=steps, steps_by=RULE),
        second=Candidate(author="corpus", reply="I see."),
        preference=Preference.SECOND,
        preference_by=RULE,
    )


@pytest.fixture
def config(small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    from training.data.faces import read_faces

    face = f"faces/{read_faces(small_corpora / 'faces')[0].file}"
    rows = [record(number, images=(face,) if number == 0 else ()) for number in range(6)]
    write_rows(tmp_path / "train.jsonl", [*rows, record(6, split="test")])
    write_rows(tmp_path / "persona.jsonl", [record(7)])
    return Config(
        records=(tmp_path / "train.jsonl", tmp_path / "persona.jsonl"),
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "reward",
        training=FineTuning(
            batch_size=2, max_steps=3, lr=1e-3, log_steps=1, lora=LoraShape(rank=2, alpha=4)
        ),
    )


def test_the_stage_leaves_an_adapter(config):
    reward.run(config)

    weights = load_file(config.output / "adapter" / "adapter_model.safetensors")
    assert any(tensor.abs().sum() > 0 for name, tensor in weights.items() if "lora_B" in name)
    assert not (config.output / "model").exists()
    recorded = json.loads((config.output / "config.json").read_text(encoding="utf-8"))
    assert recorded["config"]["kind"] == "unified"


@pytest.mark.parametrize(
    ("kind", "conversations", "verdicts"),
    # Seven rows of the train split; of each: three steps and a preference.
    [(Kind.UNIFIED, 7, 28), (Kind.PROCESS, 21, 21), (Kind.OUTCOME, 7, 7)],
)
def test_only_rows_of_the_train_split_are_used(config, kind, conversations, verdicts):
    rows = list(training_rows(config.model_copy(update={"kind": kind})))

    assert len(rows) == conversations
    answers = [m for row in rows for m in row["messages"] if m["role"] == "assistant"]
    assert len(answers) == verdicts
    # The photo comes with each conversation about its row.
    assert sum(len(row["images"]) for row in rows) == conversations // 7


def test_conversations_that_are_too_long_are_left_out_and_counted(config, caplog):
    caplog.set_level("INFO")
    long = config.records[0].with_name("long.jsonl")
    write_rows(long, [record(1), record(2, text="word " * 2000)])

    rows = list(training_rows(config.model_copy(update={"records": (long,), "longest": 4000})))

    assert len(rows) == 1
    assert "skipped 1 conversations of more than 4000 characters" in caplog.text


def test_a_dry_run_counts_and_writes_nothing(config, caplog):
    caplog.set_level("INFO")

    reward.run(config, dry_run=True)

    assert not config.output.exists()
    # Step 1 is True seven times, step 2 three times (0, 2, 4), step 3 never.
    assert "7 conversations; verdicts: False 11, Second 7, True 10" in caplog.text


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([record(1, split="valid")], "no row of the train split teaches .* 'unified'"),
        ([record(1).case], r"bad\.jsonl, line 1: case: Field required \(expected a CerRecord\)"),
        ([record(1, images=("faces/none.jpg",))], r"faces/none\.jpg"),
    ],
)
def test_unusable_rows_are_rejected(config, rows, says):
    path = config.records[0].with_name("bad.jsonl")
    write_rows(path, rows)

    with pytest.raises(ConfigError, match=says):
        reward.run(config.model_copy(update={"records": (path,)}))


# --- the base ------------------------------------------------------------------------------------


def without_words(base: Path, folder: Path, *words: str) -> Path:
    """The checkpoint with a tokenizer that takes these words apart."""
    shutil.copytree(base, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in words]
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_base_that_splits_a_verdict_into_tokens_is_rejected_before_reading(config, tmp_path):
    base = without_words(config.base, tmp_path / "base", "Second", "Neither")
    changed = config.model_copy(update={"base": base, "records": (Path("not read.jsonl"),)})

    with pytest.raises(ConfigError, match=r"base: 'Second', 'Neither' must be one token each"):
        reward.run(changed)
    assert not config.output.exists()
    # A PRM does not say these words.
    assert reward.template_for(changed.model_copy(update={"kind": Kind.PROCESS}))


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_missing_base_is_rejected_before_reading(config, dry_run):
    changed = {"base": config.output / "none", "records": (Path("not read.jsonl"),)}

    with pytest.raises(CheckpointError, match="none: no such folder"):
        reward.run(config.model_copy(update=changed), dry_run=dry_run)
