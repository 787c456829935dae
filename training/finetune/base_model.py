"""Loads the base model of a fine-tuning run and selects the weights to train.

Full fine-tuning trains the language model and what the paper calls the adapter: the layers between
image encoder and language model. In Qwen2.5-VL these are part of the encoder (`visual.merger`), so
freezing the encoder must exclude them. Alternatively only a LoRA adapter is trained, on weights of
32, 16 or 4 bits.
"""

import re
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from pydantic import Field
from transformers import BitsAndBytesConfig, PreTrainedModel

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError, ConfigError

Weights = Literal["fp32", "bf16"]
"""Precision of weights in memory."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LoraShape(FrozenModel):
    """A LoRA adapter on linear layers (Hu et al. 2021); its weights are in fp32."""

    rank: int = Field(default=16, gt=0)
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    """Regular expression over module names; by default all linear layers of the language model.

    To include the layers between encoder and language model, append
    `|.*visual\\.merger\\.mlp\\.(0|2)`. They also get LoRA rather than a trained copy
    (`modules_to_save`): a copy has 45 M weights for Qwen2.5-VL-7B, is not supported by servers that
    switch adapters, and cannot be made from 4-bit weights.
    """


_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_base(source: Path | str) -> None:
    """Check that a base model is an existing folder or a valid Hub ID.

    Raises:
        CheckpointError: It is neither.
    """
    if not Path(source).is_dir() and not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(
            f"{source}: no such folder, and not a Hub ID (OWNER/NAME); if an earlier stage writes "
            "this folder, run that first"
        )


def load_base(
    source: Path | str,
    weights: Weights,
    compute: Weights,
    quantize: Literal["4bit"] | None,
    device: torch.device,
) -> PreTrainedModel:
    """Load a model to train.

    Args:
        source: Checkpoint folder or Hub ID.
        weights: Precision of the weights that are not quantised.
        compute: Precision of computations with quantised weights.
        quantize: "4bit" is NF4 with double quantisation (Dettmers et al. 2023).
        device: Device that weights are quantised on. Weights that are not quantised are placed by
            the trainer, which may shard them first.

    Raises:
        CheckpointError: The model cannot be loaded.
    """
    check_base(source)
    options: dict[str, Any] = {}
    if quantize:
        options["device_map"] = {"": device}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[compute],
        )
    try:
        loaded: Any = load_model(source, dtype=DTYPES[weights], output_loading_info=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{source}: cannot be loaded: {error}") from error
    model, report = loaded
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise CheckpointError(
            f"{source}: {len(missing)} weights are missing or have the wrong shape, the first is "
            f"{missing[0]}; config.json does not match the weights"
        )
    if quantize:
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # In its first pass without gradients (a GRPO rollout), bitsandbytes would repack
                # these weights into a layout that it cannot backpropagate through.
                module.support_avx512bf16_for_cpu = False
    base: PreTrainedModel = model
    return base


def freeze_image_encoder(model: PreTrainedModel) -> None:
    """Freeze the image encoder, but not the layers that project its output.

    Raises:
        ConfigError: The model has no separate image encoder.
    """
    encoder: Any = image_encoder(model)
    encoder.requires_grad_(False)
    for name, part in encoder.named_children():
        if _is_merger(name):
            part.requires_grad_(True)


def image_encoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the image encoder of a model.

    Raises:
        ConfigError: The model has no separate image encoder.
    """
    encoder: Any = model.get_encoder(modality="image")
    if encoder is model or encoder is model.base_model:
        raise ConfigError(
            f"freeze_vision: {type(model).__name__} has no separate image encoder; "
            "set freeze_vision = false"
        )
    module: torch.nn.Module = encoder
    return module


def lora_config(model: PreTrainedModel, lora: LoraShape, *, freeze_vision: bool) -> LoraConfig:
    """Return peft's settings of an adapter, after checking its target modules.

    Raises:
        ConfigError: `target_modules` is not a regular expression, matches no linear layer, or
            matches one in the image encoder although `freeze_vision` is set.
    """
    try:
        pattern = re.compile(lora.target_modules)
    except re.error as error:
        raise ConfigError(
            f"lora.target_modules: {lora.target_modules!r} is not a regular expression: {error}"
        ) from error
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    targets = [name for name in linear if pattern.fullmatch(name)]
    if not targets:
        raise ConfigError(
            f"lora.target_modules: {lora.target_modules!r} matches none of the {len(linear)} linear "
            f"layers of this {type(model).__name__}; a valid name is {linear[-1]}"
        )
    if freeze_vision:
        frozen = {
            id(part)
            for name, part in image_encoder(model).named_modules()
            if not _is_merger(name.partition(".")[0])
        }
        in_encoder = [name for name in targets if id(model.get_submodule(name)) in frozen]
        if in_encoder:
            raise ConfigError(
                f"lora.target_modules: {lora.target_modules!r} matches {in_encoder[0]} in the image "
                "encoder; narrow it, or set freeze_vision = false"
            )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _is_merger(name: str) -> bool:
    """Whether a child of the encoder projects its output: Qwen3-VL has a `deepstack_merger_list` too."""
    return "merger" in name
