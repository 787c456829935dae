"""Tiny random checkpoints on disk, of several architectures, and LoRA adapters for them.

They are real checkpoints: a tokenizer trained here, a chat template, an image tower, safetensors.
Only their weights mean nothing. Each takes well under a second to build.
"""

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from compeer_core.processing import ImageOnlyInternVLProcessor, ImageOnlyQwen2_5_VLProcessor
from compeer_core.reasoning import TAGS
from training.finetune.chat_tokens import CHAT_TEMPLATE as CHATML
from training.finetune.chat_tokens import SPECIAL_TOKENS as QWEN_SPECIAL
from training.finetune.chat_tokens import VERDICT_WORDS

LLAVA_SPECIAL = ("<s>", "</s>", "<pad>", "<image>")

VICUNA = (
    "{{- '<s>' -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{{- raise_exception('this template knows no system message') -}}{%- endif -%}"
    "{{- message['role'].upper() + ':\n' -}}"
    "{%- for block in message['content'] if block['type'] == 'image' -%}"
    "{{- '<image>\n' -}}{%- endfor -%}"
    "{%- for block in message['content'] if block['type'] == 'text' -%}"
    "{{- block['text'] -}}{%- endfor -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '</s>' -}}{%- else -%}{{- '\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:\n' -}}{%- endif -%}"
)
"""Pictures in front, no system message, and a turn that ends with the end-of-sequence token."""

TINY_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}

CORPUS = (
    "I feel sad and I cannot sleep because of the exam. It sounds hard to carry this alone.",
    "What happened at work today? My boss told me that I will lose my job next month.",
    "Stage: Exploration\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4\nStrategy: Question",
    "You are not alone with this; many people feel lost, tired, angry or afraid at times.",
    "我最近很难过，睡不着觉。谢谢你愿意听我说。 Café, naïve, schön, 😀 🙂",
)


def train_bpe(
    special: Iterable[str], vocabulary_size: int = 700, documents: Iterable[str] = CORPUS
) -> Tokenizer:
    """Train a byte-level BPE in which tags and verdict words are single added tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(TAGS) - len(VERDICT_WORDS),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.add_tokens(
        [AddedToken(word, special=False, normalized=False) for word in (*TAGS, *VERDICT_WORDS)]
    )
    return bpe


def train_tokenizer(
    special: Iterable[str], end_of_turn: str, padding: str
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a tiny checkpoint."""
    return PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(special),
        eos_token=end_of_turn,
        pad_token=padding,
        model_max_length=512,
    )


def build_qwen(
    folder: Path, *, seed: int = 0, max_position_embeddings: int = 512, chat_template: str = CHATML
) -> Path:
    """A Qwen2.5-VL with two layers; pictures become at most 16 tokens.

    All sizes are multiples of 64, which bitsandbytes needs for 4 bits on a CPU.
    """
    tokenizer = train_tokenizer(QWEN_SPECIAL, "<|im_end|>", "<|endoftext|>")

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": max_position_embeddings,
            "initializer_range": 0.3,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [2, 3, 3],
            },
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [token("<|im_end|>")]
    model.generation_config.pad_token_id = token("<|endoftext|>")
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112})
    ImageOnlyQwen2_5_VLProcessor(images, tokenizer, chat_template).save_pretrained(folder)
    return folder


def build_llava(folder: Path, *, seed: int = 0) -> Path:
    """A LLaVA: CLIP's image tower before a Llama, with a template that knows no system message."""
    tokenizer = train_tokenizer(LLAVA_SPECIAL, "</s>", "<pad>")
    tokenizer.bos_token = "<s>"
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        initializer_range=0.3,
    )
    image_token = int(tokenizer.convert_tokens_to_ids("<image>"))
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=image_token)
    )
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=VICUNA,
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


THINKING = CHATML.replace(
    "assistant\n' -}}",
    "assistant\n' -}}{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}",
)
"""ChatML with the switch of Qwen3: thoughts that were turned off stand there, empty."""


def build_text(folder: Path, model_type: str) -> Path:
    """A language model without an image tower: qwen2, qwen3, internlm3, llama."""
    tokenizer = train_tokenizer(QWEN_SPECIAL, "<|im_end|>", "<|endoftext|>")
    tokenizer.chat_template = THINKING
    config = AutoConfig.for_model(
        model_type,
        **TINY_TEXT,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_internvl(folder: Path) -> Path:
    """An InternVL: its own image tower before a Qwen2; a picture becomes 4 tokens."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe((*QWEN_SPECIAL, *named.values())),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=512,
        extra_special_tokens=named,
    )
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **TINY_TEXT, "vocab_size": len(tokenizer)},
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "image_size": [56, 56],
        },
        image_token_id=int(tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")),
        image_seq_length=4,
    )
    torch.manual_seed(0)
    InternVLForConditionalGeneration(config).save_pretrained(folder)
    images = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=False)
    template = CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
    ImageOnlyInternVLProcessor(images, tokenizer, 4, template).save_pretrained(folder)
    return folder


def build_adapter(base: Path, folder: Path, *, seed: int = 1, strength: float = 0.5) -> Path:
    """A LoRA adapter for `base` that changes what it says."""
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(base)
    torch.manual_seed(seed)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    with warnings.catch_warnings():
        # peft 0.21 still reads a property that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        adapted = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero in a new adapter, which would change nothing
                parameter.normal_(std=strength)
    adapted.save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content), encoding="utf-8")
