"""Supporter turns as tokens, with the rotary positions of Qwen2.5-VL."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.dialogue import Dialogue
from compeer_core.images import Image
from compeer_core.prompts import policy_messages
from training.finetune.shared_prefix import TokenisedSample
from training.finetune.trl_common import open_processor


class SampleReader:
    """Tokenises turns for one model, as the demo's backend does."""

    def __init__(self, base: Path, model: Qwen2_5_VLForConditionalGeneration) -> None:
        """Open the processor of a checkpoint.

        Args:
            base: The checkpoint.
            model: The model in it, which computes the positions.

        Raises:
            CheckpointError: The processor cannot be loaded, or has no chat template.
        """
        self.processor: Any = open_processor(base)
        self._template = ChatTemplate(str(base), self.processor)
        self._positions_of = model.model.get_rope_index

    def read_turn(self, dialogue: Dialogue, completion: str) -> TokenisedSample:
        """Return the tokens of a history and of the turn after it, up to its end-of-turn token.

        Args:
            dialogue: The history, with its pictures.
            completion: The turn in the output grammar.
        """
        messages = policy_messages(dialogue, "trained")
        prompt = self._template.render(messages, reply=True)
        answered = [*messages, Message("assistant", (completion,))]
        # Templates write a line break after the end-of-turn token, which no model has to learn.
        answer = self._template.render(answered, reply=False).removeprefix(prompt).rstrip("\n")
        pictures = [
            part.to_pil()
            for message in messages
            for part in message.content
            if isinstance(part, Image)
        ]
        inputs = self.processor(text=[prompt], images=pictures or None, return_tensors="pt")
        prompt_ids = inputs["input_ids"][0].tolist()
        completion_ids = self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        grid = inputs.get("image_grid_thw")
        tokens = torch.tensor([[*prompt_ids, *completion_ids]])
        is_picture = (tokens == self.processor.image_token_id).int()
        positions, _ = self._positions_of(tokens, mm_token_type_ids=is_picture, image_grid_thw=grid)
        return TokenisedSample(
            prompt=tuple(prompt_ids),
            completion=tuple(completion_ids),
            positions=positions[:, 0],
            first_picture=int(is_picture[0].argmax()) if pictures else None,
            pixels=inputs.get("pixel_values"),
            grid=grid,
        )
