"""Checkpoints with random weights in the architecture of a larger model, for timings."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from compeer_core.errors import ConfigError
from training.finetune.chat_tokens import SPECIAL_TOKENS, image_token_ids
from training.finetune.trl_common import open_processor

ShapeName = Literal["qwen2.5-vl-7b", "tiny"]

SHAPES: Mapping[ShapeName, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-vl-7b": {  # from its config.json
            "text_config": {
                "vocab_size": 152064,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "max_position_embeddings": 128000,
                "tie_word_embeddings": False,
                "use_sliding_window": False,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1_000_000.0,
                    "mrope_section": [16, 24, 24],
                },
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
            "tie_word_embeddings": False,
        },
        # Runs the same code on any machine. Multiples of 64, which 4-bit weights need on a CPU.
        "tiny": {
            "text_config": {
                "vocab_size": 8192,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": False,
                "use_sliding_window": False,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [2, 3, 3],
                },
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            },
            "tie_word_embeddings": False,
        },
    }
)

_BYTES = 2
"""Bytes per bf16 weight."""


def write_random_checkpoint(folder: Path, shape: ShapeName, like: Path, seed: int = 0) -> Path:
    """Write a randomly initialised Qwen2.5-VL in bf16 and return its folder.

    Args:
        folder: Output folder; created.
        shape: One of `SHAPES`.
        like: Checkpoint to copy tokenizer, chat template and image processor from. The tokenizer must
            have Qwen2.5-VL's special tokens and may have fewer tokens than the shape's vocabulary.
        seed: Seed of the weights.

    Raises:
        ConfigError: There is not enough disk space, or the tokenizer does not fit.
    """
    processor = open_processor(like)
    token = processor.tokenizer.get_vocab()
    missing = [name for name in SPECIAL_TOKENS if name not in token]
    sizes = SHAPES[shape]
    if missing or len(token) > sizes["text_config"]["vocab_size"]:
        raise ConfigError(
            f"{like}: its tokenizer does not fit the shape {shape}: "
            + (f"it has no token {missing[0]}" if missing else f"it has {len(token)} tokens")
        )
    text_ids = {"eos_token_id": token["<|im_end|>"], "pad_token_id": token["<|endoftext|>"]}
    config = Qwen2_5_VLConfig(
        **{**sizes, "text_config": {**sizes["text_config"], **text_ids}},
        **image_token_ids(processor.tokenizer),
    )
    with torch.device("meta"):
        size = _BYTES * sum(
            p.numel() for p in Qwen2_5_VLForConditionalGeneration(config).parameters()
        )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ConfigError(
            f"{folder}: a random {shape} needs {size / 1e9:.1f} GB of disk space, only "
            f"{free / 1e9:.1f} GB are free; set TMPDIR to another disk"
        )
    torch.manual_seed(seed)
    # A GPU draws billions of random numbers in seconds, a CPU in minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = [text_ids["eos_token_id"]]
    model.generation_config.pad_token_id = text_ids["pad_token_id"]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
