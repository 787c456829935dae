"""Negative log-likelihood of given turns under a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.processing import load_processor


@dataclass(frozen=True)
class TurnLikelihood:
    """Summed negative log-likelihood in nats, and number of tokens, of a turn and of its reply."""

    turn_loss: float
    turn_tokens: int
    reply_loss: float
    reply_tokens: int


class LikelihoodModel:
    """A checkpoint that scores turns instead of generating them."""

    def __init__(self, checkpoint: str | Path, adapter: Path | None = None) -> None:
        self._processor = load_processor(checkpoint)
        model = load_model(checkpoint, torch.float32)
        self._model: Any = model if adapter is None else PeftModel.from_pretrained(model, adapter)
        self._model.eval()

    def score(self, prompt: Sequence[Message], completion: str) -> TurnLikelihood:
        """Return the likelihood of `completion` after `prompt`.

        The reply starts after `<reply>`, and includes its closing tag and the end-of-turn token.
        """
        before = self._inputs(prompt, "")
        inputs = self._inputs(prompt, completion + str(self._processor.tokenizer.eos_token))
        reply_at = self._inputs(prompt, completion[: completion.rindex("<reply>") + len("<reply>")])
        start, reply = before["input_ids"].shape[1], reply_at["input_ids"].shape[1]
        with torch.no_grad():
            logits = self._model(**inputs, use_cache=False).logits[0, start - 1 : -1].float()
        losses = functional.cross_entropy(logits, inputs["input_ids"][0, start:], reduction="none")
        own = losses[reply - start :]
        return TurnLikelihood(losses.sum().item(), len(losses), own.sum().item(), len(own))

    def _inputs(self, prompt: Sequence[Message], completion: str) -> Any:
        images = [
            block.to_pil() for m in prompt for block in m.content if not isinstance(block, str)
        ]
        messages = [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": block} if isinstance(block, str) else {"type": "image"}
                    for block in message.content
                ],
            }
            for message in prompt
        ]
        text = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self._processor(
            text=[text + completion],
            images=images or None,
            return_tensors="pt",
            add_special_tokens=False,
        )
