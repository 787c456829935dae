"""The shipped recipes of reward models: numbers of the paper, and names of the model's parts."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from compeer_core.config import load_toml
from training.benchmark.random_checkpoints import SHAPES
from training.finetune.base_model import freeze_image_encoder, lora_config
from training.recipe import Config as RecipeConfig
from training.reward_model.adapter import Config as AdapterConfig
from training.reward_model.conversations import Kind
from training.reward_model.train import Config

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft 0.21 still reads a property that transformers 5.23 has renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]

CONFIGS = Path(__file__).resolve().parents[3] / "training" / "configs"
QWEN = sorted((CONFIGS / "qwen").glob("reward_*.toml"))
PROCESSES = {"reward_full": 8, "reward_lora": 1, "reward_qlora": 1}


@pytest.fixture(scope="module")
def qwen_7b() -> PreTrainedModel:
    """Qwen2.5-VL-7B's parts, by the numbers of its config.json, without their weights."""
    config = Qwen2_5_VLConfig(**SHAPES["qwen2.5-vl-7b"])
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(config)


def count(model: PreTrainedModel, *, trained: bool) -> float:
    """Thousands of millions of parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained) / 1e9


def test_of_7b_all_is_trained_but_the_encoder(qwen_7b):
    freeze_image_encoder(qwen_7b)

    trained = {name for name, p in qwen_7b.named_parameters() if p.requires_grad}
    assert {n.partition("visual.")[2].partition(".")[0] for n in trained if "visual." in n} == {
        "merger"
    }
    assert {n for n, _ in qwen_7b.named_parameters() if "visual." not in n} <= trained
    # 8.29 B in all; the encoder without its merger has 0.63 B
    assert count(qwen_7b, trained=False) == pytest.approx(8.292, abs=0.001)
    assert count(qwen_7b, trained=True) == pytest.approx(7.660, abs=0.001)


@pytest.mark.parametrize("path", QWEN, ids=lambda path: path.stem)
def test_a_recipe_for_7b_has_the_papers_numbers(path, qwen_7b):
    config = load_toml(path, Config)
    training = config.training

    # "a batch size of 64"; "a learning rate of 1 x 10^-5"; "the visual encoder is frozen"
    assert training.batch_size * training.accumulation * PROCESSES[path.stem] == 64
    assert training.freeze_vision
    assert training.lr == (1e-5 if training.lora is None else 1e-4)
    assert config.base == "Qwen/Qwen2.5-VL-7B-Instruct"
    if training.lora is not None:
        adapter = lora_config(qwen_7b, training.lora, freeze_vision=True)
        adapted = get_peft_model(qwen_7b, adapter)
        layers = {n.partition(".lora_")[0] for n, _ in adapted.named_parameters() if "lora_" in n}
        adapted.unload()
        # seven projections in each of 28 layers, two in the merger
        assert len(layers) == 7 * 28 + 2
        assert sum("visual.merger.mlp" in name for name in layers) == 2


def test_the_small_recipe_trains_each_kind_of_judge_on_the_same_rows():
    recipe = load_toml(CONFIGS / "small" / "judges.toml", RecipeConfig)
    runs = [stage.set for stage in recipe.stage if stage.config.name == "reward_adapter.toml"]
    default = load_toml(CONFIGS / "small" / "reward_adapter.toml", AdapterConfig)

    assert default.kind == Kind.UNIFIED
    assert default.output == Path("runs/small/reward_unified/seed0")
    for kind, settings in zip(Kind, runs, strict=True):
        changes = {"kind": kind, "output": f"runs/small/reward_{kind}/seed0"}
        own = {f"{key}={value}" for key, value in changes.items() if kind != Kind.UNIFIED}
        assert {*settings} == {"faces={data_dir}/faces", *own}
    more = load_toml(CONFIGS / "small" / "reward_adapter_own.toml", AdapterConfig)
    assert more.start == default.output / "adapter"  # UnifiReward is trained on
    assert (more.kind, more.lora, more.findings) == (default.kind, default.lora, default.findings)
