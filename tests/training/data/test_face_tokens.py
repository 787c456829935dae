"""What a tower says of a face becomes tokens along words: by hand, and as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from training.data.face_tokens import (
    WORDS,
    even_handed,
    speaking_layer,
    word_vectors,
)
from training.data.faces import FACE_CLASSES


def test_each_class_has_its_word():
    assert WORDS.keys() == {*FACE_CLASSES}


def test_a_class_that_is_predicted_too_rarely_gets_a_positive_offset():
    # of four photos two show class 1; a shy classifier names it never, and leans to it a little where it is
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 1.5], [2.0, 1.8]])
    labels = torch.tensor([0, 0, 1, 1])

    added = even_handed(logits, labels)

    assert added.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert (logits + added).argmax(-1).tolist() == [0, 0, 1, 1]


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_each_class_is_named_about_as_often_as_it_is_there(seed):
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (300,), generator=drawn)
    leaning = nn.functional.one_hot(labels, 3) + torch.randn(300, 3, generator=drawn)
    plain = torch.tensor([1.5, 0.0, -1.0])

    named = (leaning + plain + even_handed(leaning + plain, labels)).argmax(-1)

    there, found = (torch.bincount(which, minlength=3) / 300 for which in (labels, named))
    assert (there - found).abs().max() < 0.05


WORD_VECTORS = torch.tensor([[3.0, 0.0], [-1.0, 0.0]])
"""Their mean is (1, 0), and they lie along (1, 0) and (-1, 0) from it."""


def test_a_token_leans_as_the_logits_do():
    head = nn.Linear(1, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        head.bias.copy_(torch.tensor([0.5, 0.5]))
    values = torch.tensor([[2.0], [-2.0]])

    weight, bias = speaking_layer(head, torch.zeros(2), head(values), WORD_VECTORS, length=4.0)

    # each photo is one length from the mean word, towards the word of the class it leans to
    assert torch.allclose(values @ weight.T + bias, torch.tensor([[5.0, 0.0], [-3.0, 0.0]]))


def test_the_mean_photo_is_the_mean_word_whatever_is_added():
    torch.manual_seed(0)
    head, values, words = nn.Linear(5, 3), torch.randn(40, 5), torch.randn(3, 8)
    added = torch.tensor([0.7, -0.5, -0.2])

    weight, bias = speaking_layer(head, added, head(values), words, length=2.0)

    tokens = values @ weight.T + bias
    apart = tokens - words.mean(0)
    assert torch.allclose(tokens.mean(0), words.mean(0), atol=1e-5)
    assert apart.norm(dim=-1).mean().item() == pytest.approx(2.0, rel=1e-5)


def test_a_word_of_several_tokens_stands_for_their_mean():
    class Tokens:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            assert text.startswith(" ") and not add_special_tokens
            return {"input_ids": [0, 3] if text == " disgusting" else [2]}

    found = word_vectors(torch.arange(8.0).view(4, 2), Tokens())  # type: ignore[arg-type]

    assert found[FACE_CLASSES.index("disgust")].tolist() == [3.0, 4.0]
    assert found[FACE_CLASSES.index("happy")].tolist() == [4.0, 5.0]
    assert found.shape == (7, 2)
