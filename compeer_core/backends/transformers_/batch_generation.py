"""Generate many turns in batches, each as if it were alone.

The demo's turns come and go one by one (`compeer_core.backends.transformers_.scheduler`). A data
pipeline and GRPO need thousands of turns at once, and a batch takes hardly longer than one row,
since reading the weights dominates. So

1. each prompt is read once, however many turns are drawn from it, and what it shares with the prompt
   before, as turns of one dialogue do, is copied;
2. its cache is repeated for each of them and joined with those of the other prompts, padded on the
   left and masked. The joined cache has room for the new tokens: a cache that grows by copying
   costs more than the attention over it;
3. finished rows are removed from the batch, so the rest runs faster.

Caches that cannot be joined (a sliding window, a recurrent state) are batched per prompt, which
needs no padding.

Each row draws from its own generator. With batches that are cut the same way each time, the same
requests give the same texts, to the last bit, however often the work was interrupted. In a batch of
another size texts may differ where two tokens are equally probable up to rounding.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.kv_cache import is_plain, joined
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.sequence_state import Encoded, SequenceState
from compeer_core.backends.transformers_.tokens import TextDecoder
from compeer_core.backends.transformers_.turn_constraints import TurnConstraints
from compeer_core.errors import BackendError, InputError

TOP_P_CANDIDATES = 256
"""Tokens that top-p considers first: sorting the whole vocabulary takes longer than the forward pass
of a small model, and nearly all probability lies on a few tokens."""
ENDED_SHARE = 1 / 8
"""The batch shrinks once this share of its rows has ended; each time copies the cache."""


@dataclass(frozen=True)
class Prompt:
    """A conversation to continue."""

    messages: Sequence[Message]
    seeds: tuple[int, ...]
    """One turn is generated for each."""


@dataclass(frozen=True)
class Turn:
    """A generated turn."""

    text: str
    ids: tuple[int, ...]
    """The generated tokens, with the one that ended the turn."""
    ended: bool
    """Whether the model ended it; otherwise the budget was spent, or it was stopped."""


def generate_turns(
    chat: ChatModel,
    adapter: str | None,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    stop: threading.Event,
) -> list[tuple[Turn, ...] | InputError | BackendError]:
    """Generate the turns of all prompts. Runs on the model's owner thread.

    Args:
        chat: The model.
        adapter: The LoRA adapter to activate, or None.
        prompts: Conversations that are too long lose their oldest turns.
        sampling: For all rows; its seed is ignored.
        stop: Set it to end early; the returned turns are then incomplete.

    Returns:
        For each prompt, in order: a turn for each seed, or the error of a conversation that the
        model cannot read.
    """
    written: list[tuple[Turn, ...] | InputError | BackendError] = []
    readable: list[tuple[int, Encoded]] = []
    constraints: list[Callable[[], TurnConstraints | None]] = []
    for place, prompt in enumerate(prompts):
        try:
            encoded, dropped = chat.encode_fitting(
                prompt.messages, sampling.max_new_tokens, sampling.thinking
            )
        except (InputError, BackendError) as error:
            written.append(error)
        else:
            written.append(())
            readable.append((place, encoded))
            constraints.append(partial(chat.constraints, prompt.messages, dropped, sampling))
    seeds = [prompts[place].seeds for place, _ in readable]
    turns = generate_encoded(
        *(chat, adapter, [encoded for _, encoded in readable], seeds, sampling, stop),
        constraints=constraints,
    )
    for (place, _), of_prompt in zip(readable, turns, strict=True):
        written[place] = of_prompt
    return written


def generate_encoded(
    chat: ChatModel,
    adapter: str | None,
    prompts: Sequence[Encoded],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    stop: threading.Event,
    *,
    constraints: Sequence[Callable[[], TurnConstraints | None]] | None = None,
) -> list[tuple[Turn, ...]]:
    """Generate the turns of encoded prompts; see `generate_turns`.

    Args:
        chat: The model.
        adapter: The LoRA adapter to activate, or None.
        prompts: Each must leave room for a token in the context.
        seeds: For each prompt, one per turn.
        sampling: For all rows.
        stop: Set it to end early.
        constraints: For each prompt, makes the constraints of one turn.
    """
    heads: list[_Head] = []
    before: list[SequenceState] = []
    with torch.inference_mode():
        for number, (encoded, of_prompt) in enumerate(zip(prompts, seeds, strict=True)):
            if not of_prompt:
                continue
            state = SequenceState(encoded, adapter)
            state.copy_from(before)
            head = _read(chat, state, of_prompt, sampling)
            before = [state]
            if constraints is not None:
                for row in head.rows:
                    row.constraints = constraints[number]()
            heads.append(head)
        chat.set_threads(sum(map(len, seeds)))
        one_batch = all(is_plain(head.cache) for head in heads)
        for batch in [heads] if one_batch else [[head] for head in heads]:
            if batch:
                _Batch(chat, batch, sampling).generate(stop)
    rows = iter(row for head in heads for row in head.rows)
    return [tuple(_turn(chat, next(rows)) for _ in of_prompt) for of_prompt in seeds]


@dataclass
class _Row:
    """One turn while it is generated."""

    seed: int
    budget: int
    constraints: TurnConstraints | None = None
    ids: list[int] = field(default_factory=list)


@dataclass
class _Head:
    """A prompt that the model has read."""

    encoded: Encoded
    cache: Any
    position: int
    """Position of the first new token."""
    logits: torch.Tensor
    """Logits of that token, shape (1, vocabulary)."""
    rows: list[_Row]


def _read(chat: ChatModel, state: SequenceState, seeds: Sequence[int], sampling: Sampling) -> _Head:
    encoded = state.encoded
    logits = chat.run(state, 1, logits=True).logits[0]
    budget = sampling.max_new_tokens
    if chat.limit is not None:
        budget = min(budget, chat.limit - len(encoded.ids))
    rows = [_Row(seed, budget) for seed in seeds]
    return _Head(encoded, state.cache, len(encoded.ids) + state.offset, logits, rows)


class _Batch:
    """Rows that are generated together."""

    def __init__(self, chat: ChatModel, heads: Sequence[_Head], sampling: Sampling) -> None:
        self._chat = chat
        self._rows = [row for head in heads for row in head.rows]
        self._written = 0
        self._length = max(len(head.encoded.ids) for head in heads)
        room = max(row.budget for row in self._rows)
        copies = [len(head.rows) for head in heads]
        device, dtype = chat.model.device, chat.model.dtype
        gaps = [self._length - len(head.encoded.ids) for head in heads]
        # Padding is masked, but the repetition penalty sees it: it repeats the prompt's first token.
        self._ids = _repeated(
            torch.tensor(
                [
                    [head.encoded.ids[0]] * gap + [*head.encoded.ids] + [0] * room
                    for head, gap in zip(heads, gaps, strict=True)
                ],
                device=device,
            ),
            copies,
        )
        self._positions = _repeated(
            torch.tensor([[head.position] for head in heads], device=device), copies
        )
        self._logits = _repeated(torch.cat([head.logits for head in heads]), copies)
        self._mask: torch.Tensor | None = None
        if any(gaps):
            mask = torch.zeros((len(heads), 1, 1, self._length + room), dtype=dtype)
            for row, gap in enumerate(gaps):
                mask[row, ..., :gap] = torch.finfo(dtype).min
            self._mask = _repeated(mask.to(device), copies)
        if len(heads) > 1:
            self._cache: Any = joined([head.cache for head in heads], copies, room)
        else:
            self._cache = heads[0].cache
            self._cache.batch_repeat_interleave(copies[0])
        self._ends = torch.tensor(sorted(chat.end_tokens), device=device)
        self._budgets = torch.tensor([row.budget for row in self._rows], device=device)
        self._sampler = BatchSampler(sampling, [row.seed for row in self._rows], chat.placeholder)

    def generate(self, stop: threading.Event) -> None:
        """Generate until every row has ended; the tokens are in the rows."""
        running = torch.ones(len(self._rows), dtype=torch.bool, device=self._ids.device)
        while not stop.is_set():
            at = self._length + self._written
            for logits, row, runs in zip(self._logits, self._rows, running.tolist(), strict=True):
                if runs and row.constraints is not None:
                    row.constraints.mask(logits)
            tokens = self._sampler(self._ids[:, :at], self._logits)
            self._ids[:, at] = tokens
            self._written += 1
            for row, token, runs in zip(self._rows, tokens.tolist(), running.tolist(), strict=True):
                if runs:
                    row.ids.append(token)
                    if row.constraints is not None:
                        row.constraints.push(token)
            running &= ~torch.isin(tokens, self._ends) & (self._budgets > self._written)
            left = int(running.sum())
            if not left:
                return
            if left <= (1 - ENDED_SHARE) * len(self._rows):
                self._keep(running.nonzero().flatten())
                running = running.new_ones(left)
            self._step(at)

    def _keep(self, places: torch.Tensor) -> None:
        """Continue with these rows only."""
        self._cache.batch_select_indices(places)
        self._ids, self._positions = self._ids[places], self._positions[places]
        self._budgets = self._budgets[places]
        if self._mask is not None:
            self._mask = self._mask[places]
        rows = places.tolist()
        self._rows = [self._rows[row] for row in rows]
        self._sampler.keep(rows)

    def _step(self, at: int) -> None:
        """Read the tokens at index `at`."""
        positions = self._positions + (at - self._length)
        outputs = self._chat.model(
            input_ids=self._ids[:, at : at + 1],
            attention_mask=None if self._mask is None else self._mask[..., : at + 1],
            position_ids=positions.expand(3, *positions.shape)
            if self._chat.has_offsets
            else positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._logits = outputs.logits[:, -1]


def _repeated(values: torch.Tensor, copies: Sequence[int]) -> torch.Tensor:
    return values.repeat_interleave(torch.tensor(copies, device=values.device), dim=0)


def _turn(chat: ChatModel, row: _Row) -> Turn:
    ended = bool(row.ids) and row.ids[-1] in chat.end_tokens
    decoder = TextDecoder(chat.tokenizer, chat.hidden)
    text = "".join(decoder.push(token) for token in (row.ids[:-1] if ended else row.ids))
    return Turn(text, tuple(row.ids), ended)


class BatchSampler:
    """Draws each row's next token: temperature, top-p, repetition penalty, seeds.

    Each row takes one number per token from its own generator and maps it to a token through the
    cumulative distribution, most probable first. So a row's draw does not depend on other rows.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], placeholder: int | None) -> None:
        self._sampling = sampling
        self._placeholder = placeholder
        self._penalty: RepetitionPenaltyLogitsProcessor | None = None
        if sampling.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        self._generators = [np.random.default_rng(seed) for seed in seeds]

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these rows only."""
        self._generators = [self._generators[row] for row in rows]

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens, shape (rows,).

        Args:
            ids: The tokens before, shape (rows, length).
            logits: Shape (rows, vocabulary); modified.
        """
        if self._placeholder is not None:
            # An image that the model invents could not be given to it as input.
            logits[:, self._placeholder] = -torch.inf
        if self._penalty is not None:
            logits = self._penalty(ids, logits)
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        return self._drawn(torch.softmax(logits.float() / self._sampling.temperature, -1))

    def _drawn(self, probabilities: torch.Tensor) -> torch.Tensor:
        top_p = self._sampling.top_p
        size = probabilities.shape[1]
        top, tokens = probabilities.topk(min(TOP_P_CANDIDATES, size))
        reached = top.cumsum(-1)
        if size > TOP_P_CANDIDATES and bool((reached[:, -1] < top_p).any()):
            top, tokens = probabilities.sort(descending=True, stable=True)
            reached = top.cumsum(-1)
        # The smallest set with probability top_p: tokens before which less than that is reached.
        in_top_p = reached - top < top_p
        total = torch.where(in_top_p, top, 0.0).sum(-1, keepdim=True)
        numbers = [generator.random() for generator in self._generators]
        target = torch.tensor(numbers, device=total.device)[:, None] * total
        place = torch.searchsorted(reached, target.to(reached.dtype), right=True)
        last = in_top_p.sum(-1, keepdim=True) - 1
        return tokens.gather(1, torch.minimum(place, last)).flatten()
