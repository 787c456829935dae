"""What a model has read of one conversation, stored apart from the model.

A `SequenceState` holds tokens, key-value cache and the position offset that Qwen's models keep on
the module. `ChatModel.run` installs it before each job and stores it afterwards, so turns do not
affect each other. A state can go back: the part of the cache that the new tokens share with the old
ones stays; the rest is cropped or, where a cache cannot be cropped, the cache is emptied.

A `StateCache` stores what was read of earlier turns, since the next turn of a conversation begins with it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compeer_core.backends.transformers_.kv_cache import beginning, is_plain, size_of

STORED_BYTES = 384 << 20
"""Most memory of a `StateCache`: some 8,700 tokens of COMPEER-small in 32 bits, or 7,000 of a 7 B model in 16."""


@dataclass(frozen=True)
class Encoded:
    """A conversation as input of the model.

    Attributes:
        ids: Its tokens, with those of the images.
        inputs: The further inputs that the images need.
        fixed_text: The start of the rendered text, up to the last image.
        fixed: Tokens of that start; None if unknown, because the tokenizer does not treat the text
            after it separately.
    """

    ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor]
    fixed_text: str
    fixed: int | None


@dataclass(eq=False)
class SequenceState:
    """What a model has read of one conversation."""

    encoded: Encoded
    adapter: str | None
    ids: list[int] = field(init=False)
    cache: Any = None
    offsets: list[Any] = field(default_factory=list)
    """Qwen's `rope_deltas`, one for each module that has them."""

    def __post_init__(self) -> None:
        self.ids = list(self.encoded.ids)

    @property
    def read(self) -> int:
        """Tokens in the cache."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def unread(self) -> int:
        """Tokens to read before the next one can be predicted: 1 or more."""
        return len(self.ids) - min(self.read, len(self.ids) - 1)

    @property
    def offset(self) -> int:
        """Difference between a token's position (as the model counts) and its index."""
        return next((int(o.flatten()[0]) for o in self.offsets if o is not None), 0)

    def shares(self, other: "SequenceState") -> int:
        """Return how many tokens of this prompt another state has read, or 0 if they cannot be copied."""
        if self.adapter != other.adapter or not other.read or not is_plain(other.cache):
            return 0
        # Not the last token of all: the next one is predicted from it.
        shared = min(_shared(other, self.encoded), len(self.ids) - 1)
        fixed = self.encoded.fixed
        is_whole = shared >= (len(self.encoded.ids) - 1 if fixed is None else fixed)
        return shared if is_whole and _same_images(self.encoded, other.encoded) else 0

    def copy_from(self, others: Iterable["SequenceState"]) -> None:
        """Copy the longest part of this prompt that another state has read; this one has read nothing."""
        best = max(others, key=self.shares, default=None)
        if best is not None and (shared := self.shares(best)):
            self.cache = beginning(best.cache, shared)
            self.offsets = list(best.offsets)

    def set_prompt(self, encoded: Encoded) -> None:
        """Replace the tokens, and reuse the cache of the prefix that they share with the old ones."""
        shared = 0
        for old, new in zip(self.ids, encoded.ids, strict=False):
            if old != new:
                break
            shared += 1
        self.encoded = encoded
        self.truncate(shared)
        self.ids = list(encoded.ids)

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first `length`."""
        del self.ids[length:]
        self.forget(self.read - length)

    def forget(self, excess: int) -> None:
        """Remove the last `excess` tokens from the cache, or empty it if it cannot be cropped."""
        if excess <= 0:
            return
        remaining = self.read - excess
        fixed = self.encoded.fixed
        if fixed is not None and remaining >= fixed and remaining > 0:
            # A sliding window or a recurrent state has overwritten older tokens and refuses.
            with suppress(RuntimeError):
                self.cache.crop(-excess)
                if self.read == remaining:
                    return
        self.reset()

    def reset(self) -> None:
        """Empty the cache; the next run reads everything again, images included."""
        self.cache = None
        self.offsets = []


class StateCache:
    """Prompts that were read for earlier turns, of all policies and judges on one set of weights.

    A prompt is found by its tokens, images and adapter alone, so it reveals nothing that its next reader has
    not sent in full. Only the owner thread uses this.
    """

    def __init__(self, size: int = STORED_BYTES) -> None:
        """Begin empty.

        Args:
            size: Most bytes in all stored caches together.
        """
        self._size = size
        self._states: list[SequenceState] = []

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._states)

    def put(self, state: SequenceState, length: int) -> None:
        """Store a copy of the first `length` tokens, or of fewer if fewer were read.

        It replaces the earlier turns of the same conversation, which are its beginnings. Above the
        limit the oldest ones are dropped. Caches that cannot be copied are not stored.
        """
        length = min(length, state.read)
        if not length or not is_plain(state.cache) or (state.encoded.fixed or 0) > length:
            return
        stored = SequenceState(replace(state.encoded, ids=tuple(state.ids[:length])), state.adapter)
        stored.cache, stored.offsets = beginning(state.cache, length), list(state.offsets)
        others = [other for other in self._states if not _continues(stored, other)]
        self._states = [*others, stored]
        while sum(size_of(other.cache) for other in self._states) > self._size:
            del self._states[0]

    def clear(self) -> None:
        self._states = []


def _continues(state: SequenceState, other: SequenceState) -> bool:
    """Whether another prompt is the beginning of this one."""
    return (
        state.adapter == other.adapter
        and state.ids[: len(other.ids)] == other.ids
        and _same_images(state.encoded, other.encoded)
    )


def _shared(state: SequenceState, encoded: Encoded) -> int:
    """Return the length of the prefix of `encoded` that a state has read."""
    count = 0
    for old, new in zip(state.ids[: state.read], encoded.ids, strict=False):
        if old != new:
            break
        count += 1
    return count


def _same_images(one: Encoded, other: Encoded) -> bool:
    ours, theirs = _image_inputs(one), _image_inputs(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def _image_inputs(encoded: Encoded) -> dict[str, torch.Tensor]:
    """The inputs that belong to images, not to tokens."""
    return {k: v for k, v in encoded.inputs.items() if not k.endswith("token_type_ids")}
