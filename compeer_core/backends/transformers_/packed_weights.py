"""Weights that lie on disk in blocks of 4 and 8 bits, as GGUF files have them.

The base of COMPEER-small came as a GGUF file. Its matrices are stored as the blocks they came in, so nothing
is rounded a second time and the file is a third of what bf16 would take. `packed.safetensors` holds a matrix of
`name` as bytes under `name:q4_1` or `name:q8_0`, one row of blocks for each row of the matrix; whatever else
a model has lies there under its own name. `load_model` is what all of the project loads checkpoints with:
a folder without `packed.safetensors` is left to transformers.

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
    AutoModelForImageTextToText,
)

from compeer_core.errors import CheckpointError

PACKED = "packed.safetensors"
"""The file of packed weights in a checkpoint's folder."""

BLOCK = 32
"""Weights in a block, neighbours of one row."""
BYTES = {"q4_1": 20, "q8_0": 34}
"""Bytes of a block: one or two 16-bit floats, then the weights."""


def unpacked(blocks: Tensor, kind: str) -> Tensor:
    """Return the matrix that blocks stand for.

    A weight is `scale * q + minimum` (q4_1, q in 0 to 15) or `scale * q` (q8_0, q in -128 to 127).

    Args:
        blocks: Bytes, shape (rows, columns / 32 * bytes of a block).
        kind: "q4_1" or "q8_0".

    Returns:
        Floats of 32 bits, shape (rows, columns).

    Raises:
        ValueError: There is no such kind, or the bytes are no whole number of its blocks.
    """
    if kind not in BYTES:
        raise ValueError(f"{kind}: no such kind of blocks; they are {', '.join(BYTES)}")
    rows, length = blocks.shape
    if length % BYTES[kind]:
        raise ValueError(f"rows of {length} bytes are no whole blocks of {BYTES[kind]} ({kind})")
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
        folder: Of the checkpoint; it must be there.
        tensors: As the file has them: bytes under `name:kind`, other tensors under their names.
    """
    fresh = folder / f"{PACKED}.new"
    save_file({name: t.contiguous() for name, t in tensors.items()}, fresh, {"format": "pt"})
    fresh.replace(folder / PACKED)


def read_packed(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of `packed.safetensors` as the file has them.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(folder / PACKED)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / PACKED} is damaged ({error}); copy it again") from error
    return tensors


def weights_of(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's weights by name, unpacked and all of one type."""
    weights = {}
    for name, tensor in tensors.items():
        plain, _, kind = name.partition(":")
        weights[plain] = (unpacked(tensor, kind) if kind else tensor).to(dtype)
    return weights


def load_model(source: Path | str, dtype: torch.dtype | str, **options: Any) -> Any:
    """Load a vision-language model; code that comes with a checkpoint is never run.

    Args:
        source: Folder of a checkpoint, packed or not, or a name on the hub.
        dtype: Of the weights; "auto" is the checkpoint's own, and bf16 for packed ones.
        options: Passed on to `from_pretrained`.

    Returns:
        What `from_pretrained` returns: the model, or with `output_loading_info` a pair.
    """
    if not (Path(source) / PACKED).is_file():
        return AutoModelForImageTextToText.from_pretrained(
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
