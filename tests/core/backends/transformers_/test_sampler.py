"""The sampler draws from the library's nucleus, without its sort of the whole vocabulary."""

import pytest
import torch
from transformers import TopPLogitsWarper

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.sampler import Sampler

IDS = torch.zeros((1, 3), dtype=torch.long)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])  # flat, where all tokens are likely, to peaked
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("size", [40, 3000])
def test_the_nucleus_is_the_librarys(spread, top_p, size):
    torch.manual_seed(size)
    scores = spread * torch.randn(1, size)
    sampler = Sampler(Sampling(top_p=top_p), None, torch.device("cpu"))

    ours = sampler._nucleus(IDS, scores)

    assert torch.equal(ours, TopPLogitsWarper(top_p)(IDS, scores))


def test_draws_follow_the_probabilities():
    sampler = Sampler(Sampling(temperature=0.5, top_p=0.99, seed=1), None, torch.device("cpu"))
    scores = torch.tensor([[0.0, 1.0, 1.0, -9.0]])

    drawn = [int(sampler(IDS, scores.clone()).argmax()) for _ in range(2000)]

    expected = torch.softmax(scores[0, :3] / 0.5, 0)
    for token in range(3):
        assert drawn.count(token) / 2000 == pytest.approx(float(expected[token]), abs=0.03)
    assert 3 not in drawn
