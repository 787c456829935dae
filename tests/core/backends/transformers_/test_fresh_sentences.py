"""A reply says no short sentence twice: by hand, then for any model."""

import re
import threading
import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.batch_generation import Prompt, generate_turns
from compeer_core.backends.transformers_.exact_quotations import TokenTexts
from compeer_core.backends.transformers_.fresh_sentences import FreshSentences
from tests.core.backends.transformers_.test_exact_quotations import byte_level

EARLIER = ["You lost it. That must hurt.", "What happened?"]
TOKENIZER = byte_level(*EARLIER, "<reply>It is gone. That must hurt so much!</reply>")
VOCABULARY = TokenTexts("tiny", TOKENIZER)
ENDINGS = {VOCABULARY.texts[token] for token in VOCABULARY.ending.tolist()}


def forbidden_after(text: str, earlier: list[str] = EARLIER) -> set[str]:
    """The texts of the tokens that may not follow a generated text."""
    constraint = FreshSentences(VOCABULARY, earlier)
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        constraint.push(token)
    scores = torch.zeros(len(TOKENIZER))
    constraint.mask(scores)
    return {VOCABULARY.texts[token] for token in (scores < 0).nonzero().flatten().tolist()}


def test_a_sentence_of_an_earlier_reply_may_not_end_again_by_hand():
    assert {".", "!", "</reply>"} <= ENDINGS and "a" not in ENDINGS
    assert forbidden_after("<reply>It is gone. That must hurt") == ENDINGS
    assert forbidden_after("<reply>that MUST hurt") == ENDINGS
    assert forbidden_after("<reply>What  happened") == ENDINGS
    for free in ("<reply>That must", "<reply>That must hurt so", "<reply>It is gone", "<reply>"):
        assert forbidden_after(free) == set()


def test_a_reply_does_not_repeat_its_own_sentence_either():
    assert forbidden_after("<reply>It is gone. It is gone", []) == ENDINGS
    assert forbidden_after("<reply>It is gone. It is", []) == set()


def test_steps_and_long_sentences_are_free():
    assert forbidden_after("<history>That must hurt") == set()
    long = "You have worked there for two years and six months"
    assert forbidden_after(f"<reply>{long}", [f"{long}."]) == set()


def test_long_replies_of_a_caller_are_read_in_linear_time():
    begin = time.perf_counter()
    FreshSentences(VOCABULARY, ["a" + " -" * 100_000 + "a"] * 5)
    assert time.perf_counter() - begin < 2  # quadratic time would take minutes


def test_words_that_a_person_wrote_count_as_said():
    constraint = FreshSentences(VOCABULARY, [])
    constraint.write("<reply>I am here. I am here")
    scores = torch.zeros(len(TOKENIZER))

    constraint.mask(scores)

    assert scores[TOKENIZER.convert_tokens_to_ids(".")] == -torch.inf


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), words=st.lists(st.sampled_from("abc"), min_size=1, max_size=2))
def test_whatever_a_model_prefers_no_short_sentence_comes_back(seed, words):
    earlier = [" ".join(words) + "."]
    generator = torch.Generator().manual_seed(seed)
    likely = TOKENIZER.convert_tokens_to_ids(["a", "b", "c", "Ġ", ".", "!"])
    constraint = FreshSentences(VOCABULARY, earlier)
    constraint.write("<reply>")
    text = ""
    for _ in range(60):
        scores = torch.full((len(TOKENIZER),), -50.0)
        scores[likely] = torch.randn(len(likely), generator=generator)
        constraint.mask(scores)
        token = int(scores.argmax())
        assert scores[token] > -torch.inf  # something may always follow
        constraint.push(token)
        text += VOCABULARY.texts[token]

    sentences = [" ".join(s.split()) for s in re.split(r"[.!]", earlier[0] + text)[:-1]]
    short = [s for s in sentences if s and len(s.split()) <= 8]
    assert len(short) == len({*short})


def test_turns_of_a_batch_have_the_constraint(qwen, monkeypatch):
    chat = qwen._chat
    asked: list[list[str]] = []
    begin = FreshSentences.__init__

    def spy(self, vocabulary, replies):
        asked.append(list(replies))
        begin(self, vocabulary, replies)

    monkeypatch.setattr(FreshSentences, "__init__", spy)
    messages = [Message("user", ("a",)), Message("assistant", ("b.",)), Message("user", ("c",))]
    sampling = Sampling(max_new_tokens=2, fresh_sentences=True)

    chat.owner.call(
        lambda: generate_turns(chat, None, [Prompt(messages, (1, 2))], sampling, threading.Event())
    )

    assert asked == [["b."], ["b."]]
