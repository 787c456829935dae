"""Samples as tokens, with the rotary positions that Qwen2.5-VL gives them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.dialogue import Dialogue
from compeer_core.images import Image
from compeer_core.prompts import policy_messages
from training.data.samples import Sample
from training.finetune.shared_prefix import TokenisedSample
from training.finetune.trl_common import open_processor


class SampleReader:
    """Turns samples into tokens for one model, as the page's backend would."""

    def __init__(
        self, base: Path, model: Qwen2_5_VLForConditionalGeneration, faces: Mapping[str, bytes]
    ) -> None:
        """Open the processor of a checkpoint.

        Args:
            base: The checkpoint.
            model: The model in it, which knows its positions.
            faces: The photos by name.

        Raises:
            CheckpointError: The processor cannot be loaded, or has no chat template.
        """
        self.processor: Any = open_processor(base)
        self._template = ChatTemplate(str(base), self.processor)
        self._positions_of = model.model.get_rope_index
        self._faces = dict(faces)

    def read(self, sample: Sample, learnt: tuple[int, int] | None = None) -> TokenisedSample:
        """Return a sample's tokens; its completion ends with the token that ends a turn.

        Args:
            sample: The sample.
            learnt: First character of the completion that is learnt and the one behind the last: what comes
                before goes to the prompt, and what comes behind is left out. None learns all of it.

        Raises:
            ConfigError: A photo is missing.
        """
        return self.read_turn(sample.dialogue(self._faces), sample.completion, learnt)

    def read_turn(
        self, dialogue: Dialogue, completion: str, learnt: tuple[int, int] | None = None
    ) -> TokenisedSample:
        """Return the tokens of a history and of the turn that follows it; see `read`."""
        messages = policy_messages(dialogue, "trained")
        prompt = self._template.render(messages, reply=True)
        answered = [*messages, Message("assistant", (completion,))]
        # Behind the mark that ends a turn templates write a line break, which nobody has to learn.
        answer = self._template.render(answered, reply=False).removeprefix(prompt).rstrip("\n")
        pictures = [
            part.to_pil() for one in messages for part in one.content if isinstance(part, Image)
        ]
        inputs = self.processor(text=[prompt], images=pictures or None, return_tensors="pt")
        given, said = self._parts(answer, learnt)
        prompted = [*inputs["input_ids"][0].tolist(), *given]
        grid = inputs.get("image_grid_thw")
        tokens = torch.tensor([[*prompted, *said]])
        of_pictures = (tokens == self.processor.image_token_id).int()
        positions, _ = self._positions_of(
            tokens, mm_token_type_ids=of_pictures, image_grid_thw=grid
        )
        return TokenisedSample(
            prompt=tuple(prompted),
            completion=tuple(said),
            positions=positions[:, 0],
            first_picture=int(of_pictures[0].argmax()) if pictures else None,
            pixels=inputs.get("pixel_values"),
            grid=grid,
        )

    def _parts(
        self, completion: str, learnt: tuple[int, int] | None
    ) -> tuple[list[int], list[int]]:
        """Return the tokens before what is learnt, and those that are."""
        read = self.processor.tokenizer(
            completion, add_special_tokens=False, return_offsets_mapping=True
        )
        tokens: list[int] = read["input_ids"]
        if learnt is None:
            return [], tokens
        first, behind = learnt
        begin = sum(start < first for start, _ in read["offset_mapping"])
        end = sum(start < behind for start, _ in read["offset_mapping"])
        return tokens[:begin], tokens[begin:end]
