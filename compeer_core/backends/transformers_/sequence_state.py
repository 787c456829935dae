"""What a model has read of one conversation, kept apart from the model.

A `Track` holds the tokens, the key-value cache, and the position offset that Qwen's models keep on
the module. `ChatModel.run` puts it in place before each job and takes it back after it, so no turn
can tell whether it was alone. A track can go back: what the cache shares with a new state of the
conversation is kept, and the rest is cut off or, where a cache cannot be cut, all of it.

A `Shelf` keeps the tracks of the last few conversations, because the next turn of a conversation
begins with what was read for the one before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Encoded:
    """A conversation as the model takes it.

    Attributes:
        ids: Its tokens, those of the pictures included.
        inputs: What the model needs beside the tokens when it reads the pictures.
        fixed_text: The start of the rendered text, up to the last picture.
        fixed: How many tokens that start makes; None where it cannot be told, because the
            tokenizer does not treat the text behind it on its own.
    """

    ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor]
    fixed_text: str
    fixed: int | None


@dataclass(eq=False)
class Track:
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
        """Tokens that are in the cache."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def unread(self) -> int:
        """Tokens that have to be read before the next one is known: 1 or more."""
        return len(self.ids) - min(self.read, len(self.ids) - 1)

    @property
    def offset(self) -> int:
        """How much further the positions of the tokens are than their places."""
        return next((int(o.flatten()[0]) for o in self.offsets if o is not None), 0)

    def has_prompt_of(self, other: "Track") -> bool:
        """Whether both began with the same tokens and pictures, under the same adapter."""
        return (
            self.adapter == other.adapter
            and self.encoded.ids == other.encoded.ids
            and _same_pictures(self.encoded, other.encoded)
        )

    def become(self, encoded: Encoded) -> None:
        """Continue with other tokens, and keep of the cache what they share with the old ones."""
        shared = 0
        for old, new in zip(self.ids, encoded.ids, strict=False):
            if old != new:
                break
            shared += 1
        self.encoded = encoded
        self.truncate(shared)
        self.ids = list(encoded.ids)

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        del self.ids[length:]
        self.forget(self.read - length)

    def forget(self, excess: int) -> None:
        """Take the last `excess` tokens out of the cache, or empty it where it cannot do that."""
        if excess <= 0:
            return
        kept = self.read - excess
        fixed = self.encoded.fixed
        if fixed is not None and kept >= fixed and kept > 0:
            try:
                self.cache.crop(-excess)
            except (NotImplementedError, RuntimeError, ValueError):
                # A sliding window or a recurrent state has overwritten what would be needed.
                self.reset()
            else:
                if self.read == kept:
                    return
        self.reset()

    def reset(self) -> None:
        """Empty the cache; the next run reads everything again, pictures included."""
        self.cache = None
        self.offsets = []


class Shelf:
    """The last few tracks that nobody uses. Only the owner thread touches it.

    A track is found again by its tokens and its pictures alone, so it can only tell what whoever
    takes it has sent in full.
    """

    def __init__(self, size: int = 4, tokens: int = 8192) -> None:
        """Begin empty.

        Args:
            size: Tracks that are kept at most.
            tokens: Tokens that they have read at most, all together: a 7 B model needs some 57 kB
                of memory for each.
        """
        self._size = size
        self._tokens = tokens
        self._tracks: list[Track] = []

    def take(self, encoded: Encoded, adapter: str | None) -> Track:
        """Return a track that stands at `encoded`, having read as much of it as any here had."""
        fitting = [
            track
            for track in self._tracks
            if track.adapter == adapter and _same_pictures(track.encoded, encoded)
        ]
        best = max(fitting, key=lambda track: _shared(track, encoded), default=None)
        if best is None or not _shared(best, encoded):
            return Track(encoded, adapter)
        self._tracks.remove(best)
        best.become(encoded)
        return best

    def put(self, track: Track) -> None:
        """Keep a track, and let go of the oldest while there are too many or they hold too much."""
        if track.read:
            self._tracks = [*self._tracks, track][-self._size :]
        while sum(kept.read for kept in self._tracks) > self._tokens:
            del self._tracks[0]

    def clear(self) -> None:
        self._tracks = []


def _shared(track: Track, encoded: Encoded) -> int:
    """How many tokens that a track has read are the first ones of `encoded`."""
    count = 0
    for old, new in zip(track.ids[: track.read], encoded.ids, strict=False):
        if old != new:
            break
        count += 1
    return count


def _same_pictures(one: Encoded, other: Encoded) -> bool:
    ours, theirs = _pictures(one), _pictures(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def _pictures(encoded: Encoded) -> dict[str, torch.Tensor]:
    """The inputs that are not merely as long as the tokens."""
    return {k: v for k, v in encoded.inputs.items() if not k.endswith("token_type_ids")}
