"""Supporter turns and judgements as tokens, with the rotary positions of Qwen2.5-VL."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.backends.transformers_.tokens import LabelTokens
from compeer_core.dialogue import Dialogue
from compeer_core.images import Image
from compeer_core.prompts import policy_messages
from training.finetune.shared_prefix import TokenisedSample
from training.finetune.trl_common import open_processor

_LABEL = re.compile(r"^(?:Emotion|Strategy):([^\n<]*.)", re.MULTILINE | re.DOTALL)
"""The emotion and the strategy of a turn, each with the character that ends it."""


class SampleReader:
    """Tokenises turns and judgements for one model, as the demo's backend does."""

    def __init__(self, base: Path, model: Qwen2_5_VLForConditionalGeneration) -> None:
        """Open the processor of a checkpoint.

        Raises:
            CheckpointError: The processor cannot be loaded, or has no chat template.
        """
        self.processor: Any = open_processor(base)
        self._name = str(base)
        self._template = ChatTemplate(self._name, self.processor)
        self._positions_of = model.model.get_rope_index

    def verdict_tokens(self, words: Sequence[str]) -> Mapping[str, int]:
        """Return the token of each verdict.

        Raises:
            ConfigError: A verdict is not one token.
        """
        labels = LabelTokens(self._name, self._template, self.processor.tokenizer)
        return dict(zip(words, labels(words), strict=True))

    def read_turn(
        self, dialogue: Dialogue, completion: str, *, label_weight: float = 1.0
    ) -> TokenisedSample:
        """Return the tokens of a history and of the turn after it, up to its end-of-turn token.

        Args:
            dialogue: The history, with its pictures.
            completion: The turn in the output grammar.
            label_weight: Weight of the emotion's and the strategy's name in the loss; other tokens have 1.
        """
        messages = policy_messages(dialogue, "trained")
        prompt = self._template.render(messages, reply=True)
        answered = [*messages, Message("assistant", (completion,))]
        # Templates write a line break after the end-of-turn token, which no model has to learn.
        answer = self._template.render(answered, reply=False).removeprefix(prompt).rstrip("\n")
        sample = self._sample(messages, prompt, self._tokens(answer))
        return replace(sample, weights=self._weights(answer, label_weight))

    def read_answers(self, messages: Sequence[Message]) -> tuple[TokenisedSample, tuple[int, ...]]:
        """Return the tokens of a conversation whose answers the model writes, as it reads them.

        Args:
            messages: A conversation that ends with an answer; earlier answers are learnt too.

        Returns:
            The sample, whose completion begins with the first answer, and the indices in the completion
            of the tokens of all answers, with their end-of-turn tokens.
        """

        def answer(number: int, before: str) -> tuple[list[int], str]:
            # Templates write a line break after the end-of-turn token, which no model has to learn.
            text = self._template.render(messages[: number + 1], reply=False).rstrip("\n")
            return self._tokens(text.removeprefix(before)), text

        return self._read(messages, answer)

    def read_verdicts(
        self, messages: Sequence[Message], token_of: Mapping[str, int]
    ) -> tuple[TokenisedSample, tuple[int, ...]]:
        """Return the tokens of a judge's conversation, as the judge reads them.

        Args:
            messages: A conversation that ends with a verdict; all answers in it are verdicts.
            token_of: The token of each verdict.

        Returns:
            The sample, whose completion begins with the first verdict and ends with the last, and the
            index of each verdict in the completion.
        """

        def answer(number: int, before: str) -> tuple[list[int], str]:
            verdict = messages[number].text
            return [token_of[verdict]], before + verdict

        return self._read(messages, answer)

    def _read(
        self, messages: Sequence[Message], answer: Callable[[int, str], tuple[list[int], str]]
    ) -> tuple[TokenisedSample, tuple[int, ...]]:
        """Read a conversation; `answer` returns the tokens of an answer, and the text up to its end.

        It takes the number of the answer's message, and the text before it.
        """
        prompt = read = ""
        completion: list[int] = []
        places: list[int] = []
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._template.render(messages[:number], reply=True)
            if places:
                completion += self._tokens(before.removeprefix(read))
            else:
                prompt = before
            tokens, read = answer(number, before)
            places += range(len(completion), len(completion) + len(tokens))
            completion += tokens
        return self._sample(messages, prompt, completion), tuple(places)

    def _weights(self, answer: str, label_weight: float) -> tuple[float, ...] | None:
        if label_weight == 1:
            return None
        tokens: Any = self.processor.tokenizer(
            answer, add_special_tokens=False, return_offsets_mapping=True
        )
        labels = [label.span(1) for label in _LABEL.finditer(answer)]
        return tuple(
            label_weight if any(start < last and end > first for first, last in labels) else 1.0
            for start, end in tokens["offset_mapping"]
        )

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _sample(
        self, messages: Sequence[Message], prompt: str, completion: Sequence[int]
    ) -> TokenisedSample:
        pictures = [
            part.to_pil()
            for message in messages
            for part in message.content
            if isinstance(part, Image)
        ]
        inputs = self.processor(text=[prompt], images=pictures or None, return_tensors="pt")
        prompt_ids = inputs["input_ids"][0].tolist()
        grid = inputs.get("image_grid_thw")
        tokens = torch.tensor([[*prompt_ids, *completion]])
        is_picture = (tokens == self.processor.image_token_id).int()
        positions, _ = self._positions_of(tokens, mm_token_type_ids=is_picture, image_grid_thw=grid)
        return TokenisedSample(
            prompt=tuple(prompt_ids),
            completion=tuple(completion),
            positions=positions[:, 0],
            first_picture=int(is_picture[0].argmax()) if pictures else None,
            pixels=inputs.get("pixel_values"),
            grid=grid,
        )
