"""Turns that a model in this process writes many at a time, each as if it were alone.

The demo's visitors come and go, and each turn stops and goes on by itself
(`compeer_core.backends.transformers_.scheduler`). A pipeline and a policy in training have thousands to
write that nobody waits for, and a batch costs hardly more time than one row: what takes the time is
reading the weights, and the steps between them. So

1. each prompt is read once, however many turns are drawn from it;
2. its cache is repeated for each of them and joined with those of the other prompts, padded on the
   left and masked, so that no row sees another one. The joined cache has room for what will be
   written: a cache that grows by copying itself costs more than the attention over it;
3. rows that have ended are taken out of the batch, and what is left goes on faster.

Caches of another kind than the plain one (a sliding window, a recurrent state) are not joined; then
the turns of one prompt are a batch, which needs no padding.

A row draws from a generator of its own. Together with batches that are cut the same way each time,
the same questions give the same texts, to the last bit, however often the work was interrupted. In
a batch of another size they may differ where two words are equally likely up to rounding.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.kv_cache import is_plain, joined
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.sequence_state import Encoded, Track
from compeer_core.backends.transformers_.text_decoder import TextDecoder
from compeer_core.errors import BackendError, InputError

LIKELIEST = 256
"""Tokens among which top-p is looked for first: to sort all of a vocabulary takes longer than the
forward pass of a small model, and nearly all of the probability lies on a few."""
ENDED_SHARE = 1 / 8
"""The batch is made smaller once this share of its rows has ended; each time copies the cache."""


@dataclass(frozen=True)
class Prompt:
    """What turns are written after."""

    messages: Sequence[Message]
    seeds: tuple[int, ...]
    """One turn is drawn from each."""


@dataclass(frozen=True)
class Turn:
    """What was written."""

    text: str
    ids: tuple[int, ...]
    """The tokens that were generated, the one that ended the turn included."""
    ended: bool
    """Whether the model ended it; else the budget was spent, or it was stopped."""


def write_turns(
    chat: ChatModel,
    adapter: str | None,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    stop: threading.Event,
) -> list[tuple[Turn, ...] | InputError | BackendError]:
    """Write the turns of all prompts. Runs on the model's owner thread.

    Args:
        chat: The model.
        adapter: The LoRA adapter to put in force, or None.
        prompts: Conversations that are too long lose their oldest turns.
        sampling: For all rows; its seed is not looked at.
        stop: Set it to end early; what is returned then is half written.

    Returns:
        In the order of the prompts: a turn for each seed, or the error of a conversation that the
        model cannot read.
    """
    written: list[tuple[Turn, ...] | InputError | BackendError] = []
    readable: list[tuple[int, Encoded]] = []
    for place, prompt in enumerate(prompts):
        try:
            encoded, _ = chat.encode_fitting(prompt.messages, sampling.max_new_tokens)
        except (InputError, BackendError) as error:
            written.append(error)
        else:
            written.append(())
            readable.append((place, encoded))
    seeds = [prompts[place].seeds for place, _ in readable]
    turns = write_encoded(chat, adapter, [e for _, e in readable], seeds, sampling, stop)
    for (place, _), of_prompt in zip(readable, turns, strict=True):
        written[place] = of_prompt
    return written


def write_encoded(
    chat: ChatModel,
    adapter: str | None,
    prompts: Sequence[Encoded],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    stop: threading.Event,
) -> list[tuple[Turn, ...]]:
    """Write the turns of prompts that are tokens already; see `write_turns`.

    Args:
        chat: The model.
        adapter: The LoRA adapter to put in force, or None.
        prompts: Each must leave the model room for a token.
        seeds: For each prompt, one for each turn.
        sampling: For all rows.
        stop: Set it to end early.
    """
    heads: list[_Head] = []
    with torch.inference_mode():
        for encoded, of_prompt in zip(prompts, seeds, strict=True):
            if of_prompt:
                heads.append(_read(chat, adapter, encoded, of_prompt, sampling))
        one_batch = all(is_plain(head.cache) for head in heads)
        for batch in [heads] if one_batch else [[head] for head in heads]:
            if batch:
                _Batch(chat, batch, sampling).write(stop)
    rows = iter(row for head in heads for row in head.rows)
    return [tuple(_turn(chat, next(rows)) for _ in of_prompt) for of_prompt in seeds]


@dataclass
class _Row:
    """One turn under way."""

    seed: int
    budget: int
    ids: list[int] = field(default_factory=list)


@dataclass
class _Head:
    """A prompt that has been read."""

    encoded: Encoded
    cache: Any
    position: int
    """Of the first token behind it."""
    logits: torch.Tensor
    """Of that token, shape (1, vocabulary)."""
    rows: list[_Row]


def _read(
    chat: ChatModel, adapter: str | None, encoded: Encoded, seeds: Sequence[int], sampling: Sampling
) -> _Head:
    track = Track(encoded, adapter)
    logits = chat.run(track, 1, logits=True).logits[0]
    budget = sampling.max_new_tokens
    if chat.limit is not None:
        budget = min(budget, chat.limit - len(encoded.ids))
    rows = [_Row(seed, budget) for seed in seeds]
    return _Head(encoded, track.cache, len(encoded.ids) + track.offset, logits, rows)


class _Batch:
    """Rows that are written together."""

    def __init__(self, chat: ChatModel, heads: Sequence[_Head], sampling: Sampling) -> None:
        self._chat = chat
        self._rows = [row for head in heads for row in head.rows]
        self._written = 0
        self._length = max(len(head.encoded.ids) for head in heads)
        room = max(row.budget for row in self._rows)
        copies = [len(head.rows) for head in heads]
        device, dtype = chat.model.device, chat.model.dtype
        gaps = [self._length - len(head.encoded.ids) for head in heads]
        # What the padding says is masked, but a repetition penalty looks at it: so it repeats the
        # prompt's own first token.
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
        self._choice = RowChoice(sampling, [row.seed for row in self._rows], chat.placeholder)

    def write(self, stop: threading.Event) -> None:
        """Write until every row has ended. What was written is in the rows."""
        running = torch.ones(len(self._rows), dtype=torch.bool, device=self._ids.device)
        while not stop.is_set():
            at = self._length + self._written
            tokens = self._choice(self._ids[:, :at], self._logits)
            self._ids[:, at] = tokens
            self._written += 1
            for row, token, runs in zip(self._rows, tokens.tolist(), running.tolist(), strict=True):
                if runs:
                    row.ids.append(token)
            running &= ~torch.isin(tokens, self._ends) & (self._budgets > self._written)
            left = int(running.sum())
            if not left:
                return
            if left <= (1 - ENDED_SHARE) * len(self._rows):
                self._keep(running.nonzero().flatten())
                running = running.new_ones(left)
            self._step(at)

    def _keep(self, places: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self._cache.batch_select_indices(places)
        self._ids, self._positions = self._ids[places], self._positions[places]
        self._budgets = self._budgets[places]
        if self._mask is not None:
            self._mask = self._mask[places]
        kept = places.tolist()
        self._rows = [self._rows[place] for place in kept]
        self._choice.keep(kept)

    def _step(self, at: int) -> None:
        """Read the tokens that stand at `at`."""
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


class RowChoice:
    """Chooses each row's next token: temperature, top-p, repetition penalty, and seeds.

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

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._generators = [self._generators[row] for row in rows]

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens, shape (rows,).

        Args:
            ids: What stands before them, shape (rows, length).
            logits: Shape (rows, vocabulary); is changed.
        """
        if self._placeholder is not None:
            # A picture that the model invents could not be shown to it when it reads on.
            logits[:, self._placeholder] = -torch.inf
        if self._penalty is not None:
            logits = self._penalty(ids, logits)
        if self._sampling.temperature == 0:
            return logits.argmax(-1)
        return self._drawn(torch.softmax(logits.float() / self._sampling.temperature, -1))

    def _drawn(self, probabilities: torch.Tensor) -> torch.Tensor:
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
        return tokens.gather(1, torch.minimum(place, last)).flatten()
