"""The architecture of the small models: Qwen2.5-VL, scaled down.

The modules are transformers' own `Qwen2_5_VLForConditionalGeneration`; only the sizes differ, so
any program that loads a Qwen2.5-VL loads these checkpoints.
"""

import torch
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from compeer_core.config import FrozenModel
from training.finetune.chat_tokens import image_token_ids


class ModelShape(FrozenModel):
    """Sizes of the language model and the image tower."""

    hidden_size: int = 384
    layers: int = 6
    attention_heads: int = 6
    key_value_heads: int = 2
    intermediate_size: int = 768
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    """Epsilon of the language model's RMS norms."""
    vision_hidden_size: int = 128
    vision_layers: int = 4
    vision_heads: int = 4
    vision_intermediate_size: int = 256
    patch_size: int = 14
    """Pixels per side of a patch; 2 x 2 patches become one token of the language model."""


def build_model(
    shape: ModelShape, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """Return a randomly initialised model with the tokenizer's special-token ids."""

    def token(text: str) -> int:
        return tokenizer.get_vocab()[text]

    head_dimension = shape.hidden_size // shape.attention_heads
    half = head_dimension // 2
    side = half * 3 // 8  # Qwen2.5-VL splits half the head 16:24:24 over time, height and width
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.attention_heads,
            "num_key_value_heads": shape.key_value_heads,
            "intermediate_size": shape.intermediate_size,
            "max_position_embeddings": shape.max_position_embeddings,
            "rms_norm_eps": shape.norm_epsilon,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "mrope_section": [half - 2 * side, side, side],
            },
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={
            "depth": shape.vision_layers,
            "hidden_size": shape.vision_hidden_size,
            "num_heads": shape.vision_heads,
            "intermediate_size": shape.vision_intermediate_size,
            "out_hidden_size": shape.hidden_size,
            "patch_size": shape.patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 8 * shape.patch_size,
            "fullatt_block_indexes": [shape.vision_layers - 1],
        },
        **image_token_ids(tokenizer),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [token("<|im_end|>")]
    model.generation_config.pad_token_id = token("<|endoftext|>")
    return model


def fixed_size_image_processor(patch_size: int, side: int) -> Qwen2VLImageProcessorPil:
    """Return an image processor that scales every image to about `side` pixels squared."""
    return Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": side**2, "longest_edge": side**2},
    )
