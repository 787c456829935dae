"""Steps with compressed weights: close to the exact ones, for one row only, with any adapter."""

import copy
import re
import threading
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_ import fused_step, packed_step
from compeer_core.backends.transformers_.fused_step import FusedTextModel, speed_up
from compeer_core.model_pool import ModelPool, load_transformers
from tests.core.backends.transformers_.test_fused_step import ALL, PROMPT, adapted, logits

pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.skipif(not packed_step.is_supported(), reason="this CPU has no FBGEMM"),
]

CLOSE = 0.12
"""Inputs of 7 bits, on random weights, whose logits average out less noise than trained ones."""


@pytest.fixture(scope="module")
def plain(qwen_folder) -> Any:
    return AutoModelForImageTextToText.from_pretrained(qwen_folder).float().eval()


@pytest.fixture
def exact(plain) -> Any:
    model = copy.deepcopy(plain).requires_grad_(False)
    speed_up(model)
    return model


@pytest.fixture
def compressed(plain) -> Any:
    model = copy.deepcopy(plain).requires_grad_(False)
    speed_up(model, compress=True)
    return model


@pytest.fixture
def packed_steps(monkeypatch) -> list[int]:
    """Grows with every compressed step."""
    taken: list[int] = []
    step = FusedTextModel._packed_states

    def counted(self, states, *rest):
        taken.append(len(states))
        return step(self, states, *rest)

    monkeypatch.setattr(FusedTextModel, "_packed_states", counted)
    return taken


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Standard deviation of the difference, relative to the logits'."""
    return float((ours - theirs).std() / theirs.std())


def test_logits_are_close(compressed, exact, packed_steps):
    assert 0 < error(logits(compressed), logits(exact)) < CLOSE

    assert packed_steps == [1] * 4


def test_16_bits_are_closer(plain, exact, monkeypatch):
    monkeypatch.setattr(fused_step, "KINDS", dict.fromkeys(packed_step.KINDS, "fp16"))
    model = copy.deepcopy(plain).requires_grad_(False)
    speed_up(model, compress=True)

    assert 0 < error(logits(model), logits(exact)) < 0.002


def test_long_texts_outgrow_their_room(compressed, exact):
    assert error(logits(compressed, count=70), logits(exact, count=70)) < CLOSE


@pytest.mark.parametrize("targets", [ALL, ["q_proj", "v_proj", "down_proj"], ["up_proj"]])
def test_adapters_share_the_compressed_base(compressed, exact, packed_steps, targets):
    bare = logits(compressed)
    ours, theirs = (adapted(model, warm=targets, cool=ALL) for model in (compressed, exact))

    for name in ("warm", "cool", "warm"):
        for model in (ours, theirs):
            model.set_adapter(name)
        assert error(logits(ours), logits(theirs)) < CLOSE
    assert error(logits(ours), bare) > 0.1
    ours.base_model.disable_adapter_layers()
    assert torch.equal(logits(ours), bare)

    assert packed_steps == [1] * 24  # six passes of four tokens


def test_several_rows_are_exact(compressed, exact, packed_steps):
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    with torch.inference_mode():
        for model in (compressed, exact):
            model.lm_head(torch.zeros(1, 1, model.config.text_config.hidden_size))

    assert torch.equal(logits(compressed, ids), logits(exact, ids))
    assert not packed_steps


def test_training_and_merged_adapters_are_exact(compressed, exact, packed_steps):
    ours, theirs = (adapted(model, warm=ALL) for model in (compressed, exact))
    for model in (ours, theirs):
        model.merge_adapter()
    states = torch.randn(2, 3, exact.config.text_config.hidden_size)

    logits(ours)

    assert not packed_steps
    assert torch.equal(compressed.lm_head(states[:1, :1]), exact.lm_head(states[:1, :1]))


def test_a_model_that_is_converted_becomes_exact(compressed, exact, packed_steps):
    whole = logits(compressed.double()).float()

    assert not packed_steps
    assert type(compressed.lm_head) is torch.nn.Linear
    assert error(whole, logits(exact)) < 1e-5


@pytest.mark.parametrize(("quantize", "expected"), [("int8", True), (None, False)])
def test_the_pool_compresses_on_request(qwen_folder, packed_steps, quantize, expected):
    hello = [Message("user", ("I feel sad",))]
    greedy = Sampling(temperature=0, max_new_tokens=4)

    backend = load_transformers(str(qwen_folder), quantize=quantize, pool=ModelPool())
    text = "".join(backend.open(hello, greedy, threading.Event()).generate())

    assert text
    assert bool(packed_steps) == expected


def test_quotations_stay_exact(qwen_folder, packed_steps):
    backend = load_transformers(str(qwen_folder), quantize="int8", pool=ModelPool())
    chat = backend._chat
    mark = chat.tokenizer.convert_tokens_to_ids('"')

    def prefer(_module: Any, _inputs: Any, scores: torch.Tensor) -> torch.Tensor:
        scores[..., mark] += 5
        return scores

    hook = chat.model.lm_head.register_forward_hook(prefer)
    sampling = Sampling(max_new_tokens=60, seed=1, exact_quotations=True)
    turn = backend.open([Message("user", ("my boss shouted",))], sampling, threading.Event())
    text = "".join(turn.generate())
    hook.remove()

    assert packed_steps
    quotations = re.findall(r'"([^"]*)"', text)
    assert quotations
    assert all(quotation.strip(" .,!?") in "my boss shouted" for quotation in quotations)
