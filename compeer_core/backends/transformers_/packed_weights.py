"""Checkpoints with weights in blocks of 4 and 8 bits, as in GGUF files.

The base of COMPEER-small comes from a GGUF file. Its matrices stay in their original blocks, so
nothing is rounded twice and the file is a third of its size in bf16. `packed.safetensors` stores the
matrix `name` as bytes under `name:q4_1` or `name:q8_0`, one row of blocks per row of the matrix, and
all other tensors under their own names. The whole project loads checkpoints with `load_model`, which
leaves folders without `packed.safetensors` to transformers.

Block formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml-common.h.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from compeer_core.errors import CheckpointError

PACKED = "packed.safetensors"
"""The file of packed weights in a checkpoint folder."""

BLOCK = 32
"""Consecutive weights of a row in one block."""
BYTES = {"q4_1": 20, "q8_0": 34}
"""Bytes of a block: one or two 16-bit floats, then the weights."""


def unpacked(blocks: Tensor, kind: str) -> Tensor:
    """Return the matrix that blocks encode.

    A weight is `scale * q + minimum` (q4_1, q in 0 to 15) or `scale * q` (q8_0, q in -128 to 127).

    Args:
        blocks: Bytes, shape (rows, columns / 32 * bytes of a block).
        kind: "q4_1" or "q8_0".

    Returns:
        Floats of 32 bits, shape (rows, columns).

    Raises:
        ValueError: The kind is unknown, or the bytes are not a whole number of its blocks.
    """
    if kind not in BYTES:
        raise ValueError(f"{kind}: unknown kind of blocks; the known kinds are {', '.join(BYTES)}")
    rows, length = blocks.shape
    if length % BYTES[kind]:
        raise ValueError(
            f"rows of {length} bytes are not whole blocks of {BYTES[kind]} bytes ({kind})"
        )
    parts = blocks.contiguous().view(-1, BYTES[kind])
    scale = parts[:, :2].contiguous().view(torch.float16).float()
    if kind == "q8_0":
        values = scale * parts[:, 2:].contiguous().view(torch.int8)
    else:
        minimum = parts[:, 2:4].contiguous().view(torch.float16).float()
        halves = parts[:, 4:]
        # A byte holds weight i in its lower half and weight i + 16 in its upper half.
        values = scale * torch.cat([halves & 15, halves >> 4], dim=1) + minimum
    return values.view(rows, -1)


def packed_rows(values: Tensor) -> Tensor:
    """Return a matrix as q8_0 blocks: the inverse of `unpacked`, to 1/254 of each block's largest weight.

    Args:
        values: Shape (rows, columns), columns a multiple of 32.
    """
    parts = values.float().reshape(-1, BLOCK)
    scale = (parts.abs().amax(dim=1, keepdim=True) / 127).half()
    steps = torch.where(scale > 0, parts / scale.float().clamp(min=1e-30), 0.0)
    whole = steps.round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat([scale.view(torch.uint8), whole.view(torch.uint8)], dim=1)
    return blocks.view(values.shape[0], -1)


def save_packed(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `packed.safetensors` under a temporary name, then rename it.

    Args:
        folder: The checkpoint folder; must exist.
        tensors: In the file's form: bytes under `name:kind`, other tensors under their names.
    """
    fresh = folder / f"{PACKED}.new"
    save_file({name: t.contiguous() for name, t in tensors.items()}, fresh, {"format": "pt"})
    fresh.replace(folder / PACKED)


def read_packed(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of `packed.safetensors` in the file's form.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(folder / PACKED)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / PACKED} is damaged ({error}); copy it again") from error
    return tensors


def weights_of(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's weights by name, unpacked, in one dtype."""
    weights = {}
    for name, tensor in tensors.items():
        plain, _, kind = name.partition(":")
        weights[plain] = (unpacked(tensor, kind) if kind else tensor).to(dtype)
    return weights


def load_model(
    source: Path | str, dtype: torch.dtype | str, *, text_only: bool = False, **options: Any
) -> Any:
    """Load a vision-language model, or a language model. Code in a checkpoint is never executed.

    Args:
        source: A checkpoint folder, packed or not, or a Hub ID.
        dtype: Of the weights; "auto" is the checkpoint's own, and bf16 for packed ones.
        text_only: It is a language model, which has no image tower.
        options: Passed to `from_pretrained`.

    Returns:
        The result of `from_pretrained`: the model, or a pair with `output_loading_info`.
    """
    if not (Path(source) / PACKED).is_file():
        auto_model: Any = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
        return auto_model.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options
        )
    kind = torch.bfloat16 if isinstance(dtype, str) else dtype
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights_of(read_packed(Path(source)), kind),
        dtype=kind,
        **options,
    )
