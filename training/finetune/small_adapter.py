"""LoRA adapters on a small frozen base: loading, fp32 masters, and rows shared between processes.

Policies (`sft adapter`) and judges (`reward adapter`) are trained with these parts. Base and adapter
compute in bf16 where the CPU multiplies it natively, else in fp32: on a CPU without such instructions bf16
is nine times slower (measured on AVX2). In bf16 small updates would be rounded away, so the optimiser
always updates an fp32 copy of the adapter (`Masters`).
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from peft import (
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.errors import CheckpointError, ConfigError
from training.common.processes import process_count, process_rank
from training.finetune.base_model import LoraShape, Weights, load_base, lora_config
from training.finetune.shared_prefix import SharedPrefixRow

T = TypeVar("T")


# --- the adapter -------------------------------------------------------------------------------


class Masters(nn.Module):
    """The fp32 copy of an adapter's weights, one behind the other: what is moved and saved.

    With gradients of fp32 too, as a sum of many rows in bf16 would lose the small ones.
    """

    def __init__(self, adapter: Sequence[nn.Parameter]) -> None:
        """Copy the weights of an adapter."""
        super().__init__()
        self._adapter = tuple(adapter)
        self._sizes = [weight.numel() for weight in adapter]
        self.flat = nn.Parameter(torch.cat([weight.detach().float().ravel() for weight in adapter]))

    @property
    def gradient(self) -> Tensor:
        """What was collected since `forget`."""
        assert self.flat.grad is not None
        return self.flat.grad

    def forget(self) -> None:
        """Begin a sum of gradients."""
        self.flat.grad = torch.zeros_like(self.flat)

    def collect(self) -> None:
        """Add the adapter's gradients to the sum; the adapter has none then."""
        for weight, part in zip(self._adapter, self.gradient.split(self._sizes), strict=True):
            if weight.grad is not None:
                part += weight.grad.ravel()
                weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the adapter its values, rounded to its own type."""
        for weight, part in zip(self._adapter, self.flat.split(self._sizes), strict=True):
            weight.copy_(part.view_as(weight))


def fastest_precision(device: str) -> Weights:
    """Return the precision in which a device multiplies matrices fastest.

    That is bf16, except on a CPU without instructions for it.
    """
    if device != "cpu":
        return "bf16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, Any])()  # torch 2.11 has none
    names = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
    return "bf16" if any(capabilities.get(name) for name in names) else "fp32"


def load_small_base(base: Path, precision: Weights) -> Qwen2_5_VLForConditionalGeneration:
    """Load a Qwen2.5-VL on the CPU.

    Raises:
        CheckpointError: It cannot be loaded, or is another model.
    """
    model = load_base(base, precision, precision, None, torch.device("cpu"))
    if not isinstance(model, Qwen2_5_VLForConditionalGeneration):
        raise CheckpointError(f"{base}: a {type(model).__name__}; only a Qwen2.5-VL is trained so")
    return model


def check_shape(start: Path, lora: LoraShape) -> None:
    if not (start / "adapter_config.json").is_file():
        raise ConfigError(f"start: {start} holds no adapter_config.json")
    settings: Any = PeftConfig.from_pretrained(str(start))
    shape = (getattr(settings, "r", None), getattr(settings, "lora_alpha", None))
    if shape != (lora.rank, lora.alpha):
        raise ConfigError(
            f"start: {start} has rank and alpha {shape[0]} and {shape[1]}, but lora asks for "
            f"{lora.rank} and {lora.alpha}; set those"
        )


def add_adapter(model: Any, lora: LoraShape, base: Path, start: Path | None = None) -> PeftModel:
    """Put an adapter in a model, in the type of its weights; nothing else can be trained then.

    Args:
        model: The base; its modules are replaced.
        lora: Shape of the adapter.
        base: Folder of the base, for errors.
        start: Adapter to start from; None starts from one that changes nothing.

    Raises:
        CheckpointError: `start` has other weights.
    """
    shape = lora_config(model, lora, freeze_vision=True)
    adapted = get_peft_model(model, shape, autocast_adapter_dtype=False)
    assert isinstance(adapted, PeftModel)
    if start is not None:
        weights = load_peft_weights(str(start), device="cpu")
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        stored, required = (
            {(name, tensor.shape) for name, tensor in tensors.items()}
            for tensors in (weights, expected)
        )
        if different := sorted(stored ^ required):
            raise CheckpointError(
                f"{start} does not fit {base}: {len(different)} weights differ, first "
                f"{different[0][0]}; name the base that it was trained on"
            )
        set_peft_model_state_dict(adapted, weights)
    return adapted


def save_adapter(adapted: PeftModel, base: Path, folder: Path) -> None:
    """Write the adapter in bf16; it names its base by the folder's name alone, which is the same everywhere."""
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path = base.name
    weights = {name: w.bfloat16() for name, w in adapted.state_dict().items() if "lora_" in name}
    adapted.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's form of a card, not filled in


# --- the rows of a step --------------------------------------------------------------------------


def steps_of(dialogues: Sequence[T], size: int, seed: int, skip: int) -> Iterator[list[T]]:
    """Yield the dialogues of each step, for ever, from step `skip` on; each pass has an order of its own."""
    size = min(size, len(dialogues))
    for number in itertools.count():
        order = np.random.default_rng([seed, number]).permutation(len(dialogues)).tolist()
        for start in range(0, len(order) - size + 1, size):
            if skip:
                skip -= 1
                continue
            yield [dialogues[place] for place in order[start : start + size]]


def shared_out(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """Return which items each process takes, so that all have about as much to do.

    The longest go first, one to each process there and back again.

    >>> shared_out([5, 9, 1, 7, 3], 2)
    [[1, 4, 2], [3, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    there_and_back = itertools.cycle([*range(processes), *reversed(range(processes))])
    shares: list[list[int]] = [[] for _ in range(processes)]
    for item, taker in zip(order, there_and_back, strict=False):
        shares[taker].append(item)
    return shares


def own_rows(rows: Sequence[SharedPrefixRow]) -> list[SharedPrefixRow]:
    """Return the rows that are this process's."""
    shares = shared_out([row.tokens.shape[1] for row in rows], process_count())
    return [rows[item] for item in shares[process_rank()]]
