"""The copy that completions are written with: an adapter merged by hand, and what a trainer writes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from compeer_core.errors import ConfigError
from training.grpo import train
from training.grpo.rollout_model import RolloutModel
from training.grpo.settings import GRPOSettings

pytestmark = [
    pytest.mark.usefixtures("one_thread", "words"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]


class Small(nn.Module):
    """Two layers, of which the first gets an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 1)


def test_an_adapter_is_merged_and_the_trained_weights_are_copied_by_hand():
    trained, copy = Small(), Small()
    for model in (trained, copy):
        model.inner.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    untouched = copy.inner.bias.clone()
    adapted: Any = get_peft_model(trained, LoraConfig(r=1, lora_alpha=3, target_modules=["inner"]))
    layer = adapted.get_base_model().inner
    layer.lora_A["default"].weight.data = torch.tensor([[0.5, -1.0]])
    layer.lora_B["default"].weight.data = torch.tensor([[2.0], [1.0]])
    trained.outer.weight.requires_grad_(True).data = torch.tensor([[7.0, 8.0]])
    writer = RolloutModel(copy)

    writer.update_from(adapted)

    # W + 3/1 B A, with B A = [[1, -2], [0.5, -1]]
    assert copy.inner.weight.tolist() == [[4.0, -4.0], [4.5, 1.0]]
    assert torch.equal(copy.inner.bias, untouched)
    assert copy.outer.weight.tolist() == [[7.0, 8.0]]
    assert layer.base_layer.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    writer.update_from(adapted)
    assert copy.inner.weight.tolist() == [[4.0, -4.0], [4.5, 1.0]]  # not merged twice
    assert not any(weight.requires_grad for weight in copy.parameters())


@pytest.fixture
def moved(trainer: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a trainer whose trained weights are no longer those it began with."""

    def made(**changes: Any) -> Any:
        one = trainer(**changes)
        one.model.train()
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in one.model.parameters():
                if weight.requires_grad:
                    weight.add_(0.1 * torch.randn_like(weight))
        return one

    return made


@pytest.mark.parametrize("lora", [False, True])
def test_a_copy_writes_what_the_trained_weights_would(moved, lora):
    changes = {"lora": {"rank": 2}} if lora else {}
    plain = moved(precision="fp32", **changes)
    copying = moved(precision="fp32", rollout_weights="fp32", **changes)
    inputs = next(iter(plain.get_train_dataloader()))

    written = [one._generate_and_score_completions(inputs) for one in (plain, copying)]

    assert torch.equal(written[0]["completion_ids"], written[1]["completion_ids"])
    assert torch.equal(written[0]["advantages"], written[1]["advantages"])


def test_a_copy_may_lie_in_another_precision(moved):
    one = moved(rollout_weights="bf16", lora={"rank": 2})

    written = one._generate_and_score_completions(next(iter(one.get_train_dataloader())))

    assert written["completion_ids"].numel() > 0
    with one._for_generation() as chat:
        assert chat.model.dtype == torch.bfloat16
    assert all(w.dtype == torch.float32 for w in one.model.parameters() if w.requires_grad)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="needs rollouts = 'shared', not 'plain'"):
        GRPOSettings(rollout_weights="bf16", rollouts="plain")
    with pytest.raises(ValueError, match="cannot merge an adapter into 4-bit weights"):
        GRPOSettings(rollout_weights="bf16", quantize="4bit", lora={"rank": 2})


def test_a_copy_is_refused_where_whatever_is_loaded_is_split(moved, monkeypatch):
    monkeypatch.setattr(train, "is_deepspeed_zero3_enabled", lambda: True)

    moved()
    with pytest.raises(ConfigError, match=r"but DeepSpeed ZeRO-3 .* remove it, or use ZeRO-2"):
        moved(rollout_weights="bf16")
