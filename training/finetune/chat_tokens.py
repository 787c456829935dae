"""The tokens and the chat template that every small checkpoint of ours shares.

The part tags of the output grammar and the verdict words are single tokens, so that a judge can
read a verdict from one position and a policy closes a part with one token. They are *added*
tokens without the `special` flag: trl decodes with `skip_special_tokens=True` before it calls a
reward function, and would lose the tags otherwise.
"""

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy
from compeer_core.unifireward import PREFERENCES, VERDICTS

VERDICT_WORDS = (*VERDICTS, *PREFERENCES)
"""The words a judge answers with, each one token."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Names as in Qwen2.5-VL, so that its processor and vLLM find them."""

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
"""ChatML without a default system message; an image stands where its block stands."""


def chat_tokenizer(bpe: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a checkpoint, with the chat template.

    Args:
        bpe: It holds `SPECIAL_TOKENS`.
        max_length: Tokens that the model can read.
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


def label_lines() -> list[str]:
    """Return every label line that a turn can hold, as the grammar writes them."""
    lines = [f"Intensity: {n}" for n in range(1, 6)]
    for name, labels in (
        ("Stage", Stage),
        ("Sentiment", Sentiment),
        ("Emotion", Emotion),
        ("Strategy", Strategy),
    ):
        lines += [f"{name}: {label.value}" for label in labels]
    return lines
