"""Histories as the prompts that trl samples from.

A prompt is the conversation exactly as the SFT stage and the demo write it, pictures at their own
turns. Rows of the data set are made when they are asked for, so that no picture is stored twice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from compeer_core.backends.protocol import Message
from compeer_core.images import Image
from compeer_core.policy import Style
from compeer_core.prompts import policy_messages
from training.data.histories import History
from training.data.pictures import Pictures

_AT_ONCE = 32


class PromptBook:
    """All histories of a run, those held out behind those to train on, and how each is put.

    Attributes:
        histories: In the order of their numbers.
        pictures: Opens their pictures.
    """

    def __init__(
        self,
        histories: Sequence[History],
        pictures: Pictures,
        style: Style = "trained",
        reserved: Sequence[str] = (),
    ) -> None:
        """Take the histories.

        Args:
            histories: In the order of their numbers.
            pictures: Opens their pictures.
            style: See `policy_messages`.
            reserved: The policy's special tokens, which a seeker cannot forge.
        """
        self.histories = list(histories)
        self.pictures = pictures
        self._style = style
        self._reserved = tuple(reserved)

    def messages(self, number: int) -> tuple[Message, ...]:
        """Return the conversation that a policy reads."""
        history = self.histories[number]
        dialogue = history.dialogue(self.pictures)
        return policy_messages(dialogue, self._style, history.language, self._reserved)

    def prompt(self, number: int) -> list[dict[str, Any]]:
        """Return the conversation in trl's form, with its pictures."""
        return [trl_message(message) for message in self.messages(number)]

    def data_set(self, numbers: Sequence[int]) -> Dataset:
        """Return a data set with one row for each number, in this order.

        Its columns are `prompt`, and `row` with the number.
        """

        def made(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
            return {**batch, "prompt": [self.prompt(number) for number in batch["row"]]}

        found = Dataset.from_dict({"row": list(numbers)})
        found.set_transform(made)
        return found

    def lengths(self, numbers: Sequence[int], processor: Any) -> list[int]:
        """Return how many tokens the prompts have, those of pictures included."""
        found: list[int] = []
        for begin in range(0, len(numbers), _AT_ONCE):
            prompts = [self.prompt(number) for number in numbers[begin : begin + _AT_ONCE]]
            ids = processor.apply_chat_template(
                conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
            found += [len(one) for one in ids]
        return found


def trl_message(message: Message) -> dict[str, Any]:
    """Return a message in the form of chat templates, its pictures in their places."""
    blocks = [
        {"type": "image", "image": block.to_pil()}
        if isinstance(block, Image)
        else {"type": "text", "text": block}
        for block in message.content
    ]
    return {"role": message.role, "content": blocks}


def prompt_order(count: int, total: int, seed: int) -> list[int]:
    """Return `total` numbers below `count`, in shuffled passes over all of them.

    The library's own sampler draws anew at a resume, and some prompts would come twice; so the
    order of a whole run is drawn here.
    """
    rng = np.random.default_rng(seed)
    passes = [rng.permutation(count) for _ in range(-(-total // count))]
    return [int(number) for number in np.concatenate(passes)[:total]]
