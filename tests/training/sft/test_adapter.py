"""SFT of an adapter: dialogues of CER rows, interrupted and resumed, alone and in two processes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compeer_core.cer import Case, CaseUtterance, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.model_pool import load_transformers
from compeer_core.prompts import policy_messages
from compeer_core.row_files import write_rows
from tests.training.reward_model.test_train import record
from tests.training.runs import (
    SHORT_SCHEDULE,
    interrupt_at_step_3,
    metrics_of,
    run_in_processes,
    weights,
)
from training.data.faces import read_faces
from training.data.pictures import Pictures
from training.finetune import small_adapter
from training.finetune.base_model import LoraShape
from training.finetune.shared_prefix import (
    ATTENTION,
    predicted_logits,
    row_loss,
    shared_prefix_row,
)
from training.finetune.small_adapter import (
    Masters,
    fastest_precision,
    load_small_base,
    padded_batches,
    shared_out,
    steps_of,
)
from training.finetune.tokenise import SampleReader
from training.sft import adapter
from training.sft.adapter import Config, RowBuilder, read_dialogues

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


def turn_of(number: int, place: int, *, photo: str | None = None, **changes) -> CerRecord:
    """A turn of dialogue `number`, whose steps nobody judged; the photo comes with the second round."""
    row = record(number, **changes)
    said = []
    for round_ in range(place + 1):
        shown = (photo,) if photo is not None and round_ == 1 else ()
        text = f"My work {number} is gone, {round_}."
        said.append(CaseUtterance(speaker=Speaker.SEEKER, text=text, images=shown))
        said.append(CaseUtterance(speaker=Speaker.SUPPORTER, text=f"Why {round_}?"))
    case = row.case.model_dump() | {"id": f"d{number}#{place}", "round": place, "rounds": place + 1}
    case["history"] = said[:-1]
    first = row.first.model_copy(update={"steps": None, "steps_by": None})
    return row.model_copy(
        update={
            "id": f"r{number}-{place}",
            "case": Case.model_validate(case),
            "first": first,
            "second": None,
            "preference": None,
            "preference_by": None,
        }
    )


@pytest.fixture
def config(small_corpora: Path, tiny_base: Path, tmp_path: Path) -> Config:
    """Ten dialogues of three turns, four a step; two show a photo from the second turn on."""
    photo = f"faces/{read_faces(small_corpora / 'faces')[0].file}"
    train = [
        turn_of(n, place, photo=photo if n < 2 else None) for n in range(10) for place in range(3)
    ]
    valid = [turn_of(n, place, split="valid") for n in range(10, 13) for place in range(2)]
    write_rows(tmp_path / "rows.jsonl", [*train, *valid, turn_of(13, 0, split="test")])
    return Config(
        records=(tmp_path / "rows.jsonl",),
        faces=small_corpora / "faces",
        base=tiny_base,
        output=tmp_path / "run",
        lora=LoraShape(rank=4, alpha=8),
        compute="bf16",
        dialogues_per_step=4,
        steps=5,
        **SHORT_SCHEDULE,
        validation_dialogues=2,
    )


def changed(config: Config, **changes: Any) -> Config:
    return config.model_copy(update=changes)


def test_the_stage_leaves_metrics_and_an_adapter_that_loads_beside_its_base(config, tiny_base):
    before = (tiny_base / "model.safetensors").read_bytes()

    adapter.run(config)

    measured = metrics_of(config.output)
    assert [row["step"] for row in measured] == [1, 2, 3, 4, 5]
    # 600 tokens, none of them learnt yet: ln 600 = 6.4
    assert measured[0]["loss"] == pytest.approx(6.4, abs=0.3)
    assert measured[-1]["loss"] < measured[0]["loss"] - 0.05
    validated = [row["validation_loss"] for row in measured if "validation_loss" in row]
    assert len(validated) == 3  # at 2, 4 and the end
    assert validated[-1] < validated[0]
    assert (tiny_base / "model.safetensors").read_bytes() == before
    learnt = weights(config.output / "adapter")
    assert {weight.dtype for weight in learnt.values()} == {torch.bfloat16}
    assert all("language_model" in name and "lora_" in name for name in learnt)
    assert any(weight.abs().sum() > 0 for name, weight in learnt.items() if "lora_B" in name)
    settings = json.loads((config.output / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert settings["base_model_name_or_path"] == tiny_base.name
    assert {path.name for path in (config.output / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    policy = load_transformers(str(tiny_base), adapter=config.output / "adapter", device="cpu")
    policy.close()


def test_the_base_is_unchanged_and_the_master_weights_are_saved(config, monkeypatch):
    kept: list[Any] = []
    put = small_adapter.add_adapter

    def noted(model: Any, *settings: Any) -> Any:
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        kept.extend((model, before))
        return put(model, *settings)

    monkeypatch.setattr(small_adapter, "add_adapter", noted)
    adapter.run(config)

    model, before = kept
    after = {n.replace(".base_layer", ""): w for n, w in model.state_dict().items()}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    state = torch.load(config.output / "checkpoint" / "state.pt", weights_only=True)
    assert set(state["model"]) == {"flat"}
    flat = state["model"]["flat"]
    trained = [w for w in model.parameters() if w.requires_grad]
    assert flat.dtype == torch.float32
    assert torch.equal(flat.bfloat16(), torch.cat([w.detach().ravel() for w in trained]))
    assert sum(w.numel() for w in weights(config.output / "adapter").values()) == len(flat)


@pytest.mark.parametrize(
    ("device", "capabilities", "expected"),
    [
        ("cpu", {"avx512_bf16": True}, "bf16"),
        ("cpu", {"bf16": True, "architecture": "aarch64"}, "bf16"),
        ("cpu", {"avx512_bf16": False, "avx2": True}, "fp32"),
        ("cuda", {"avx2": True}, "bf16"),
    ],
)
def test_the_precision_follows_the_device(monkeypatch, device, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    assert fastest_precision(device) == expected


def test_an_adapter_trained_in_fp32_is_saved_in_bf16(config):
    adapter.run(changed(config, compute="fp32"))

    state = torch.load(config.output / "checkpoint" / "state.pt", weights_only=True)
    saved = weights(config.output / "adapter")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    assert sum(w.numel() for w in saved.values()) == len(state["model"]["flat"])
    assert metrics_of(config.output)[-1]["loss"] < metrics_of(config.output)[0]["loss"]


def test_steps_too_small_for_bf16_add_up_in_the_masters():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters = Masters([weight])
    masters.forget()
    for gradient in (256.0, 1.0):  # bf16 has 8 bits: 256 + 1 is 256
        weight.grad = torch.full((2,), gradient, dtype=torch.bfloat16)
        masters.collect()
    assert weight.grad is None
    assert masters.gradient.tolist() == [257.0, 257.0]

    optimizer = torch.optim.SGD([masters.flat], lr=0.001 / 257)  # next to 1 bf16 goes by 1/128
    optimizer.step()
    masters.publish()
    assert weight.tolist() == [1.0, 1.0]
    for _ in range(7):
        optimizer.step()
    masters.publish()
    assert weight.tolist() == [1 - 2 / 256, 1 - 2 / 256]


def builder(config: Config, longest: int = 2048) -> tuple[Any, RowBuilder]:
    model = load_small_base(config.base, "fp32")
    model.model.language_model.set_attn_implementation(ATTENTION)
    reader = SampleReader(config.base, model)
    photos = Pictures(None, config.faces)
    return model, RowBuilder(reader, photos, longest, config.label_weight)


def test_turns_are_put_together_to_dialogues_and_read_as_the_page_reads_them(config):
    train, valid = (read_dialogues(config.records, split) for split in ("train", "valid"))
    assert [len(turns) for turns in train] == [3] * 10
    assert [len(turns) for turns in valid] == [2] * 3
    _, build = builder(config)
    tokenizer = build._reader.processor.tokenizer

    (row,) = build.rows(train[5])

    text = tokenizer.decode(row.tokens[0])
    last = policy_messages(train[5][2].case.dialogue(), "trained")
    assert all(text.count(message.text) == 1 for message in last)
    assert tokenizer.decode(row.targets).count(train[5][0].completion) == 3


def test_pictures_that_all_histories_show_are_there_once(config):
    turns = read_dialogues(config.records, "train")[0]
    model, build = builder(config)

    without, shown = build.rows(turns)

    assert without.pixels is None
    assert shown.grid is not None and len(shown.grid) == 1
    samples = [
        build._reader.read_turn(
            turn.case.dialogue(build._pictures.shown(turn.case.history)), turn.completion
        )
        for turn in turns[1:]
    ]
    apart = [shared_prefix_row([sample]) for sample in samples]
    assert shown.tokens.shape[1] < sum(row.tokens.shape[1] for row in apart)
    with torch.no_grad():
        whole = row_loss(model, shown).item()
        each = sum(row_loss(model, row).item() for row in apart)
    assert whole == pytest.approx(each, rel=1e-4)


def test_histories_that_differ_before_their_picture_keep_a_picture_each(config):
    first, second = (read_dialogues(config.records, "train")[n][1] for n in (0, 1))
    _, build = builder(config)

    (row,) = build.rows([first, second])

    assert row.grid is not None and len(row.grid) == 2


def test_label_words_have_a_weight_of_their_own_and_weigh_in_the_loss(config):
    model, build = builder(changed(config, label_weight=4.0))
    turns = read_dialogues(config.records, "train")[5][:2]
    (row,) = build.rows(turns)
    tokenizer = build._reader.processor.tokenizer
    heavy = tokenizer.decode(row.targets[row.weights == 4.0])
    assert set(row.weights.tolist()) == {1.0, 4.0}
    for turn in turns:
        for label in ("Emotion", "Strategy"):
            name = turn.completion.split(f"{label}: ")[1].splitlines()[0].split("<")[0]
            assert name in heavy
    assert "Intensity" not in heavy and "Stage" not in heavy and "reply" not in heavy
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            predicted_logits(model, row), row.targets, reduction="none"
        )
        weighted = row_loss(model, row, weighted=True)
    torch.testing.assert_close(weighted, (losses * row.weights).sum())
    torch.testing.assert_close(row_loss(model, row), losses.sum())


def test_long_dialogues_become_several_rows_and_longer_turns_are_left_out_and_counted(config):
    turns = read_dialogues(config.records, "train")[5]
    _, whole = builder(config)
    (row,) = whole.rows(turns)
    length = row.tokens.shape[1]
    _, build = builder(config, longest=length - 1)

    cut = build.rows(turns)

    assert len(cut) == 2 and all(row.tokens.shape[1] < length for row in cut)
    assert torch.equal(torch.cat([row.targets for row in cut]), row.targets)
    assert build.too_long == 0
    _, none = builder(config, longest=10)
    assert none.rows(turns) == [] and none.too_long == 3


def test_work_is_shared_out_evenly_and_whole():
    assert shared_out([4, 1, 3, 2], 2) == [[0, 1], [2, 3]]
    assert shared_out([7], 2) == [[0], []]
    lengths = [(37 * n) % 101 + 50 for n in range(24)]
    shares = shared_out(lengths, 2)
    assert sorted(shares[0] + shares[1]) == list(range(24))
    loads = [sum(lengths[item] for item in share) for share in shares]
    assert abs(loads[0] - loads[1]) < 0.03 * sum(loads)


def test_rows_that_are_padded_together_teach_the_same(config, tmp_path):
    alone = changed(config, compute="fp32")
    padded = changed(alone, batch_tokens=2000, output=tmp_path / "padded")
    adapter.run(alone)
    adapter.run(padded)

    for one, other in zip(metrics_of(alone.output), metrics_of(padded.output), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one.get("validation_loss", 0) == pytest.approx(
            other.get("validation_loss", 0), rel=1e-3
        )


@dataclass(frozen=True)
class Length:
    length: int


def test_batches_hold_each_row_once_and_at_most_so_many_tokens_with_padding():
    rows = [Length(n) for n in (3, 9, 4, 4, 20, 1)]
    batches = list(padded_batches(rows, 12))

    assert [[row.length for row in batch] for batch in batches] == [[20], [9], [4, 4, 3], [1]]


def test_each_pass_takes_every_dialogue_once_in_an_order_of_its_own(config):
    dialogues = read_dialogues(config.records, "train")

    def drawn(count: int, skip: int = 0) -> list[list[str]]:
        steps = steps_of(dialogues, 5, 0, skip)
        return [[turns[0].case.dialogue_id for turns in next(steps)] for _ in range(count)]

    first, second, third, fourth = drawn(4)
    assert sorted(first + second) == sorted(third + fourth)
    assert first + second != third + fourth
    assert drawn(1, skip=3) == [fourth]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(config, tmp_path, monkeypatch):
    whole = changed(config, output=tmp_path / "whole")
    adapter.run(whole)
    with interrupt_at_step_3(monkeypatch):  # in the second pass, and at no save
        adapter.run(config)
    assert not (config.output / "adapter").exists()
    adapter.run(config, resume=config.output)

    assert metrics_of(config.output) == metrics_of(whole.output)
    ours, theirs = weights(config.output / "adapter"), weights(whole.output / "adapter")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_may_begin_with_an_adapter(config, tmp_path):
    adapter.run(config)
    further = changed(config, output=tmp_path / "further", start=config.output / "adapter")

    adapter.run(further)

    assert metrics_of(further.output)[0]["loss"] < metrics_of(config.output)[0]["loss"] - 0.05


def test_errors_are_reported_before_anything_is_written(config, tmp_path):
    adapter.run(changed(config, steps=1, output=tmp_path / "other"))
    other = tmp_path / "other" / "adapter"

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match) as told:
            adapter.run(changed(config, **changes))
        assert "\n" not in str(told.value)
        assert not config.output.exists()

    refused(CheckpointError, "no such folder", base=Path("no/where/at-all"))
    refused(ConfigError, "no such file", records=(tmp_path / "none.jsonl",))
    write_rows(tmp_path / "test.jsonl", [turn_of(1, 0, split="test")])
    refused(ConfigError, "no turn of the train split", records=(tmp_path / "test.jsonl",))
    write_rows(tmp_path / "train.jsonl", [turn_of(1, 0)])
    refused(ConfigError, "no turn of the valid split", records=(tmp_path / "train.jsonl",))
    refused(ConfigError, "holds no adapter_config.json", start=tmp_path)
    wider = LoraShape(rank=8, alpha=8)
    refused(
        ConfigError, "rank and alpha 4 and 8, but lora asks for 8 and 8", start=other, lora=wider
    )
    narrow = config.lora.model_copy(update={"target_modules": r".*language_model.*\.q_proj"})
    refused(CheckpointError, "weights differ, first", start=other, lora=narrow)


def test_a_dry_run_counts_and_writes_nothing(config, caplog):
    caplog.set_level("INFO")

    adapter.run(config, dry_run=True)

    assert "30 turns of 10 dialogues to learn, 3 dialogues held out" in caplog.text
    assert not config.output.exists()


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(config, repository, tmp_path):
    shape = "{ rank = 4, alpha = 8 }"
    (tmp_path / "adapter.toml").write_text(
        f'records = ["{config.records[0]}"]\nfaces = "{config.faces}"\nbase = "{config.base}"\n'
        f'output = "set"\nlora = {shape}\ndialogues_per_step = 3\nsteps = 4\nwarmup_steps = 0\n'
        "decay_steps = 2\nadamw_lr = 0.01\nevaluate_every = 2\nvalidation_dialogues = 3\n",
        encoding="utf-8",
    )

    def train(name: str, count: int) -> tuple[list[dict[str, Any]], Path]:
        output = tmp_path / name
        file = str(tmp_path / "adapter.toml")
        run_in_processes(repository, count, "sft", "adapter", file, "--set", f"output={output}")
        return metrics_of(output), output

    alone, _ = train("one", 1)
    together, output = train("two", 2)

    assert len(together) == len(alone) == 4
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
    one, two = weights(tmp_path / "one" / "adapter"), weights(output / "adapter")
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[n].float(), two[n].float(), atol=0.01) for n in one)
