"""Stored prompts: what is found, what replaces what, and how much memory they take."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from compeer_core.backends.transformers_.kv_cache import size_of
from compeer_core.backends.transformers_.sequence_state import Encoded, SequenceState, StateCache

TOKEN_BYTES = 2 * 2 * 3 * 4
"""Keys and values of a token: two layers, one head, three numbers of four bytes."""


def unread(ids, adapter=None, pictures=None):
    return SequenceState(Encoded(tuple(ids), pictures or {}, "", 0), adapter)


def read(ids, adapter=None, pictures=None):
    """A state whose cache has a token's number as its keys and values."""
    state = unread(ids, adapter, pictures)
    state.cache = DynamicCache()
    for layer in range(2):
        numbers = torch.tensor(ids, dtype=torch.float32)[None, None, :, None].repeat(1, 1, 1, 3)
        state.cache.update(numbers + layer, numbers - layer, layer)
    return state


def found(store, ids, adapter=None, pictures=None):
    """The tokens of a prompt that need not be read."""
    state = unread(ids, adapter, pictures)
    state.copy_from(store)
    held = state.cache.layers[1].keys[0, 0, :, 0] - 1 if state.read else torch.tensor([])
    assert held.tolist() == state.ids[: state.read]
    return state.ids[: state.read]


def stored(store):
    return [state.ids for state in store]


def test_a_prompt_begins_with_the_longest_stored_one():
    store = StateCache()
    for ids in ([1, 2], [1, 2, 3, 9], [7, 7]):
        store.put(read(ids), 4)

    assert found(store, [1, 2, 3, 4]) == [1, 2, 3]
    assert found(store, [7, 7]) == [7]  # the next token is predicted from the last one
    assert found(store, [5, 5]) == []
    assert found(store, [1, 2, 3, 4], adapter="another") == []


def test_only_the_prompt_of_a_turn_is_stored_and_it_is_a_copy():
    store, turn = StateCache(), read([1, 2, 3, 4, 5])
    store.put(turn, 3)
    turn.cache.layers[0].keys.zero_()

    assert stored(store) == [[1, 2, 3]]
    assert found(store, [1, 2, 3, 4]) == [1, 2, 3]
    assert sum(size_of(state.cache) for state in store) == 3 * TOKEN_BYTES


def test_a_turn_replaces_the_earlier_ones_of_its_conversation():
    store = StateCache()
    for ids in ([1, 2], [8, 9], [1, 2, 3], [1, 2, 3, 4]):
        store.put(read(ids), 9)

    assert stored(store) == [[8, 9], [1, 2, 3, 4]]


def test_images_and_adapters_are_told_apart():
    one, other = {"pixel_values": torch.ones(2)}, {"pixel_values": torch.zeros(2)}
    store = StateCache()
    store.put(read([1, 2, 3], pictures=one), 3)
    store.put(read([1, 2, 3, 4], pictures=other), 4)
    store.put(read([1, 2, 3, 4], "another", other), 4)

    assert len(stored(store)) == 3
    assert found(store, [1, 2, 3, 4], pictures=one) == [1, 2, 3]
    assert found(store, [1, 2, 3, 4]) == []


def test_a_prompt_that_was_not_read_is_not_stored():
    store = StateCache()
    store.put(unread([1, 2]), 2)
    store.put(read([]), 0)

    assert stored(store) == []


def test_the_oldest_prompts_make_room():
    store = StateCache(size=5 * TOKEN_BYTES)
    for ids in ([1, 2], [3, 4, 5], [6]):
        store.put(read(ids), 9)
    assert stored(store) == [[3, 4, 5], [6]]

    store.put(read([7] * 9), 9)  # more than may be stored

    assert stored(store) == []


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_whatever_is_stored_fits_and_never_misleads(prompts, wanted, tokens):
    store = StateCache(size=tokens * TOKEN_BYTES)
    for ids in prompts:
        store.put(read(ids), len(ids))

    assert sum(map(len, stored(store))) <= tokens
    assert len(found(store, wanted)) == max(
        (_shared(wanted, ids) for ids in stored(store)), default=0
    )


def _shared(wanted, ids):
    same = 0
    while same < min(len(wanted) - 1, len(ids)) and wanted[same] == ids[same]:
        same += 1
    return same
