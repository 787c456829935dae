"""A tiny Llama as a GGUF file, in llama.cpp's layout."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, LAYERS, HEADS, KEY_HEADS, MIDDLE = 128, 2, 2, 1, 64
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "T r", "u e", "Tr ue", "< h")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")
LACKING = "À"
"""The only byte without a token; it never occurs in UTF-8."""
TOKENS = (
    *SPECIAL,
    *sorted({*pre_tokenizers.ByteLevel.alphabet()} - {LACKING}),
    *(merge.replace(" ", "") for merge in MERGES),
)


@dataclass(frozen=True)
class TinyLlama:
    """A GGUF file and its model."""

    path: Path
    model: LlamaForCausalLM
    """With weights rounded as in the file's blocks."""


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return query or key rows in GGUF's order, with the two halves of each rotation interleaved."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_tiny_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", matrices: Kind = Kind.Q4_1
) -> TinyLlama:
    """Write a file with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=MIDDLE,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))

    def add(name: str, weight: torch.nn.Parameter, kind: Kind, heads: int = 0) -> None:
        values = weight.detach().numpy()
        blocks = gguf.quants.quantize(values, kind)
        weight.data = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
        writer.add_tensor(name, interleaved(blocks, heads) if heads else blocks, raw_dtype=kind)

    inner = model.model
    add("token_embd.weight", inner.embed_tokens.weight, Kind.Q8_0)
    add("output_norm.weight", inner.norm.weight, Kind.F32)
    for number, layer in enumerate(inner.layers):
        name = f"blk.{number}"
        attention, mlp = layer.self_attn, layer.mlp
        add(f"{name}.attn_norm.weight", layer.input_layernorm.weight, Kind.F32)
        add(f"{name}.ffn_norm.weight", layer.post_attention_layernorm.weight, Kind.F32)
        add(f"{name}.attn_q.weight", attention.q_proj.weight, matrices, HEADS)
        add(f"{name}.attn_k.weight", attention.k_proj.weight, matrices, KEY_HEADS)
        add(f"{name}.attn_v.weight", attention.v_proj.weight, matrices)
        add(f"{name}.attn_output.weight", attention.o_proj.weight, matrices)
        add(f"{name}.ffn_gate.weight", mlp.gate_proj.weight, matrices)
        add(f"{name}.ffn_up.weight", mlp.up_proj.weight, matrices)
        add(f"{name}.ffn_down.weight", mlp.down_proj.weight, matrices)
    model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyLlama(path, model)
