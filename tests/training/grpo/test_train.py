"""The stage, end to end on a tiny policy: what it writes, how it stops and goes on, what it refuses."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compeer_core.errors import BackendError, CheckpointError, ConfigError
from compeer_core.model_pool import ModelPool, load_transformers
from compeer_core.processing import load_processor
from tests.checkpoints import build_adapter, edit_json
from tests.training.grpo import world
from tests.training.runs import AtStep, PowerCut, changed, cut, weights
from training.common.run_directory import METRICS_FILE
from training.grpo import train
from training.grpo.rollout_log import ROLLOUTS_FILE
from training.stages import StoppedEarly

pytestmark = [
    pytest.mark.usefixtures("one_thread", "words"),
    # peft 0.21 and trl 1.16 still read a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


def rows_of(run: Path, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """The rows without what differs from run to run: times."""
    lines = (run / name).read_text(encoding="utf-8").splitlines()
    return [
        {k: v for k, v in row.items() if "time" not in k and not k.startswith("seconds/")}
        for row in map(json.loads, lines)
        if "train_loss" not in row
    ]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Any]]:
    """What is put in here under a step happens when it begins."""
    events: dict[int, Any] = {}
    build = train.build_trainer

    def built(*arguments: Any, **options: Any) -> Any:
        trainer = build(*arguments, **options)
        for step, happens in events.items():
            trainer.add_callback(AtStep(step, happens))
        return trainer

    monkeypatch.setattr(train, "build_trainer", built)
    yield events


# --- what it does --------------------------------------------------------------------------------


def test_histories_are_shortened_where_the_config_says_so(config):
    whole = train.Preparation.of(config())
    short = train.Preparation.of(config(config={"history_characters": 40}))

    longest = [max(len(r.case.history) for r in ready.book.records) for ready in (whole, short)]
    assert longest[1] < longest[0] == 3
    for before, after in zip(whole.book.records, short.book.records, strict=True):
        assert after.case.history[-1] == before.case.history[-1]
    whole.close()
    short.close()


def test_a_step_that_reads_each_prompt_once_in_the_update_is_the_same_step(config, tmp_path):
    rows = {}
    for update in ("plain", "shared"):
        settings = config(update=update, batch_size=4, accumulation=1, max_steps=1)
        train.run(settings.model_copy(update={"output": tmp_path / update}))
        (rows[update],) = rows_of(tmp_path / update)

    assert rows["shared"]["grad_norm"] > 1
    for name in ("grad_norm", "entropy", "reward/total", "num_tokens"):
        assert rows["shared"][name] == pytest.approx(rows["plain"][name], rel=1e-3), name


@pytest.mark.usefixtures("drawn_plots")
def test_a_run_trains_the_policy_and_writes_what_it_did(config, policy, tmp_path):
    train.run(config())

    run = tmp_path / "run"
    moved = changed(policy, run / "model")
    language = {n for n in weights(policy) if "visual." not in n and not n.endswith("k_proj.bias")}
    assert language <= moved
    assert load_processor(run / "model").tokenizer.get_vocab()["<reply>"]
    assert (run / "model" / "generation_config.json").read_text(encoding="utf-8") == (
        policy / "generation_config.json"
    ).read_text(encoding="utf-8")
    load_transformers(str(run / "model"), device="cpu", pool=ModelPool()).close()
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    wanted = {
        *("reward/total", "reward/weighted", "reward/steps", "reward/reply", "reward/format"),
        *("reward/history", "reward/emotion", "reward/strategy"),
        *("redundancy/s_in", "redundancy/s_hi", "redundancy/tau", "groups/zero_std"),
        *("judge/unscorable", "text/complete", "text/distinct_1", "text/distinct_2"),
        *("text/reply_words", "entropy", "frac_reward_zero_std", "loss", "grad_norm"),
    }
    assert all(wanted <= row.keys() for row in rows)
    rollouts = rows_of(run, ROLLOUTS_FILE)
    assert [row["step"] for row in rollouts] == [1, 1, 2, 2, 3, 3]
    assert {"history", "text", "steps", "reply", "total", "weighted", "advantage"} <= rollouts[
        0
    ].keys()
    assert {path.stem for path in (run / "plots").glob("*.png")} >= {
        *("reward", "reward_parts", "entropy", "distinct", "redundancy"),
    }
    record = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert record["config"]["training"]["group_size"] == 2
    assert {"versions", "git_commit", "command"} <= record.keys()
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert "3 steps of 4 completions (2 prompts): 2 at once, 2 times, in 1 processes" in log
    assert "8 prompts to train on, 0 held out" in log


def test_a_dry_run_checks_and_writes_nothing(config, tmp_path):
    train.run(config(), dry_run=True)

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rollouts", ["shared", "plain"])
def test_a_lora_adapter_is_trained_and_the_base_stays(config, policy, tmp_path, rollouts):
    train.run(config(lora={"rank": 4}, rollouts=rollouts, max_steps=2))

    adapter = weights(tmp_path / "run" / "adapter")
    assert all("lora_" in name for name in adapter)
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert not (tmp_path / "run" / "model").exists()
    load_transformers(
        str(policy), adapter=tmp_path / "run" / "adapter", device="cpu", pool=ModelPool()
    ).close()


def test_an_adapter_of_the_sft_stage_is_trained_further(config, policy, tmp_path):
    begun = build_adapter(policy, tmp_path / "sft")

    train.run(config(adapter=begun, max_steps=1))

    assert changed(begun, tmp_path / "run" / "adapter")
    other = {n: t.shape for n, t in weights(begun).items()}
    assert other == {n: t.shape for n, t in weights(tmp_path / "run" / "adapter").items()}


def test_bf16_is_computed_in_and_the_weights_stay_fp32(config, policy, tmp_path):
    train.run(config(precision="bf16", max_steps=2))

    assert {tensor.dtype for tensor in weights(tmp_path / "run" / "model").values()} == {
        torch.float32
    }
    assert changed(policy, tmp_path / "run" / "model")


def test_held_out_prompts_are_answered_from_the_same_seeds_each_time(config, tmp_path):
    # lr too small to change anything: what is written to the same prompts must stay the same
    train.run(
        config(
            config={"held_out": [tmp_path / "valid.jsonl"], "held_out_limit": 3},
            evaluate_every=1,
            max_steps=2,
            lr=1e-30,
        )
    )

    evaluations = [row for row in rows_of(tmp_path / "run") if "eval_reward/total" in row]
    assert [row["step"] for row in evaluations] == [1, 2]
    stable = ("eval_reward/total", "eval_text/distinct_2", "eval_completions/mean_length")
    assert [evaluations[0][name] for name in stable] == [evaluations[1][name] for name in stable]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "8 prompts to train on, 3 held out" in log


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "step"),
    [
        ({}, 3),
        ({"rollouts": "plain"}, 3),
        ({"lora": {"rank": 4}}, 3),
        ({"lora": {"rank": 4}, "rollout_weights": "bf16", "lr": 1e-2}, 3),
        ({"rollout_weights": "bf16"}, 3),
        ({"iterations": 2, "save_steps": 2, "max_steps": 5, "lr": 1e-3}, 4),
        ({"generation_steps": 2, "save_steps": 2, "max_steps": 5, "lr": 1e-3}, 4),
    ],
    ids=[
        "whole",
        "plain",
        "adapter",
        "copy of adapter",
        "copy of whole",
        "twice",
        "two steps a generation",
    ],
)
def test_a_run_that_was_cut_goes_on_to_the_bit(config, tmp_path, at_step, held, step):
    train.run(config(config={"output": tmp_path / "whole"}, **held))
    at_step[step] = cut
    with pytest.raises(PowerCut):
        train.run(config(config={"output": tmp_path / "cut"}, **held))
    # the next checkpoint was begun and not finished
    half = tmp_path / "cut" / "checkpoints" / "checkpoint-9"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")

    at_step.clear()
    train.run(config(config={"output": tmp_path / "cut"}, **held), resume=tmp_path / "cut")

    name = "adapter" if "lora" in held else "model"
    assert not changed(tmp_path / "whole" / name, tmp_path / "cut" / name)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert rows_of(tmp_path / "cut", ROLLOUTS_FILE) == rows_of(tmp_path / "whole", ROLLOUTS_FILE)
    assert not half.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_the_next_generation_and_the_run_goes_on(
    config, tmp_path, at_step, number
):
    held = {"iterations": 2, "save_steps": 4, "max_steps": 4, "lr": 1e-3}
    train.run(config(config={"output": tmp_path / "whole"}, **held))
    before = signal.getsignal(number)
    at_step[1] = lambda: signal.raise_signal(number)

    with pytest.raises(StoppedEarly, match="saved; continue with --resume"):
        train.run(config(**held))

    # step 1 lies within a generation: one step more, and the run can go on from there
    assert signal.getsignal(number) is before
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("ch*")] == ["checkpoint-2"]
    assert not (tmp_path / "run" / "model").exists()
    at_step.clear()
    train.run(config(**held), resume=tmp_path / "run")
    assert not changed(tmp_path / "whole" / "model", tmp_path / "run" / "model")


@pytest.mark.parametrize("file", ["optimizer.pt", "model.safetensors"])
def test_a_full_disk_leaves_the_last_checkpoint(config, tmp_path, monkeypatch, file):
    import safetensors.torch

    def full(*arguments: Any, **options: Any) -> None:
        Path(tmp_path / "run" / "checkpoints" / "checkpoint-2").mkdir(exist_ok=True)
        raise OSError(28, "No space left on device")

    trained: list[int] = []
    save = train.GroupTrainer._save_checkpoint

    def saved(trainer: Any, *arguments: Any) -> None:
        trained.append(trainer.state.global_step)
        if len(trained) == 2:
            place = torch if file == "optimizer.pt" else safetensors.torch
            monkeypatch.setattr(place, "save" if place is torch else "save_file", full)
            if place is not torch:
                monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
        save(trainer, *arguments)

    monkeypatch.setattr(train.GroupTrainer, "_save_checkpoint", saved)
    with pytest.raises(BackendError, match="the disk is full; step 1 is saved"):
        train.run(config())
    monkeypatch.undo()
    world.install(monkeypatch.setattr)

    train.run(config(), resume=tmp_path / "run")

    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]


def test_a_run_does_not_go_on_with_other_settings_or_processes(config, tmp_path, monkeypatch):
    train.run(config(max_steps=1))

    with pytest.raises(ConfigError, match=r"training\.lr"):
        train.run(config(max_steps=1, lr=1.0), resume=tmp_path / "run")
    monkeypatch.setattr(train, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="saved by 1 processes, and now there are 2"):
        train.run(config(max_steps=1), resume=tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="there is already a run"):
        train.run(config(max_steps=1))


# --- bad input -----------------------------------------------------------------------------------


def test_prompts_longer_than_the_context_are_left_out_and_counted(config, tmp_path):
    from compeer_core.row_files import write_rows
    from tests.training.grpo.world import record
    from training.data.records import read_records

    rows = [record(n, history=_told(" and then" * 400)) for n in (90, 91)]
    from compeer_core.cer import CerRecord

    old = list(read_records(tmp_path / "train.jsonl", CerRecord))
    write_rows(tmp_path / "train.jsonl", [*old, *rows])

    train.run(config(max_steps=1))

    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "skipped: 2 x longer than 500 tokens" in log  # 512 less 12 for the completion
    assert "8 prompts to train on" in log
    with pytest.raises(ConfigError, match=r"no prompt fits into 3 tokens \(the shortest has"):
        train.run(config(longest_prompt=3), dry_run=True)
    with pytest.raises(ConfigError, match="leaves none of them for a prompt"):
        train.run(config(max_new_tokens=600), dry_run=True)


def _told(text: str) -> Any:
    from compeer_core.cer import CaseUtterance
    from compeer_core.dialogue import Speaker

    return (CaseUtterance(speaker=Speaker.SEEKER, text="It began" + text),)


def test_a_judge_that_cannot_judge_is_found_before_step_0(config, monkeypatch, tmp_path):
    monkeypatch.setattr(train.JudgeSource, "load", lambda source: world.judge(refused=("True",)))
    with pytest.raises(ConfigError, match="more than one token"):
        train.run(config(), dry_run=True)

    monkeypatch.setattr(train.JudgeSource, "load", lambda source: world.judge())
    world.write_rows(tmp_path / "train.jsonl", 4, original="broken")
    with pytest.raises(ConfigError, match="judge words cannot judge a turn: the reward model"):
        train.run(config(), dry_run=True)


def test_a_policy_whose_tokenizer_loses_the_tags_is_refused(config, policy, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(policy, base)
    content = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = True
    (base / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    edit_json(base / "tokenizer_config.json", added_tokens_decoder=None)

    with pytest.raises(ConfigError, match="its tokenizer drops the tags of the grammar"):
        train.run(config(config={"base": base}), dry_run=True)


def test_what_is_missing_is_named(config, tmp_path):
    with pytest.raises(CheckpointError, match="nothing: no such folder"):
        train.run(config(config={"base": tmp_path / "nothing"}))
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: no such file"):
        train.run(config(config={"prompts": [tmp_path / "nothing.jsonl"]}), dry_run=True)
    with pytest.raises(ConfigError, match="8 prompts are fewer than the 16 of one generation"):
        train.run(config(max_steps=-1, batch_size=16))
    with pytest.raises(ConfigError, match="name the held-out prompts"):
        train.run(config(evaluate_every=1), dry_run=True)


def test_a_reporter_that_is_not_installed_is_named(config, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="tensorboard is not installed"):
        train.run(config(report_to=("tensorboard",)), dry_run=True)
