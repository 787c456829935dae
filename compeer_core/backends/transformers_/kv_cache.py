"""Join the key-value caches of several rows, so that one forward pass serves them all.

Rows of different lengths are padded on the left; the padding has to be masked. A joined cache has
room for new tokens: a cache that grows by copying costs more than the attention over it. Only plain
caches can be joined, not a sliding window or a recurrent state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def is_plain(cache: Any) -> bool:
    """Return whether `joined` can join this cache with others."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def joined(caches: Sequence[Any], copies: Sequence[int], room: int) -> Any:
    """Join plain caches of one row each, padded on the left, each repeated `copies` times."""
    whole = DynamicCache()
    for number in range(len(caches[0].layers)):
        layers = [cache.layers[number] for cache in caches]
        length = max(layer.keys.shape[2] for layer in layers)
        memory = []
        for name in ("keys", "values"):
            parts = [getattr(layer, name) for layer in layers]
            _, heads, _, size = parts[0].shape
            values = parts[0].new_zeros((sum(copies), heads, length + room, size))
            begin = 0
            for part, count in zip(parts, copies, strict=True):
                values[begin : begin + count, :, length - part.shape[2] : length] = part
                begin += count
            memory.append(values)
        whole.layers.append(PreallocatedLayer(memory[0], memory[1], length))
    return whole


def restore_cache(whole: Any, row: int, padding: int, cache: Any) -> None:
    """Copy a row of a joined cache back into the row's own cache.

    Args:
        whole: The joined cache.
        row: The row's index in it.
        padding: Padded positions before the row's first token.
        cache: The row's own cache.
    """
    for own, layer in zip(cache.layers, whole.layers, strict=True):
        own.keys = layer.keys[row : row + 1, :, padding:].clone()
        own.values = layer.values[row : row + 1, :, padding:].clone()


def beginning(cache: Any, length: int) -> Any:
    """Copy the first tokens of a plain cache."""
    copied = DynamicCache()
    for layer in cache.layers:
        keys, values = (states[:, :, :length].clone() for states in (layer.keys, layer.values))
        part = DynamicLayer()
        part.lazy_initialization(keys, values)
        part.keys, part.values = keys, values
        copied.layers.append(part)
    return copied


def size_of(cache: Any) -> int:
    """Return the bytes of a cache's keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class PreallocatedLayer(DynamicLayer):
    """Keys and values of a layer, in memory with room for new tokens."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, held: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._memory = (keys, values)
        self._held = held
        self._show()

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (memory[:, :, : self._held] for memory in self._memory)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        behind = self._held + key_states.shape[2]
        for memory, states in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, self._held : behind] = states
        self._held = behind
        return self._show()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        keys, values = self._memory
        self._memory = (keys[indices], values[indices])
        self._show()
