"""An adapter on a frozen base: what is learnt, cut short and gone on with, by one process and by two."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compeer_core.backends.protocol import Sampling
from compeer_core.cer import Candidate, Case, CaseUtterance, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.model_pool import ModelPool, load_transformers
from training.base_model import LoraShape
from training.faces import read_faces
from training.samples import write_records
from training.sft import adapter
from training.sft.adapter import Config, read_dialogues, shared_out, steps_of
from training.stages import StoppedEarly

pytestmark = pytest.mark.usefixtures("one_thread")

TURN = (
    "<history>The seeker lost the {thing}.\nStage: Exploration</history>\n"
    "<emotion>They feel sad.\nSentiment: Negative\nEmotion: Sadness\nIntensity: 3</emotion>\n"
    "<strategy>A question shows interest.\nStrategy: Question</strategy>\n"
    "<reply>Where did you lose the {thing}?</reply>"
)


def rows_of(number: int, face: str | None = None, turns: int = 2) -> list[CerRecord]:
    """A dialogue of some turns; every sixth is held out."""
    name, thing = f"talk-{number}", ("cat", "key", "ring", "book")[number % 4]
    history: tuple[CaseUtterance, ...] = ()
    rows = []
    for place in range(turns):
        images = (face,) if face and not place else ()
        said = CaseUtterance(
            speaker=Speaker.SEEKER, text=f"I lost my {thing} {place}", images=images
        )
        history = (*history, said)
        case = Case(
            id=f"{name}#{place}",
            dialogue_id=name,
            source_id=name,
            corpus="written",
            language="en",
            split="valid" if number % 6 == 5 else "train",
            licence="CC0",
            round=place,
            rounds=turns,
            history=history,
            original=None,
        )
        reply = f"Where did you lose the {thing}?"
        answer = Candidate(author="llm", reply=reply, turn=TURN.format(thing=thing))
        rows.append(CerRecord(id=case.id, case=case, first=answer))
        history = (*history, CaseUtterance(speaker=Speaker.SUPPORTER, text=reply))
    return rows


@pytest.fixture
def config(small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    """Ten dialogues to learn, some with a photo, four a step."""
    face = f"faces/{read_faces(small_corpora / 'faces')[0].file}"
    rows = [row for n in range(12) for row in rows_of(n, face if n % 3 == 0 else None)]
    write_records(tmp_path / "rows.jsonl", rows)
    return Config(
        records=(tmp_path / "rows.jsonl",),
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "run",
        lora=LoraShape(rank=4, alpha=8),
        dialogues_per_step=4,
        steps=4,
        warmup_steps=1,
        decay_steps=2,
        adamw_lr=2e-2,
        save_every=2,
        evaluate_every=2,
        validation_dialogues=2,
    )


def measured(run: Path) -> list[dict[str, Any]]:
    """The metrics, without what depends on the clock."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"time", "tokens_per_second"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def test_the_loss_falls_and_the_adapter_writes_beside_its_base(config):
    before = {p.name: p.read_bytes() for p in config.base.glob("*.safetensors")}
    adapter.run(config)

    rows = measured(config.output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["loss"] == pytest.approx(6.4, abs=0.3)  # 600 tokens, none learnt yet: ln 600
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    validated = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert len(validated) == 2
    assert validated[1] < validated[0]
    assert {p.name: p.read_bytes() for p in config.base.glob("*.safetensors")} == before
    settings = json.loads((config.output / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == config.base.name
    assert settings["r"] == 4
    assert {t.dtype for t in weights(config.output).values()} == {torch.bfloat16}
    backend = load_transformers(
        str(config.base), adapter=config.output / "adapter", pool=ModelPool()
    )
    assert backend.name.endswith("+adapter")
    assert Sampling().max_new_tokens > 0
    backend.close()


def test_a_run_cut_short_goes_on_as_if_it_had_not_been(config, monkeypatch):
    adapter.run(config)
    whole = config.model_copy(update={"output": config.output.with_name("cut")})
    learn = adapter.row_loss
    calls = 0

    def cut_at_the_third_step(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            os.kill(os.getpid(), 2)
        return learn(*arguments)

    monkeypatch.setattr(adapter, "row_loss", cut_at_the_third_step)
    with pytest.raises(StoppedEarly, match="go on with --resume"):
        adapter.run(whole)
    adapter.run(whole, resume=whole.output)

    assert measured(whole.output) == measured(config.output)
    first, second = weights(config.output), weights(whole.output)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_adapter_can_be_begun_from_another(config):
    adapter.run(config)
    again = config.model_copy(
        update={"output": config.output.with_name("again"), "start": config.output / "adapter"}
    )
    adapter.run(again)

    assert measured(again.output)[0]["loss"] < measured(config.output)[0]["loss"] - 0.3


def test_an_adapter_of_another_rank_is_refused(config):
    adapter.run(config.model_copy(update={"steps": 1}))
    other = config.model_copy(
        update={
            "output": config.output.with_name("other"),
            "start": config.output / "adapter",
            "lora": LoraShape(rank=2, alpha=4),
        }
    )
    with pytest.raises(ConfigError, match=r"has rank 4; set lora\.rank"):
        adapter.run(other)


def test_a_start_that_is_no_adapter_is_refused(config, tmp_path):
    with pytest.raises(CheckpointError, match="no adapter for"):
        adapter.run(config.model_copy(update={"start": tmp_path}))


def test_rows_without_a_held_out_split_are_refused(config, tmp_path):
    write_records(tmp_path / "few.jsonl", rows_of(0))
    with pytest.raises(ConfigError, match="no complete turn of the valid split"):
        adapter.run(config.model_copy(update={"records": (tmp_path / "few.jsonl",)}))


def test_a_dry_run_writes_nothing(config):
    adapter.run(config, dry_run=True)
    assert not config.output.exists()


def test_turns_judged_wrong_are_not_learnt(config, tmp_path):
    row = rows_of(0)[0]
    wrong = row.first.model_copy(
        update={"steps": (True, False, True), "steps_by": {"kind": "rule", "name": "test"}}
    )
    rows = [row.model_copy(update={"first": wrong}), *rows_of(1)]
    write_records(tmp_path / "judged.jsonl", rows)

    dialogues = read_dialogues([tmp_path / "judged.jsonl"], "train")
    assert [turn.case.dialogue_id for turns in dialogues for turn in turns] == ["talk-1"] * 2


def test_a_dialogue_that_is_too_long_becomes_several_rows(config, tiny_base):
    from training.pictures import Pictures
    from training.sft.tokenise import SampleReader

    model = adapter.load_model(tiny_base, torch.float32)
    write_records(config.records[0], rows_of(0, turns=4))
    (turns,) = read_dialogues(config.records, "train")
    builder = adapter.RowBuilder(SampleReader(tiny_base, model, {}), Pictures(), 100_000)
    (whole,) = builder.rows(turns)
    halves = adapter.RowBuilder(builder._reader, Pictures(), whole.tokens.shape[1] - 1).rows(turns)

    assert len(halves) == 2
    assert sum(len(row.targets) for row in halves) == len(whole.targets)
    assert adapter.RowBuilder(builder._reader, Pictures(), 10).rows(turns) == []


def test_work_is_shared_evenly_by_hand():
    # 9 | 5, then 4 joins the 5, 3 joins the 9 (tie: the first), 1 the other (12 | 9)
    assert shared_out([5, 9, 1, 4, 3], 2, 0) == [1, 4]
    assert shared_out([5, 9, 1, 4, 3], 2, 1) == [0, 3, 2]


def test_each_pass_has_every_dialogue_once_and_an_order_of_its_own():
    dialogues: Any = [[number] for number in range(6)]
    steps = steps_of(dialogues, 2, 0, 0)
    passes = [[d[0] for _ in range(3) for d in next(steps)] for _ in range(2)]
    later = steps_of(dialogues, 2, 0, 4)

    assert sorted(passes[0]) == sorted(passes[1]) == list(range(6))
    assert passes[0] != passes[1]
    assert [d[0] for d in next(later)] == passes[1][2:4]


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(config, repository, tmp_path):
    file = tmp_path / "adapter.toml"
    file.write_text(
        f'records = ["{config.records[0]}"]\nfaces = "{config.faces}"\nbase = "{config.base}"\n'
        'output = "set"\nsteps = 4\nwarmup_steps = 1\ndecay_steps = 2\nadamw_lr = 2e-2\n'
        "dialogues_per_step = 4\nsave_every = 2\nevaluate_every = 2\nvalidation_dialogues = 2\n"
        "[lora]\nrank = 4\nalpha = 8\n",
        encoding="utf-8",
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, start in (("one", []), ("two", launcher)):
        done = subprocess.run(
            [
                *(sys.executable, *start, "-m", "training", "sft", "adapter", str(file)),
                *("--set", f"output={tmp_path / name}"),
            ],
            cwd=repository,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    one, two = ([row["loss"] for row in measured(tmp_path / name)] for name in ("one", "two"))

    assert one == pytest.approx(two, rel=2e-2)  # sums of bf16 in another order
    assert len(two) == 4
