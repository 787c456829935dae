"""Checkpoints of a known shape with random weights: how fast a model is does not depend on them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from compeer_core.errors import ConfigError
from training.finetune.trl_common import open_processor

ShapeName = Literal["qwen2.5-vl-7b", "tiny"]

SHAPES: Mapping[ShapeName, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-vl-7b": {  # the numbers of its config.json
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
        # To try the same code anywhere. Multiples of 64: 4 bits need them on a CPU.
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
"""Of a weight in bf16."""


def write_random_checkpoint(folder: Path, shape: ShapeName, like: Path, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL of a shape, in bf16, and return its folder.

    Args:
        folder: Is made.
        shape: One of `SHAPES`.
        like: A checkpoint whose tokenizer, chat template and picture settings it gets. Its tokens
            must be Qwen2.5-VL's, of which the vocabulary of the shape may have more.
        seed: Of the weights.

    Raises:
        ConfigError: The disk has no room for it, or the tokenizer does not fit.
    """
    processor = open_processor(like)
    token = processor.tokenizer.get_vocab()
    ids = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "eos_token_id": "<|im_end|>",
        "pad_token_id": "<|endoftext|>",
    }
    lacking = [name for name in ids.values() if name not in token]
    known = SHAPES[shape]
    if lacking or len(token) > known["text_config"]["vocab_size"]:
        raise ConfigError(
            f"{like}: its tokenizer does not fit the shape {shape}: "
            + (f"it lacks {lacking[0]}" if lacking else f"it has {len(token)} tokens")
        )
    of_tokens = {name: token[text] for name, text in ids.items()}
    of_text = {name: of_tokens.pop(name) for name in ("eos_token_id", "pad_token_id")}
    config = Qwen2_5_VLConfig(
        **{**known, "text_config": {**known["text_config"], **of_text}}, **of_tokens
    )
    with torch.device("meta"):
        size = _BYTES * sum(
            p.numel() for p in Qwen2_5_VLForConditionalGeneration(config).parameters()
        )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ConfigError(
            f"{folder}: weights of the shape {shape} take {size / 1e9:.1f} GB and the disk has "
            f"{free / 1e9:.1f} GB left; TMPDIR names another place"
        )
    torch.manual_seed(seed)
    # A GPU draws thousands of millions of numbers in seconds, a processor in minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = [of_text["eos_token_id"]]
    model.generation_config.pad_token_id = of_text["pad_token_id"]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
