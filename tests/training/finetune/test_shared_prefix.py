"""Shared-prefix rows: their layout, and that the model computes the same as for separate samples."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.dialogue import Dialogue
from compeer_core.model_pool import ModelPool
from compeer_core.prompts import policy_messages
from training.cer.esconv_rules import Config, rule_rows
from training.data.pictures import Pictures
from training.finetune.shared_prefix import (
    ATTENTION,
    TokenisedSample,
    padded_rows,
    row_loss,
    shared_prefix_row,
)
from training.finetune.tokenise import SampleReader

pytestmark = pytest.mark.usefixtures("one_thread")


def text_sample(prompt: list[int], completion: list[int]) -> TokenisedSample:
    """A sample without images: its positions count up."""
    count = len(prompt) + len(completion)
    return TokenisedSample(tuple(prompt), tuple(completion), torch.arange(count).expand(3, count))


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> Path:
    return tiny_base


@pytest.fixture
def model(base: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)


def separate_loss(
    model: Qwen2_5_VLForConditionalGeneration, samples: list[TokenisedSample]
) -> Tensor:
    """The loss with each sample in a row of its own and transformers' own attention."""
    model.model.language_model.set_attn_implementation("sdpa")
    losses = []
    for sample in samples:
        tokens = torch.tensor([[*sample.prompt, *sample.completion]])
        logits = model(
            input_ids=tokens,
            position_ids=sample.positions[:, None],
            pixel_values=sample.pixels,
            image_grid_thw=sample.grid,
        ).logits[0, len(sample.prompt) - 1 : -1]
        losses.append(
            functional.cross_entropy(logits, torch.tensor(sample.completion), reduction="sum")
        )
    return torch.stack(losses).sum()


def packed_loss(
    model: Qwen2_5_VLForConditionalGeneration, samples: list[TokenisedSample]
) -> Tensor:
    model.model.language_model.set_attn_implementation(ATTENTION)
    return row_loss(model, shared_prefix_row(samples))


def gradients(model: Qwen2_5_VLForConditionalGeneration, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_row_has_the_history_once_and_branches_where_samples_diverge():
    # 9 starts a turn; the second history continues after 1 2 3
    row = shared_prefix_row(
        [text_sample([1, 2, 3, 9], [4, 5]), text_sample([1, 2, 3, 7, 6, 9], [8])]
    )

    assert row.tokens.tolist() == [[1, 2, 3, 7, 6, 9, 4, 5, 9, 8]]
    assert row.branches.trunk == 5
    assert row.branches.shared == (3, 5)
    assert row.branches.lengths == (3, 2)
    assert row.positions[0, 0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 5, 6]
    # the 9 of each branch predicts its first target
    assert row.predicting.tolist() == [5, 6, 8]
    assert row.targets.tolist() == [4, 5, 8]


def test_branch_attends_to_its_prefix_of_the_trunk_and_to_itself():
    row = shared_prefix_row(
        [text_sample([1, 2, 3, 9], [4, 5]), text_sample([1, 2, 3, 7, 6, 9], [8])]
    )
    first = row.branches.mask[:3, 5 - 3 : 5 + 3]  # three trunk tokens, three of its own

    inf = float("inf")
    assert first.tolist() == [
        [0, 0, 0, 0, -inf, -inf],
        [0, 0, 0, 0, 0, -inf],
        [0, 0, 0, 0, 0, 0],
    ]


def test_samples_without_a_common_prefix_share_nothing():
    row = shared_prefix_row([text_sample([1, 2, 9], [3]), text_sample([5, 9], [6])])

    assert row.branches.shared == (2, 0)
    assert row.tokens.tolist() == [[1, 2, 9, 3, 5, 9, 6]]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    history=st.lists(st.integers(20, 500), min_size=2, max_size=12),
    turns=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(20, 500), min_size=1, max_size=5)),
        min_size=1,
        max_size=4,
    ),
    stranger=st.booleans(),
)
def test_packed_loss_equals_the_separate_losses(model, history, turns, stranger):
    samples = [text_sample([*history[:end], 19], completion) for end, completion in turns]
    if stranger:
        samples.append(text_sample([*reversed(history), 19], [30, 31]))

    with torch.no_grad():
        expected, actual = separate_loss(model, samples), packed_loss(model, samples)

    assert actual.item() == pytest.approx(expected.item(), rel=1e-4)


def test_padded_rows_see_their_own_tokens_alone_by_hand():
    """A trunk of 1 2 with branches 9 4 (which sees only the 1) and 9 5, and a row of one token less."""
    first = shared_prefix_row([text_sample([1, 9], [4]), text_sample([1, 2, 9], [5])])
    second = shared_prefix_row([text_sample([6, 7], [3, 8, 8])])
    padded = padded_rows([first, second])

    assert padded.tokens.tolist() == [[1, 2, 9, 4, 9, 5], [6, 7, 3, 8, 8, 0]]
    assert padded.predicting.tolist() == [2, 4, 7, 8, 9]
    assert padded.targets.tolist() == [4, 5, 3, 8, 8]
    mask = padded.branches.mask.int()
    assert mask[0, 0].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    assert mask[1, 0].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_padded_rows_have_the_gradients_of_separate_rows(model, base, dialogues):
    reader = SampleReader(base, model)
    rows = [
        shared_prefix_row([reader.read_turn(*turn) for turn in turns])
        for turns in (dialogues[0], dialogues[1], dialogues[0][:1])
    ]
    model.model.language_model.set_attn_implementation(ATTENTION)

    expected = gradients(model, torch.stack([row_loss(model, row) for row in rows]).sum())
    actual = gradients(model, row_loss(model, padded_rows(rows)))

    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def pictures(small_corpora: Path) -> Pictures:
    return Pictures(None, small_corpora / "faces")


@pytest.fixture(scope="module")
def dialogues(small_corpora: Path, pictures: Pictures) -> list[list[tuple[Dialogue, str]]]:
    """Two dialogues with photos in most of their turns: histories and completions."""
    faces = small_corpora / "faces"
    config = Config(esconv=small_corpora / "esconv", output=faces, faces=faces, face_share=0.7)
    turns: dict[str, list[tuple[Dialogue, str]]] = {}
    for row in rule_rows(config, "train"):
        turn = (pictures.dialogue(row.case), row.first.turn)
        turns.setdefault(row.case.dialogue_id, []).append(turn)
    return list(turns.values())[:2]


def test_gradients_with_photos_equal_those_of_separate_samples(model, base, dialogues):
    reader = SampleReader(base, model)
    samples = [reader.read_turn(*turn) for turn in dialogues[0]]
    assert len({sample.pixels is None for sample in samples}) == 2  # with a photo and without
    row = shared_prefix_row(samples)
    total = sum(len(sample.prompt) + len(sample.completion) for sample in samples)
    assert row.tokens.shape[1] < total
    # the trunk contains no image
    trunk = row.tokens[0, : row.branches.trunk]
    assert not (trunk == model.config.image_token_id).any()

    expected = gradients(model, separate_loss(model, samples))
    actual = gradients(model, packed_loss(model, samples))

    assert actual.keys() == expected.keys()
    assert any(name.startswith("model.visual") for name in actual)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_precomputed_image_tokens_replace_the_tower(model, base, dialogues):
    reader = SampleReader(base, model)
    row = shared_prefix_row([reader.read_turn(*turn) for turn in dialogues[0]])

    with torch.no_grad():
        own = torch.cat(model.model.get_image_features(row.pixels, row.grid).pooler_output)
        seen, the_same = row_loss(model, row), row_loss(model, row, own)
        other = row_loss(model, row, torch.full_like(own, 5.0))

    assert the_same.item() == pytest.approx(seen.item(), rel=1e-6)
    assert other.item() != pytest.approx(seen.item(), rel=1e-6)


def test_samples_are_tokenised_as_at_inference(model, base, dialogues):
    reader = SampleReader(base, model)
    lease = ModelPool().lease(str(base), None, None, "cpu")
    chat: ChatModel = lease.chat
    try:
        for history, completion in (turn for dialogue in dialogues for turn in dialogue):
            read = reader.read_turn(history, completion)
            encoded = chat.encode(policy_messages(history, "trained"))

            assert read.prompt == encoded.ids
            if read.pixels is not None:
                torch.testing.assert_close(read.pixels, encoded.inputs["pixel_values"])
            written = reader.processor.tokenizer.decode(read.completion)
            assert written == f"{completion}<|im_end|>"
            assert read.positions.shape == (3, len(read.prompt) + len(read.completion))
    finally:
        lease.release()


def test_branches_share_more_of_the_trunk_from_turn_to_turn(model, base, dialogues):
    # otherwise the tests above would look at rows in which little is shared
    reader = SampleReader(base, model)
    row = shared_prefix_row([reader.read_turn(*turn) for turn in dialogues[1]])

    assert len(row.branches.shared) >= 3
    assert all(before < after for before, after in pairwise(row.branches.shared))
