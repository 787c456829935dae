"""Fine-tuning: tokens with a loss, trained weights, row order, interrupts and resumption."""

import contextlib
import itertools
import json
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from trl.trainer import utils as trl_utils
from trl.trainer.sft_trainer import SFTTrainer

from compeer_core.backends.protocol import Message
from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.images import read_image
from compeer_core.model_pool import ModelPool, load_label_scorer
from compeer_core.processing import load_processor
from tests.checkpoints import build_qwen
from tests.training.corpora_fixture import jpeg
from tests.training.runs import AtStep, PowerCut, changed, cut, weights
from training.common.run_directory import RunDirectory
from training.finetune import sft_trainer
from training.finetune.base_model import LoraShape, load_base
from training.finetune.sft_trainer import (
    FineTuning,
    Row,
    build_dataset,
    fine_tune,
    message_rows,
    row_order,
)
from training.finetune.trl_common import open_processor
from training.reward_model.template import CHATML
from training.stages import StoppedEarly

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

PHOTO = read_image(jpeg(56, "sad", 1))
COMPLETION = "<history>She is sad.\nStage: Action</history>\n<reply>I am here, {}.</reply>"
SETTINGS = FineTuning(
    batch_size=2,
    max_steps=5,
    lr=1e-2,
    warmup_share=0.0,
    save_steps=2,
    log_steps=1,
    precision="fp32",
)


class NoConfig(FrozenModel):
    pass


def policy_row(number: int, *, photo: bool = False) -> Row:
    message = f"I feel low for {number} days." + " Nothing helps." * number
    content: tuple[Any, ...] = (PHOTO, message) if photo else (message,)
    prompt, images = message_rows([Message("user", content)])
    completion, _ = message_rows([Message("assistant", (COMPLETION.format(number),))])
    return {
        "prompt": prompt,
        "completion": completion,
        "images": images,
        "length": len(message) + len(COMPLETION),
    }


def judge_row(number: int, *answers: str, photo: bool = False) -> Row:
    history = (f"Seeker: I feel low for {number} days.\n", *([PHOTO] if photo else []), "Step 1: x")
    messages = [Message("system", ("You judge. True or False?",)), Message("user", history)]
    for answer in answers:
        messages += [Message("assistant", (answer,)), Message("user", ("True? False? First?",))]
    rows, images = message_rows(messages[:-1])
    return {"messages": rows, "images": images, "length": 100 + 50 * len(answers)}


POLICY_ROWS = [policy_row(number, photo=number % 2 == 0) for number in range(1, 5)]


class RecordingTrainer(SFTTrainer):
    """Records the trainers that `fine_tune` creates, and can call a hook at a step."""

    made: "list[RecordingTrainer]"
    at_step: int = 0
    happens: Any = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        type(self).made.append(self)
        if self.happens is not None:
            self.add_callback(AtStep(self.at_step, type(self).happens))


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sizes bitsandbytes supports on a CPU."""
    return build_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[RecordingTrainer]:
    kind = type("RecordingTrainer", (RecordingTrainer,), {"made": []})
    monkeypatch.setattr(sft_trainer, "SFTTrainer", kind)
    return kind


def tune(
    base: Path,
    output: Path,
    rows: Sequence[Row] = POLICY_ROWS,
    *,
    resume: bool = False,
    **changes: Any,
) -> Path:
    settings = SETTINGS.model_copy(update=changes)
    return fine_tune(
        base,
        rows,
        settings,
        RunDirectory.open(output, NoConfig(), resume=resume),
        training_template=CHATML.read_text(encoding="utf-8") if "messages" in rows[0] else None,
        resume=resume,
    )


def rows_of(run: Path) -> list[tuple[int, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines) if "loss" in row]


def trained_texts(trainer: SFTTrainer, rows: Sequence[Row]) -> list[str]:
    """Return the text of each row that has a loss, with all rows in one batch."""
    batch = trainer.data_collator(list(build_dataset(rows)))
    assert batch["input_ids"].shape == batch["labels"].shape
    is_label = batch["labels"] != -100
    assert torch.equal(batch["labels"][is_label], batch["input_ids"][is_label])
    return [
        trainer.processing_class.tokenizer.decode(labels[labels != -100].tolist())
        for labels in batch["labels"]
    ]


# --- tokens with a loss --------------------------------------------------------------------------


def test_policy_loss_covers_the_completion_only(tiny_base, tmp_path, recorder):
    tune(tiny_base, tmp_path / "run", max_steps=1)

    assert trained_texts(recorder.made[0], POLICY_ROWS) == [
        f"{COMPLETION.format(number)}<|im_end|>\n" for number in range(1, 5)
    ]


def test_judge_loss_covers_each_verdict_and_its_end_token(tiny_base, tmp_path, recorder):
    answers = [("True", "False", "Second"), ("False",), ("True", "True", "True", "Neither")]
    rows = [judge_row(n, *given, photo=n != 1) for n, given in enumerate(answers)]

    tune(tiny_base, tmp_path / "run", rows, max_steps=1)

    # the verdict words in the questions, "True? False? First?", have no loss
    assert trained_texts(recorder.made[0], rows) == [
        "".join(f"{answer}<|im_end|>" for answer in given) for given in answers
    ]


def test_training_template_renders_like_the_base_template(tiny_base):
    processor = load_processor(tiny_base)
    rows = judge_row(3, "True", "First", photo=True)["messages"]

    own = processor.apply_chat_template(rows, tokenize=False)
    processor.chat_template = CHATML.read_text(encoding="utf-8")

    assert processor.apply_chat_template(rows, tokenize=False) == own
    assert "<|vision_start|><|image_pad|><|vision_end|>Step 1: x<|im_end|>" in own


def test_message_rows_keep_image_positions_and_order():
    second = read_image(jpeg(48, "happy", 2))

    rows, images = message_rows(
        [
            Message("user", ("a", PHOTO, "b")),
            Message("assistant", ("c",)),
            Message("user", (second,)),
        ]
    )

    text = {"type": "text"}
    assert rows == [
        {
            "role": "user",
            "content": [
                {**text, "text": "a"},
                {"type": "image", "text": None},
                {**text, "text": "b"},
            ],
        },
        {"role": "assistant", "content": [{**text, "text": "c"}]},
        {"role": "user", "content": [{"type": "image", "text": None}]},
    ]
    assert [image["bytes"] for image in images] == [PHOTO.data, second.data]


# --- trained weights -----------------------------------------------------------------------------


def test_freeze_vision_freezes_the_encoder_but_not_the_merger(tiny_base, tmp_path):
    frozen, free = (
        changed(
            tiny_base, tune(tiny_base, tmp_path / str(freeze), freeze_vision=freeze, max_steps=2)
        )
        for freeze in (True, False)
    )

    names = set(weights(tiny_base))
    merger = {name for name in names if ".merger." in name}
    # ln_q, and weight and bias of two linear layers
    assert len(merger) == 5
    assert {name for name in frozen if "visual." in name} == merger
    assert {name for name in free if "visual." in name} == {n for n in names if "visual." in n}
    # a bias of the keys shifts all scores of a query equally, so its gradient is only rounding error
    language = {n for n in names if "visual." not in n and not n.endswith("k_proj.bias")}
    assert language and language <= frozen


def test_bf16_weights_are_trained_and_saved_in_bf16(tiny_base, tmp_path):
    half = tune(tiny_base, tmp_path / "half", weights="bf16", precision="bf16", max_steps=1)
    full = tune(tiny_base, tmp_path / "full", max_steps=1)

    assert {tensor.dtype for tensor in weights(half).values()} == {torch.bfloat16}
    before, after = weights(tiny_base), weights(half)
    assert any(not torch.equal(before[n].bfloat16(), after[n]) for n in before)
    assert {tensor.dtype for tensor in weights(full).values()} == {torch.float32}
    (_, rough), (_, exact) = rows_of(tmp_path / "half")[0], rows_of(tmp_path / "full")[0]
    assert rough == pytest.approx(exact, rel=0.01) and rough != exact


@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_adapter_is_fp32_on_a_bf16_or_4_bit_base(qwen_base, tmp_path, recorder, quantize):
    exact = tune(qwen_base, tmp_path / "exact", lora=LoraShape(rank=4), max_steps=2)
    output = tune(
        qwen_base,
        tmp_path / "run",
        lora=LoraShape(rank=4),
        weights="bf16",
        precision="bf16",
        quantize=quantize,
        max_steps=2,
    )

    model = recorder.made[-1].model
    layer = model.base_model.model.model.language_model.layers[0].self_attn.q_proj
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert all("lora_" in n for n, p in model.named_parameters() if p.requires_grad)
    if quantize:
        assert type(layer.base_layer.weight).__name__ == "Params4bit"
        state = layer.base_layer.weight.quant_state
        assert (state.quant_type, state.nested) == ("nf4", True)
        assert layer.base_layer.compute_dtype == torch.bfloat16
    else:
        assert layer.base_layer.weight.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in weights(output).values()} == {torch.float32}
    assert weights(output).keys() == weights(exact).keys()
    assert all(tensor.abs().sum() > 0 for tensor in weights(output).values())
    for held in (None, quantize):
        load_label_scorer(
            str(qwen_base), adapter=output, quantize=held, device="cpu", pool=ModelPool()
        ).close()
    # at the first step the adapter is zero: the losses differ by the precision of the base only
    (_, rough), (_, true) = rows_of(tmp_path / "run")[0], rows_of(tmp_path / "exact")[0]
    assert rough == pytest.approx(true, rel=0.15 if quantize else 0.02)


@pytest.mark.parametrize("lora", [None, LoraShape(rank=4)], ids=["whole", "adapter"])
def test_gradient_checkpointing_does_not_change_the_result(tiny_base, tmp_path, recorder, lora):
    plain = tune(tiny_base, tmp_path / "plain", lora=lora, max_steps=2)
    spared = tune(
        *(tiny_base, tmp_path / "spared"), lora=lora, max_steps=2, gradient_checkpointing=True
    )

    layers = [
        [m for m in trainer.model.modules() if getattr(m, "gradient_checkpointing", False)]
        for trainer in recorder.made
    ]
    assert not layers[0] and len(layers[1]) > 2
    first, second = weights(plain), weights(spared)
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first)
    assert all(tensor.abs().sum() > 0 for name, tensor in second.items() if "lora_B" in name)


def test_adapter_covers_the_merger_if_target_modules_include_it(tiny_base, tmp_path):
    modules = LoraShape().target_modules + r"|.*visual\.merger\.mlp\.(0|2)"

    output = tune(tiny_base, tmp_path / "run", lora=LoraShape(rank=4, target_modules=modules))

    merger = {name: tensor for name, tensor in weights(output).items() if "visual." in name}
    assert len(merger) == 4 and all(".merger.mlp." in name for name in merger)
    assert all(tensor.abs().sum() > 0 for tensor in merger.values())
    load_label_scorer(str(tiny_base), adapter=output, device="cpu", pool=ModelPool()).close()


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (r".*\.no_such_layer", r"'\.\*\\\\\.no_such_layer' matches none of the \d+ linear layers"),
        ("(", "is not a regular expression"),
        (r".*visual\.blocks\.0\..*", r"matches model\.visual\.blocks\.0\S* in the image encoder"),
    ],
)
def test_rejects_invalid_target_modules(tiny_base, tmp_path, modules, says):
    with pytest.raises(ConfigError, match=says):
        tune(tiny_base, tmp_path / "run", lora=LoraShape(target_modules=modules))

    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_config_rejects_4_bits_without_an_adapter(tmp_path):
    path = tmp_path / "training.toml"
    path.write_text('quantize = "4bit"\n', encoding="utf-8")

    with pytest.raises(ConfigError, match=r"needs a \[training\.lora\] table"):
        load_toml(path, FineTuning)
    assert load_toml(path, FineTuning, ["lora.rank=8"]).quantize == "4bit"


def test_rejects_a_base_without_a_chat_template(tiny_base, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    for path in base.glob("*.jinja"):
        path.unlink()

    with pytest.raises(CheckpointError, match="there is no chat template"):
        tune(base, tmp_path / "run")


def test_rejects_a_base_with_missing_weights(tiny_base, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    tensors = weights(base)
    del tensors[next(name for name in tensors if "q_proj" in name)]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=r"weights are missing .* the first is .*q_proj"):
        tune(base, tmp_path / "run")


def test_adapter_training_does_not_change_the_base(tiny_base, tmp_path, recorder):
    before = AutoModelForImageTextToText.from_pretrained(tiny_base).state_dict()

    output = tune(tiny_base, tmp_path / "run", lora=LoraShape(rank=4, alpha=8), freeze_vision=False)

    model = recorder.made[0].model
    in_memory = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
        for name, weight in model.state_dict().items()
        if "lora_" not in name
    }
    assert output.name == "adapter"
    assert all(torch.equal(before[name], in_memory[name]) for name in before)
    adapter = weights(output)
    assert all(".language_model." in name and "lora_" in name for name in adapter)
    # seven projections in each of two layers, A and B; B is zero before training
    assert len(adapter) == 2 * 2 * 7
    assert all(adapter[name].abs().sum() > 0 for name in adapter)
    assert not (output / "model.safetensors").exists()


def test_full_checkpoint_can_be_trained_again(tiny_base, tmp_path):
    output = tune(tiny_base, tmp_path / "run", max_steps=1)
    again = tune(output, tmp_path / "again", max_steps=1)

    assert output.name == "model"
    assert changed(output, again)
    template = load_processor(again).chat_template
    assert template == load_processor(tiny_base).chat_template


def test_result_depends_only_on_the_seed(tiny_base, tmp_path):
    lora = LoraShape(rank=4)
    torch.manual_seed(1)
    first = tune(tiny_base, tmp_path / "first", lora=lora, max_steps=2)
    torch.manual_seed(2)
    again = tune(tiny_base, tmp_path / "again", lora=lora, max_steps=2)
    other = tune(tiny_base, tmp_path / "other", lora=lora, max_steps=2, seed=1)

    assert not changed(first, again)
    assert changed(first, other)


# --- row order -----------------------------------------------------------------------------------


def test_each_epoch_has_every_row_once_and_the_last_may_be_partial():
    order = row_order([1] * 10, 2, 2.5, seed=0)

    assert len(order) == 25
    counts = Counter(order)
    # two full epochs and half of a third
    assert sorted(counts.values()) == [2] * 5 + [3] * 5
    assert row_order([1] * 10, 2, 1.0, seed=0) != row_order([1] * 10, 2, 1.0, seed=1)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    batch=st.integers(1, 9),
    passes=st.integers(1, 3),
)
def test_row_order_keeps_every_row_for_any_batch_size(lengths, batch, passes):
    order = row_order(lengths, batch, passes, seed=3)

    assert sorted(order) == sorted([*range(len(lengths))] * passes)


def test_batches_have_similar_lengths_and_are_shuffled():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, 800).tolist()

    order = row_order(lengths, 8, 1.0, seed=0)

    batches = [[lengths[i] for i in order[n : n + 8]] for n in range(0, 800, 8)]
    padded = sum(8 * max(batch) for batch in batches)
    # a random batch of 8 is 8/9 as long as the longest: 1.8 times its content; sorted, it is near 1
    assert padded < 1.1 * sum(lengths)
    longest = [max(batch) for batch in batches]
    # in random order, half of the batches are longer than the previous one: 99 / 2, within 3 sd
    longer = sum(a < b for a, b in itertools.pairwise(longest))
    assert abs(longer - 49.5) < 15


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "held",
    [{}, {"lora": LoraShape(rank=4)}, {"lora": LoraShape(rank=4), "quantize": "4bit"}],
    ids=["whole", "adapter", "adapter on 4 bits"],
)
def test_killed_run_resumes_from_its_last_checkpoint(qwen_base, tmp_path, recorder, held):
    # step 3 is in the middle of the second epoch of four rows
    whole = tune(qwen_base, tmp_path / "whole", **held, save_steps=3)
    recorder.at_step, recorder.happens = 5, staticmethod(cut)
    with pytest.raises(PowerCut):
        tune(qwen_base, tmp_path / "cut", **held, save_steps=3)
    assert [step for step, _ in rows_of(tmp_path / "cut")] == [1, 2, 3, 4]
    # simulate an incomplete checkpoint
    incomplete = tmp_path / "cut" / "checkpoints" / "checkpoint-5"
    incomplete.mkdir()
    (incomplete / "model.safetensors").write_bytes(b"incomplete")

    recorder.happens = None
    resumed = tune(qwen_base, tmp_path / "cut", **held, save_steps=3, resume=True)

    assert recorder.made[-1].state.global_step == 5
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert not changed(whole, resumed)


def test_ctrl_c_saves_the_current_step(tiny_base, tmp_path, recorder):
    whole = tune(tiny_base, tmp_path / "whole")
    before = signal.getsignal(signal.SIGINT)
    recorder.at_step = 3
    recorder.happens = staticmethod(lambda: signal.raise_signal(signal.SIGINT))

    with pytest.raises(StoppedEarly, match=f"resume with --resume {tmp_path / 'stopped'}"):
        tune(tiny_base, tmp_path / "stopped")

    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "stopped" / "checkpoints" / "checkpoint-3").is_dir()
    assert not (tmp_path / "stopped" / "model").exists()

    recorder.happens = None
    resumed = tune(tiny_base, tmp_path / "stopped", resume=True)
    assert not changed(whole, resumed)
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(tiny_base, tmp_path):
    first = weights(tune(tiny_base, tmp_path / "run"))
    again = weights(tune(tiny_base, tmp_path / "run", resume=True))

    assert all(torch.equal(first[name], again[name]) for name in first)


def test_new_run_ignores_old_checkpoints(tiny_base, tmp_path):
    tune(tiny_base, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()

    again = tune(tiny_base, tmp_path / "run", max_steps=1)

    assert [step for step, _ in rows_of(tmp_path / "run")] == [1]
    assert changed(tiny_base, again)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*")] == [
        "checkpoint-1"
    ]


def test_reports_a_missing_base(tmp_path):
    with pytest.raises(CheckpointError, match="nothing: no such folder"):
        tune(tmp_path / "nothing", tmp_path / "run")


def test_logits_at_labels_only_give_the_same_loss(tmp_path, monkeypatch):
    qwen = build_qwen(tmp_path / "qwen")
    rows = [judge_row(n, "True", "False") for n in range(6)]
    taken: list[int] = []
    apply = trl_utils._ChunkedLogProbFunction.apply
    monkeypatch.setattr(
        trl_utils._ChunkedLogProbFunction,
        "apply",
        lambda hidden, *rest: taken.append(len(hidden)) or apply(hidden, *rest),
    )

    def losses(name: str) -> list[float]:
        taken.clear()
        directory = RunDirectory.open(tmp_path / name, NoConfig())
        settings = SETTINGS.model_copy(update={"lr": 1e-3})
        template = CHATML.read_text(encoding="utf-8")
        fine_tune(qwen, rows, settings, directory, training_template=template)
        return [row["loss"] for row in directory.rows() if "loss" in row]

    few, few_taken = losses("few"), sum(taken)
    monkeypatch.setattr(sft_trainer, "logits_at_labels_only", contextlib.nullcontext)
    all_, all_taken = losses("all"), sum(taken)

    # two rows, each with two verdicts and two end tokens
    assert few_taken == 5 * 2 * 4
    assert all_taken > 5 * few_taken
    assert few == pytest.approx(all_, abs=1e-5)


def test_reports_a_base_that_is_neither_a_path_nor_a_hub_id(tmp_path):
    for base in (tmp_path / "runs" / "sft" / "model", "runs/policy/sft/model"):
        with pytest.raises(CheckpointError, match=r"no such folder.*Hub ID"):
            open_processor(base)
        with pytest.raises(CheckpointError, match="no such folder"):
            load_base(base, "fp32", "fp32", None, torch.device("cpu"))
