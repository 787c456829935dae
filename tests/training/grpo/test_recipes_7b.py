"""The shipped recipes of GRPO at 7 B: numbers of the paper, names of the model's parts, and memory."""

import re
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from compeer_core.config import load_toml
from compeer_core.registry import SourceKind, parse_source
from training.benchmark.random_checkpoints import SHAPES
from training.finetune.base_model import lora_config
from training.grpo.train import Config

pytestmark = [
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

QWEN = Path(__file__).resolve().parents[3] / "training" / "configs" / "qwen"
RECIPES = sorted(QWEN.glob("grpo_*.toml"))
PROCESSES = {"grpo_full": 8, "grpo_lora": 1, "grpo_qlora": 1}
TEXT = SHAPES["qwen2.5-vl-7b"]["text_config"]


@pytest.fixture(scope="module")
def qwen_7b() -> PreTrainedModel:
    """Qwen2.5-VL-7B's parts, by the numbers of its config.json, without their weights."""
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**SHAPES["qwen2.5-vl-7b"]))


def said(path: Path, pattern: str) -> float:
    """A number in a recipe's words."""
    found = re.search(pattern, path.read_text(encoding="utf-8").replace("\n#", ""))
    assert found is not None, pattern
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_for_7b_has_the_papers_numbers(path, qwen_7b):
    config = load_toml(path, Config)
    training, reweighting = config.training, config.reweighting
    processes = PROCESSES[path.stem]

    assert path.stem in PROCESSES
    assert training.batch_size * training.accumulation * processes == 32
    training.check_batches(processes)
    assert (training.group_size, reweighting.alpha, reweighting.beta) == (4, 0.5, 5.0)
    assert training.lr == (1e-6 if training.lora is None else 1e-5)
    assert parse_source(config.judge.source).kind is SourceKind.ENDPOINT
    if training.rollouts == "vllm":
        assert training.vllm is not None
        assert training.vllm.context == training.longest_prompt + training.max_new_tokens
    if training.lora is not None:
        adapter = lora_config(qwen_7b, training.lora, freeze_vision=training.freeze_vision)
        adapted = get_peft_model(qwen_7b, adapter)
        weights = [p for n, p in adapted.named_parameters() if "lora_" in n]
        adapted.unload()
        assert len(weights) == 2 * 7 * 28
        # In fp32 with a gradient and AdamW's two moments: 16 bytes each.
        assert said(path, r"([\d.]+) GB of adapter") == pytest.approx(
            16 * sum(p.numel() for p in weights) / 1e9, abs=0.05
        )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_arithmetic_on_memory_is_right(path):
    training = load_toml(path, Config).training
    a_token = 2 * TEXT["num_hidden_layers"] * TEXT["num_key_value_heads"] * 128 * 2
    assert a_token == pytest.approx(57e3, rel=0.01)
    assert "57 kB per token" in path.read_text(encoding="utf-8").replace("\n# ", " ")
    if training.rollouts == "vllm":
        return
    tokens = training.longest_prompt + training.max_new_tokens
    assert said(path, r"([\d.]+) GB of cache") == pytest.approx(
        32 * tokens * a_token / 1e9, abs=0.05
    )
    logits = training.batch_size * training.max_new_tokens * TEXT["vocab_size"] * 4 / 1e9
    assert said(path, r"([\d.]+) GB for the logits") == pytest.approx(logits, abs=0.05)


def test_weights_take_what_the_recipes_say(qwen_7b):
    every = sum(p.numel() for p in qwen_7b.parameters())
    linear = sum(
        part.weight.numel()
        for name, part in qwen_7b.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    )
    encoder = sum(
        p.numel() for n, p in qwen_7b.named_parameters() if "visual." in n and "merger" not in n
    )

    assert said(QWEN / "grpo_lora.toml", r"([\d.]+) GB of weights") == pytest.approx(
        2 * every / 1e9, abs=0.05
    )
    # NF4: half a byte, and with double quantisation about 1/64 byte of scales; the rest in bf16
    packed = linear / 2 + linear / 64 + 2 * (every - linear)
    assert said(QWEN / "grpo_qlora.toml", r"([\d.]+) GB of weights") == pytest.approx(
        packed / 1e9, abs=0.05
    )
    assert said(QWEN / "grpo_full.toml", r"memory: (\d+) GB") == pytest.approx(
        (4 * every + 12 * (every - encoder)) / 1e9, abs=1
    )


@pytest.mark.parametrize("name", ["one_gpu", "ddp", "fsdp", "zero3"])
def test_the_launcher_takes_them(name, monkeypatch):
    from accelerate.commands import launch

    monkeypatch.setattr(launch, "is_deepspeed_available", lambda: True)
    parser = launch.launch_command_parser()
    given = ["--config_file", str(QWEN / f"{name}.yaml"), "-m", "training", "grpo", "x.toml"]

    settled, *_ = launch._validate_launch_command(parser.parse_args(given))

    assert settled.use_fsdp == (name == "fsdp")
    assert settled.use_deepspeed == (name == "zero3")
    assert settled.multi_gpu == (name == "ddp")
    assert settled.mixed_precision == "bf16"
    assert settled.num_processes == (1 if name == "one_gpu" else 8)
    if name == "fsdp":
        assert str(settled.fsdp_version) == "2"
    if name == "zero3":
        assert settled.zero_stage == 3
        assert str(settled.zero3_save_16bit_model).lower() == "true"
