"""The estimate counts characters, pixels and the longest possible answers."""

import pytest

from compeer_core.backends.protocol import Message
from compeer_core.images import Image
from training.cer.requests.asking import Question
from training.cer.requests.costs import estimate
from training.cer.requests.generators import GeneratorSettings


def test_the_estimate_matches_a_count_by_hand() -> None:
    # Latin: 40 characters / 4 = 10; Chinese: 30 / 1.5 = 20; a picture of 56 x 56: 4 patches of
    # 28 x 28; 2 messages: 10. Together 44 tokens a question.
    messages = (Message("system", ("x" * 40,)), Message("user", ("难" * 30, Image(b"", 56, 56))))
    generator = GeneratorSettings(
        source="openai:http://localhost/v1#m",
        sees_images=True,
        max_new_tokens=100,
        price_per_million_input=1000.0,
        price_per_million_output=2000.0,
    )
    result = estimate((Question(str(n), messages, n) for n in range(5)), generator)

    assert (result.requests, result.input_tokens, result.output_tokens) == (5, 220, 500)
    assert result.price == pytest.approx(0.22 + 1.0)
    assert "at most 1.22" in str(result)


def test_without_prices_the_estimate_has_none() -> None:
    question = Question("a", (Message("user", ("a",)),), 1)

    assert estimate([question], GeneratorSettings(source="some/folder")).price is None
