"""The tokens and the chat template of the small models.

The tags of the output grammar and the verdict words are single tokens: a verdict can be read from
the logits of one position, and one token closes a part. They are *added* tokens without the
`special` flag, because trl decodes completions with `skip_special_tokens=True` before it calls a
reward function.
"""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy
from compeer_core.unifireward import PREFERENCES, VERDICTS

VERDICT_WORDS = (*VERDICTS, *PREFERENCES)
"""A judge's verdict words, one token each."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Named as in Qwen2.5-VL, as its processor and vLLM expect."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for block in message['content'] -%}"
    "{%- if block['type'] == 'image' -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- block['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""ChatML without a default system message; images keep their place among the blocks."""


def byte_level_bpe(model: models.BPE) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits digits, as SmolLM2's does."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def chat_tokenizer(bpe: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a checkpoint, with the chat template.

    Args:
        bpe: Tokenizer that contains `SPECIAL_TOKENS`.
        max_length: Context length of the model, in tokens.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def image_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the ids of the image and video tokens, by their keys in Qwen2.5-VL's config."""
    ids = tokenizer.get_vocab()
    return {
        f"{name}_token_id": ids[f"<|{text}|>"]
        for name, text in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }


def label_lines() -> list[str]:
    """Return every label line of the output grammar."""
    lines = [f"Intensity: {n}" for n in range(1, 6)]
    for name, labels in (
        ("Stage", Stage),
        ("Sentiment", Sentiment),
        ("Emotion", Emotion),
        ("Strategy", Strategy),
    ):
        lines += [f"{name}: {label.value}" for label in labels]
    return lines
