"""COMPEER-nano's tokenizer: single tokens, and lossless round trips."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compeer_core.errors import ConfigError
from compeer_core.reasoning import TAGS, read
from training.data.corpus import Source, SourceKind
from training.finetune.chat_tokens import SPECIAL_TOKENS, VERDICT_WORDS, label_lines
from training.nano import tokenizer as stage
from training.nano.tokenizer import train_tokenizer

ONE_TOKEN = (*TAGS, *VERDICT_WORDS)
OPENING = "<|im_start|>assistant\n"

# the session fixture is read-only
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
texts = st.text() | st.lists(
    st.sampled_from(
        [*ONE_TOKEN, *SPECIAL_TOKENS, " ", "\n", "a", "7", "True", "\u00e9", "\U0001f614"]
    )
    | st.text(max_size=3)
).map("".join)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("word", ONE_TOKEN)
def test_tags_and_verdicts_are_single_tokens_alone_and_in_a_chat(tokenizer, word):
    token = tokenizer.get_vocab()[word]

    assert ids(tokenizer, word) == [token]
    assert ids(tokenizer, f"{OPENING}{word}<|im_end|>\n") == [
        *ids(tokenizer, OPENING),
        token,
        *ids(tokenizer, "<|im_end|>\n"),
    ]


def test_answer_follows_the_generation_prompt(tokenizer):
    question = [{"role": "user", "content": "True or False?"}]
    answer = [*question, {"role": "assistant", "content": [{"type": "text", "text": "False"}]}]

    def rendered(messages, *, prompt):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return ids(tokenizer, text)

    prompt = rendered(question, prompt=True)
    whole = rendered(answer, prompt=False)
    assert whole[: len(prompt)] == prompt
    assert whole[len(prompt)] == tokenizer.get_vocab()["False"]
    assert whole[len(prompt) + 1] == tokenizer.eos_token_id


def test_verdict_words_match_whole_words_only(tokenizer):
    # such as "First" in "Firstly"
    for text in ("Firstly", "Bothered", "xTrue"):
        assert not {tokenizer.get_vocab()[word] for word in VERDICT_WORDS} & {*ids(tokenizer, text)}


def test_image_blocks_keep_their_position(tokenizer):
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]

    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)

    assert text == ("<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n")


@many
@given(texts)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == text


@many
@given(texts)
def test_token_ids_are_within_the_vocabulary(tokenizer, text):
    assert all(0 <= token < len(tokenizer) for token in ids(tokenizer, text))


def test_vocabulary_has_the_requested_size(tokenizer):
    assert len(tokenizer) == 600
    assert {*SPECIAL_TOKENS, *ONE_TOKEN} <= tokenizer.get_vocab().keys()
    assert max(tokenizer.get_vocab().values()) == 599


def test_tags_are_kept_when_special_tokens_are_skipped(tokenizer):
    # as trl decodes before it calls a reward function
    completion = "<history>a\nStage: Action</history>\n<reply>b</reply><|im_end|>"

    decoded = tokenizer.decode(ids(tokenizer, completion), skip_special_tokens=True)

    assert decoded == completion.removesuffix("<|im_end|>")
    assert read(decoded).reply == "b"


def test_rejects_a_vocabulary_that_is_too_small():
    # 256 bytes, 8 tags, 6 verdict words, 7 special tokens
    with pytest.raises(ConfigError, match="at least 277, got 276"):
        train_tokenizer(["a"], 276, 64)
    assert len(train_tokenizer(["a"], 277, 64)) == 277


def test_label_lines_contain_every_label_once():
    lines = label_lines()

    assert len(lines) == len({*lines}) == 5 + 3 + 3 + 13 + 8
    assert {"Intensity: 5", "Stage: Action", "Strategy: Self-disclosure"} <= {*lines}


def test_stage_saves_the_tokenizer(small_corpora, tmp_path):
    from transformers import AutoTokenizer

    config = stage.Config(
        data_dir=small_corpora,
        output=tmp_path / "tokenizer",
        sources=(Source(path="esconv/valid.txt.gz", kind=SourceKind.ESCONV),),
        vocabulary_size=400,
        max_position_embeddings=99,
        label_repeats=3,
    )

    stage.run(config, dry_run=True)
    assert not config.output.exists()
    stage.run(config)

    loaded = AutoTokenizer.from_pretrained(config.output)
    assert (len(loaded), loaded.model_max_length) == (400, 99)
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert [ids(loaded, word) for word in ONE_TOKEN] == [
        [loaded.get_vocab()[word]] for word in ONE_TOKEN
    ]
    question = [{"role": "user", "content": "Hi"}]
    assert loaded.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>user\nHi<|im_end|>\n{OPENING}"
    )
    assert loaded.decode(ids(loaded, "don't , stop .")) == "don't , stop ."
    with pytest.raises(ConfigError, match="cannot be resumed"):
        stage.run(config, resume=config.output)
