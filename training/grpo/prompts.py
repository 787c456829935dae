"""CER rows as the prompts that trl samples from.

A prompt is the conversation exactly as SFT and the demo format it, with each picture at its own turn.
The data set formats its rows on access, so no picture is stored twice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from compeer_core.backends.protocol import Message
from compeer_core.cer import CerRecord
from compeer_core.images import Image
from compeer_core.policy import Style
from compeer_core.prompts import policy_messages
from training.data.pictures import Pictures

_BATCH = 32


class PromptBook:
    """All prompts of a run by number: those to train on, then the held-out ones.

    Attributes:
        records: The rows whose histories are the prompts.
        pictures: Opens their pictures.
    """

    def __init__(
        self,
        records: Sequence[CerRecord],
        pictures: Pictures,
        style: Style = "trained",
        reserved: Sequence[str] = (),
    ) -> None:
        """Take the rows; `reserved` are the policy's special tokens, which a seeker must not forge."""
        self.records = list(records)
        self.pictures = pictures
        self._style = style
        self._reserved = tuple(reserved)

    def messages(self, number: int) -> tuple[Message, ...]:
        """Return the conversation that a policy reads."""
        case = self.records[number].case
        dialogue = self.pictures.dialogue(case)
        return policy_messages(dialogue, self._style, case.language, self._reserved)

    def prompt(self, number: int) -> list[dict[str, Any]]:
        """Return the conversation in trl's format, with its pictures."""
        return [trl_message(message) for message in self.messages(number)]

    def data_set(self, numbers: Sequence[int]) -> Dataset:
        """Return a data set with one row per number, in this order.

        Its columns are `prompt`, and `row` with the number.
        """

        def with_prompts(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            return {**batch, "prompt": [self.prompt(number) for number in batch["row"]]}

        dataset = Dataset.from_dict({"row": list(numbers)})
        dataset.set_transform(with_prompts)
        return dataset

    def lengths(self, numbers: Sequence[int], processor: Any) -> list[int]:
        """Return the length of each prompt in tokens, picture tokens included."""
        lengths: list[int] = []
        for begin in range(0, len(numbers), _BATCH):
            prompts = [self.prompt(number) for number in numbers[begin : begin + _BATCH]]
            ids = processor.apply_chat_template(
                conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
            lengths += [len(prompt_ids) for prompt_ids in ids]
        return lengths


def trl_message(message: Message) -> dict[str, Any]:
    """Return a message in the format of chat templates, with its pictures in place."""
    blocks = [
        {"type": "image", "image": block.to_pil()}
        if isinstance(block, Image)
        else {"type": "text", "text": block}
        for block in message.content
    ]
    return {"role": message.role, "content": blocks}


def prompt_order(count: int, total: int, seed: int) -> list[int]:
    """Return `total` numbers below `count`, in shuffled passes over all of them.

    trl's sampler draws a new order on resume, which would repeat some prompts; so the order of a
    whole run is drawn here.
    """
    rng = np.random.default_rng(seed)
    passes = [rng.permutation(count) for _ in range(-(-total // count))]
    return [int(number) for number in np.concatenate(passes)[:total]]
