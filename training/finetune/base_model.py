"""The model that a fine-tuning starts from: how its weights are held, and which of them are trained.

Of a whole model the language model is trained and, with it, what the paper calls the adapter: the
layers between image encoder and language model. Qwen2.5-VL keeps them inside its encoder, as
`visual.merger`; freezing the encoder must leave them out. Or nothing of the model is trained but a
LoRA adapter, on weights of 32, 16 or 4 bits.
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
"""The precision in which weights lie in memory."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LoraShape(FrozenModel):
    """A LoRA adapter on linear layers (Hu et al. 2021); its own weights are held in fp32."""

    rank: int = Field(default=16, gt=0)
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    """A regular expression over module names: by default every linear layer of the language model.

    The layers between encoder and language model are reached by name too, as
    `|.*visual\\.merger\\.mlp\\.(0|2)`. They get LoRA like the rest, not a trained copy
    (`modules_to_save`): a copy has 45 M weights for Qwen2.5-VL-7B, is refused by servers that
    switch adapters, and cannot be made of 4-bit weights.
    """


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_base(source: Path | str) -> None:
    """Make sure that a base is a folder, or can be a name on the hub.

    Raises:
        CheckpointError: It is neither.
    """
    if not Path(source).is_dir() and not _HUB_NAME.fullmatch(str(source)):
        raise CheckpointError(
            f"{source}: no such folder (an earlier stage writes it), and no name on the hub, which "
            f"would be OWNER/NAME"
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
        source: Checkpoint folder, or hub name.
        weights: How weights are held; with `quantize`, those that are not quantised.
        compute: The precision that quantised weights are computed in.
        quantize: "4bit" is NF4 with the constants quantised as well (Dettmers et al. 2023).
        device: Where quantised weights go: they are packed there. Others are placed by the
            trainer, which may have to split them first.

    Raises:
        CheckpointError: It cannot be loaded.
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
    lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if lacking:
        raise CheckpointError(
            f"{source}: {len(lacking)} weights are missing or of the wrong shape, first "
            f"{lacking[0]}; config.json and the weights do not belong together"
        )
    if quantize:
        for part in model.modules():
            if hasattr(part, "support_avx512bf16_for_cpu"):
                # bitsandbytes would pack these weights anew in the first pass without gradients, in a
                # form that it cannot train through; GRPO writes first and trains afterwards.
                part.support_avx512bf16_for_cpu = False
    trained: PreTrainedModel = model
    return trained


def freeze_image_encoder(model: PreTrainedModel) -> None:
    """Leave the image encoder out of the training, but not the layers that adapt its output.

    Raises:
        ConfigError: This kind of model keeps its encoder where it is not looked for.
    """
    encoder: Any = image_encoder(model)
    encoder.requires_grad_(False)
    for name, part in encoder.named_children():
        if _is_merger(name):
            part.requires_grad_(True)


def image_encoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that reads pictures.

    Raises:
        ConfigError: This kind of model keeps its encoder where it is not looked for.
    """
    encoder: Any = model.get_encoder(modality="image")
    if encoder is model or encoder is model.base_model:
        raise ConfigError(
            f"freeze_vision: no image encoder was found in a {type(model).__name__}; "
            "set freeze_vision = false"
        )
    found: torch.nn.Module = encoder
    return found


def lora_config(model: PreTrainedModel, lora: LoraShape, *, freeze_vision: bool) -> LoraConfig:
    """Return an adapter's settings for peft, once its target modules are known to be there.

    Raises:
        ConfigError: `target_modules` is no regular expression, finds no linear layer, or finds one
            in the image encoder, which `freeze_vision` leaves as it is.
    """
    try:
        pattern = re.compile(lora.target_modules)
    except re.error as error:
        raise ConfigError(
            f"lora.target_modules: {lora.target_modules!r} is no regular expression: {error}"
        ) from error
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    found = [name for name in linear if pattern.fullmatch(name)]
    if not found:
        raise ConfigError(
            f"lora.target_modules: {lora.target_modules!r} fits none of the {len(linear)} linear "
            f"layers of this {type(model).__name__}; they have names such as {linear[-1]}"
        )
    if freeze_vision:
        encoder = image_encoder(model)
        frozen = {
            id(part)
            for name, part in encoder.named_modules()
            if not _is_merger(name.partition(".")[0])
        }
        inside = [name for name in found if id(model.get_submodule(name)) in frozen]
        if inside:
            raise ConfigError(
                f"lora.target_modules: {lora.target_modules!r} reaches into the image encoder "
                f"({inside[0]}); narrow it, or set freeze_vision = false"
            )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _is_merger(name: str) -> bool:
    """Qwen2.5-VL's is `merger`; Qwen3-VL has a `deepstack_merger_list` as well."""
    return "merger" in name
