"""Quotations of a turn are exact by construction: by hand, then for any model."""

import itertools
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.backends.transformers_.batch_generation import Prompt, generate_turns
from compeer_core.backends.transformers_.exact_quotations import ExactQuotations, TokenTexts
from compeer_core.errors import ConfigError

MESSAGES = ["my boss shouted at me", 'he said "go", and\ni cried 😢 all day']


def byte_level(*texts: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<reply>", "</reply>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([*texts] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_level(*MESSAGES, 'They say "my boss" and "".')
VOCABULARY = TokenTexts("tiny", TOKENIZER)


def allowed_after(text: str, messages: list[str] = MESSAGES) -> set[str]:
    """The texts of the tokens that may follow a generated text."""
    constraint = ExactQuotations(VOCABULARY, messages)
    for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]:
        constraint.push(token)
    scores = torch.zeros(len(TOKENIZER))
    constraint.mask(scores)
    return {VOCABULARY.texts[token] for token in (scores == 0).nonzero().flatten().tolist()}


def test_a_quotation_continues_a_message_and_ends_at_a_word_by_hand():
    assert {"m", "my", "h", "i"} <= allowed_after('They say "')
    assert not {"y", " ", '"', "T"} & allowed_after('They say "')  # only from the start of a word
    assert allowed_after('They say "my bos') == {"s"}
    after_a_word = allowed_after('They say "my boss')
    assert {" ", '"'} <= after_a_word and not {"s", ".", "e"} & after_a_word
    assert '"' not in allowed_after('They say "my ')  # closes after a space only if no word follows
    assert {"a", '"'} <= allowed_after('They say "my boss" and', MESSAGES)


def test_the_reply_and_written_text_are_free():
    everything = set(VOCABULARY.texts)
    assert allowed_after('<reply>You could say "') == everything

    constraint = ExactQuotations(VOCABULARY, MESSAGES)
    constraint.write('The user edits: "anything')
    scores = torch.zeros(len(TOKENIZER))
    constraint.mask(scores)
    assert scores[TOKENIZER.convert_tokens_to_ids("z")] == 0


def test_without_words_to_quote_no_quotation_begins():
    assert not any('"' in text for text in allowed_after("They say ", ["", '"\n']))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), messages=st.lists(st.text(max_size=30), max_size=3))
def test_whatever_a_model_prefers_its_quotations_are_exact(seed, messages):
    messages = [*messages, "the dog is ill"]
    generator = torch.Generator().manual_seed(seed)
    constraint = ExactQuotations(VOCABULARY, messages)
    mark = TOKENIZER.convert_tokens_to_ids('"')
    text = ""
    for step in range(60):
        scores = torch.randn(len(TOKENIZER), generator=generator)
        scores[mark] += 3 * (step % 3 == 0)  # quotes often
        constraint.mask(scores)
        token = int(scores.argmax())
        assert scores[token] > -torch.inf  # something may always follow
        constraint.push(token)
        text += VOCABULARY.texts[token]

    quotable = "\n".join(messages)
    steps = text.partition("<reply>")[0]
    for quotation in re.findall(r'"([^"]*)"', steps):
        assert quotation.strip(" .,!?") in quotable
        assert quotation.strip()


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="tiny: exact_quotations and fresh_sentences need a byte"):
        TokenTexts("tiny", PreTrainedTokenizerFast(tokenizer_object=words))


@pytest.fixture
def quoting(qwen):
    """The tiny model, which begins and ends a quotation whenever it may, at every other token."""
    chat = qwen._chat
    mark = chat.tokenizer.convert_tokens_to_ids('"')
    turns = itertools.count()

    def prefer(_module, _inputs, logits):
        if next(turns) % 2 == 0:
            logits[..., mark] += 100
        return logits

    hook = chat.model.lm_head.register_forward_hook(prefer)
    yield qwen
    hook.remove()


def quotations(text: str) -> list[str]:
    return re.findall(r'"([^"]*)"', text)


def test_turns_of_the_demo_and_of_batches_quote_the_user_only(quoting):
    messages = [
        Message("system", ("Quote nobody.",)),
        Message("user", ("my boss shouted at me",)),
        Message("assistant", ("that is sad",)),
        Message("user", ("and then he left",)),
    ]
    sampling = Sampling(max_new_tokens=60, seed=1, exact_quotations=True)
    alone = quoting.open(messages, sampling, threading.Event())
    text = "".join(alone.generate())
    alone.close()
    chat = quoting._chat
    prompts = [Prompt(messages, (1, 2)), Prompt(messages[:2], (3,))]
    batch = chat.owner.call(
        lambda: generate_turns(chat, None, prompts, sampling, threading.Event())
    )

    users = "my boss shouted at me\nand then he left"
    for of_prompt, quotable in (([text], users), ([t.text for t in batch[0]], users)):
        assert all(quotations(turn) for turn in of_prompt)
        assert all(q.strip() in quotable for turn in of_prompt for q in quotations(turn))
    assert all(q.strip() in "my boss shouted at me" for q in quotations(batch[1][0].text))
    free = chat.owner.call(
        lambda: generate_turns(
            chat, None, prompts, replace(sampling, exact_quotations=False), threading.Event()
        )
    )
    assert any(q.strip() not in users for turn in free[0] for q in quotations(turn.text))


def test_text_that_the_user_writes_into_a_turn_is_not_constrained(quoting):
    sampling = Sampling(max_new_tokens=40, seed=1, exact_quotations=True)
    turn = quoting.open([Message("user", ("my dog",))], sampling, threading.Event())
    turn.write('They say "anything at all" and ')
    text = "".join(turn.generate())
    turn.close()

    assert quotations(text)
    assert all(q.strip() in "my dog" for q in quotations(text))


def test_a_long_conversation_does_not_slow_a_token_down():
    # what 8,000 tokens may hold, all of it repeated: a search finds every place
    constraint = ExactQuotations(VOCABULARY, ["a " * 4000] * 8)
    scores = torch.zeros(len(TOKENIZER))
    slowest = 0.0
    for character in '"a a a':
        constraint.push(TOKENIZER.convert_tokens_to_ids("Ġ" if character == " " else character))
        start = time.perf_counter()
        constraint.mask(scores.clone())
        slowest = max(slowest, time.perf_counter() - start)

    assert slowest < 0.2
