"""Turns that a model in this process writes many at a time, each as if it were alone.

The demo writes one turn at a time (`compeer_core.backends.transformers_`). A pipeline has thousands
to write, and a batch costs hardly more time than one row: what takes the time is reading the
weights, and the steps between them. Rows are padded on the left and masked, so that no row sees
another one; positions (with Qwen's three axes) are counted without the padding by `generate`.

A row draws from a generator of its own. Together with batches that are cut the same way each time
(`training.cer.asking`), the same questions give the same texts, to the last bit, however often the
work was interrupted. In a batch of another size they may differ where two words are equally likely
up to rounding.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_ import ChatModel
from compeer_core.backends.transformers_.text_decoder import TextDecoder
from compeer_core.backends.transformers_.track import Encoded
from compeer_core.errors import BackendError, InputError

LIKELIEST = 256
"""Tokens among which top-p is looked for first: to sort all of a vocabulary takes longer than the
forward pass of a small model, and nearly all of the probability lies on a few."""


@dataclass(frozen=True)
class Row:
    """What a turn is written after, and the seed of its draws."""

    messages: Sequence[Message]
    seed: int


@dataclass(frozen=True)
class Turn:
    """What was written."""

    text: str
    tokens: int
    """Those that were generated, the one that ended the turn included."""


def write_turns(
    chat: ChatModel,
    adapter: str | None,
    rows: Sequence[Row],
    sampling: Sampling,
    stop: threading.Event,
) -> list[Turn | InputError | BackendError]:
    """Write one turn for each row. Runs on the model's owner thread.

    Args:
        chat: The model.
        adapter: The LoRA adapter to put in force, or None.
        rows: What to write after. Conversations that are too long lose their oldest turns.
        sampling: For all rows; its seed is not looked at.
        stop: Set it to end early; what is returned then is half written.

    Returns:
        In the order of the rows; an error for each conversation that the model cannot read.
    """
    written: list[Turn | InputError | BackendError] = []
    groups: dict[int, list[tuple[int, Encoded]]] = defaultdict(list)
    for place, row in enumerate(rows):
        try:
            encoded, _ = chat.encode_fitting(row.messages, sampling.max_new_tokens)
        except (InputError, BackendError) as error:
            written.append(error)
            continue
        written.append(Turn("", 0))
        groups[_pictures_apart(chat, row)].append((place, encoded))
    for group in groups.values():
        seeds = [rows[place].seed for place, _ in group]
        turns = _Batch(chat, [encoded for _, encoded in group], seeds, sampling, stop).write(
            adapter
        )
        for (place, _), turn in zip(group, turns, strict=True):
            written[place] = turn
    return written


def _pictures_apart(chat: ChatModel, row: Row) -> int:
    """Rows with the same number can be one batch.

    Qwen's models take the pictures of all rows in one list. Others may want the same number for
    each row.
    """
    if chat.has_offsets:
        return 0
    return sum(not isinstance(part, str) for message in row.messages for part in message.content)


class _Batch:
    """Rows that are written together."""

    def __init__(
        self,
        chat: ChatModel,
        rows: Sequence[Encoded],
        seeds: Sequence[int],
        sampling: Sampling,
        stop: threading.Event,
    ) -> None:
        self._chat = chat
        self._rows = rows
        self._sampling = sampling
        self._length = max(len(row.ids) for row in rows)
        self._choice = RowChoice(sampling, seeds, chat.placeholder)
        self._stop = stop

    def write(self, adapter: str | None) -> list[Turn]:
        chat = self._chat
        chat.activate(adapter)
        for module in chat.model.modules():
            if "rope_deltas" in vars(module):
                module.rope_deltas = None  # what Qwen's models keep of whoever wrote last
        config = GenerationConfig(
            max_new_tokens=self._sampling.max_new_tokens,
            do_sample=False,  # the draw is a processor
            eos_token_id=sorted(chat.end_tokens),
            pad_token_id=min(chat.end_tokens),  # what finished rows go on with
        )
        with torch.inference_mode():
            outputs = chat.model.generate(
                **self._inputs(),
                generation_config=config,
                logits_processor=LogitsProcessorList([self._choice]),
                stopping_criteria=StoppingCriteriaList([_Ends(self._budgets(), self._stop)]),
            )
        new = outputs[:, self._length :].tolist()
        return [
            self._turn(tokens[:budget]) for tokens, budget in zip(new, self._budgets(), strict=True)
        ]

    def _budgets(self) -> list[int]:
        """How many tokens each row may have."""
        limit = self._chat.limit
        most = self._sampling.max_new_tokens
        return [most if limit is None else min(most, limit - len(row.ids)) for row in self._rows]

    def _inputs(self) -> dict[str, Any]:
        device = self._chat.model.device
        # What the padding says is masked, but a repetition penalty looks at it: so it repeats the
        # row's own first token.
        ids = [[row.ids[0]] * self._gap(row) + list(row.ids) for row in self._rows]
        mask = [[0] * self._gap(row) + [1] * len(row.ids) for row in self._rows]
        inputs = {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }
        for key in {key: None for row in self._rows for key in row.inputs}:
            values = [self._value(row, key) for row in self._rows]
            joined = torch.cat([value for value in values if value is not None])
            if joined.is_floating_point():
                joined = joined.to(self._chat.model.dtype)
            inputs[key] = joined.to(device)
        return inputs

    def _value(self, row: Encoded, key: str) -> torch.Tensor | None:
        """One row's share of an input: padded if it has a value for each token."""
        value = row.inputs.get(key)
        if key.endswith("token_type_ids"):
            types = torch.zeros((1, self._length), dtype=torch.long)  # 0 is text
            if value is not None:
                types[:, self._gap(row) :] = value
            return types
        return value

    def _gap(self, row: Encoded) -> int:
        return self._length - len(row.ids)

    def _turn(self, tokens: Sequence[int]) -> Turn:
        decoder = TextDecoder(self._chat.tokenizer, self._chat.hidden)
        text = ""
        for count, token in enumerate(tokens, start=1):
            if token in self._chat.end_tokens:
                return Turn(text, count)
            text += decoder.push(token)
        return Turn(text, len(tokens))


class _Ends(StoppingCriteria):
    """Ends a row whose budget is spent, and all of them on demand."""

    def __init__(self, budgets: Sequence[int], stop: threading.Event) -> None:
        self._budgets = torch.tensor(budgets)
        self._written = 0
        self._stop = stop

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        self._written += 1
        over = self._budgets <= self._written
        return (over | self._stop.is_set()).to(input_ids.device)


class RowChoice(LogitsProcessor):
    """Chooses each row's next token and leaves no other: temperature, top-p, penalty, and seeds.

    Each row takes one number from its own generator for each token, and reads off the token whose
    share of the probability holds it, from the likeliest on. So what a row draws does not depend on
    the rows beside it.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], placeholder: int | None) -> None:
        self._sampling = sampling
        self._placeholder = placeholder
        self._penalty: RepetitionPenaltyLogitsProcessor | None = None
        if sampling.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._placeholder is not None:
            # A picture that the model invents could not be shown to it when it reads on.
            scores[:, self._placeholder] = -torch.inf
        if self._penalty is not None:
            scores = self._penalty(input_ids, scores)
        if self._sampling.temperature == 0:
            return scores
        drawn = self._drawn(torch.softmax(scores.float() / self._sampling.temperature, -1))
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)

    def _drawn(self, probabilities: torch.Tensor) -> torch.Tensor:
        """One token for each row, shape (rows, 1)."""
        top_p = self._sampling.top_p
        size = probabilities.shape[1]
        likeliest, tokens = probabilities.topk(min(LIKELIEST, size))
        reached = likeliest.cumsum(-1)
        if size > LIKELIEST and bool((reached[:, -1] < top_p).any()):
            likeliest, tokens = probabilities.sort(descending=True, stable=True)
            reached = likeliest.cumsum(-1)
        # The smallest set that holds top_p: tokens before which less than that has been reached.
        kept = reached - likeliest < top_p
        total = torch.where(kept, likeliest, 0.0).sum(-1, keepdim=True)
        numbers = [generator.random() for generator in self._generators]
        target = torch.tensor(numbers, device=total.device)[:, None] * total
        place = torch.searchsorted(reached, target.to(reached.dtype), right=True)
        last = kept.sum(-1, keepdim=True) - 1
        return tokens.gather(1, torch.minimum(place, last))
