"""Reads a Llama from a GGUF file: sizes, byte-level BPE, and weights in their storage format."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from compeer_core.errors import CheckpointError

KINDS = {"Q4_1": "q4_1", "Q8_0": "q8_0", "F32": ""}
"""Tensor types in the file, and their suffixes in `packed_weights`."""

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class LlamaSizes:
    """The shape of the language model."""

    layers: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    key_value_heads: int
    context_length: int
    rope_theta: float
    norm_epsilon: float


@dataclass(frozen=True)
class GgufLlama:
    """The content of a GGUF file."""

    sizes: LlamaSizes
    tokens: tuple[str, ...]
    """In the byte-level alphabet; the index of a token is its row in `embeddings`."""
    merges: tuple[str, ...]
    """Pairs "left right", by priority."""
    is_special: tuple[bool, ...]
    embeddings: tuple[str, Tensor]
    """Storage format and rows."""
    weights: Mapping[str, Tensor]
    """Tensors by their names in Qwen2.5-VL's language model, in the format of `packed_weights`. Query
    and key rows are in transformers' order, not GGUF's."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_gguf(path: Path) -> GgufLlama:
    """Read a file.

    Raises:
        CheckpointError: The file is missing, truncated or not a GGUF; or not a Llama with tied
            embeddings, a "smollm" byte-level BPE, and matrices in Q4_1, Q8_0 or F32.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the recipe says where to get the GGUF")
    try:
        reader: Any = gguf.GGUFReader(path)
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path} cannot be read as GGUF ({error}); it may be truncated: download it again"
        ) from error
    try:
        return _llama(path, reader)
    except KeyError as error:
        raise CheckpointError(
            f"{path}: its header has no {error}; use a Llama with byte-level BPE, such as SmolLM2"
        ) from error


def _llama(path: Path, reader: Any) -> GgufLlama:
    def value(key: str) -> Any:
        field = reader.fields.get(key)
        if field is None:
            raise KeyError(key)
        return field.contents()

    kind = value("general.architecture")
    tokenizer = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")
    if kind != "llama" or tokenizer != ("gpt2", "smollm"):
        raise CheckpointError(
            f"{path} contains a {kind} with the tokenizer {'/'.join(tokenizer)}; "
            "use a llama with gpt2/smollm, such as SmolLM2"
        )
    sizes = LlamaSizes(
        layers=value("llama.block_count"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        attention_heads=value("llama.attention.head_count"),
        key_value_heads=value("llama.attention.head_count_kv"),
        context_length=value("llama.context_length"),
        rope_theta=value("llama.rope.freq_base"),
        norm_epsilon=value("llama.attention.layer_norm_rms_epsilon"),
    )
    stored = {tensor.name: _stored(path, tensor) for tensor in reader.tensors}
    if "output.weight" in stored:
        raise CheckpointError(f"{path}: the embeddings are not tied, which is not supported")
    embeddings = stored.pop("token_embd.weight", None)
    if embeddings is None:
        raise CheckpointError(f"{path}: token_embd.weight is missing; the file is incomplete")
    weights = {}
    for layer in range(sizes.layers):
        for theirs, ours in _NAMES.items():
            suffix, tensor = stored.pop(f"blk.{layer}.{theirs}.weight", (None, None))
            if tensor is None or suffix is None:
                raise CheckpointError(f"{path}: blk.{layer}.{theirs}.weight is missing")
            if theirs in {"attn_q", "attn_k"}:
                heads = sizes.attention_heads if theirs == "attn_q" else sizes.key_value_heads
                tensor = _rotary_order(tensor, heads)
            weights[_full_name(f"layers.{layer}.{ours}", suffix)] = tensor
    suffix, tensor = stored.pop("output_norm.weight", ("", None))
    if tensor is None or stored:
        reason = "output_norm.weight is missing" if tensor is None else f"unknown: {min(stored)}"
        raise CheckpointError(f"{path}: not the weights of a Llama ({reason})")
    weights[_full_name("norm", suffix)] = tensor
    return GgufLlama(
        sizes=sizes,
        tokens=tuple(value("tokenizer.ggml.tokens")),
        merges=tuple(value("tokenizer.ggml.merges")),
        is_special=tuple(number == 3 for number in value("tokenizer.ggml.token_type")),
        embeddings=embeddings,
        weights=weights,
    )


def _full_name(name: str, kind: str) -> str:
    return f"model.language_model.{name}.weight" + (f":{kind}" if kind else "")


def _stored(path: Path, tensor: Any) -> tuple[str, Tensor]:
    kind = tensor.tensor_type.name
    if kind not in KINDS:
        raise CheckpointError(
            f"{path}: {tensor.name} is stored as {kind}; supported are {', '.join(KINDS)}"
        )
    return KINDS[kind], torch.from_numpy(tensor.data.copy())


def _rotary_order(rows: Tensor, heads: int) -> Tensor:
    """Return query or key rows in transformers' order.

    GGUF interleaves the two halves of each rotation, transformers concatenates them. Rows are moved
    with their blocks, so no precision is lost.
    """
    width = rows.shape[0] // heads
    return rows.view(heads, width // 2, 2, -1).transpose(1, 2).reshape(rows.shape).contiguous()
