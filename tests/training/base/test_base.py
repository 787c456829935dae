"""The base from a GGUF file: equal hidden states, equal tokens, and clear errors."""

import gzip
import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from compeer_core.backends.transformers_ import packed_weights
from compeer_core.backends.transformers_.packed_weights import load_model, packed_rows, unpacked
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.model_pool import ModelPool, load_label_scorer
from compeer_core.reasoning import TAGS
from tests.training.base.tiny_gguf import (
    LACKING,
    MERGES,
    SPECIAL,
    TOKENS,
    TinyLlama,
    write_tiny_gguf,
)
from training.base import build
from training.base.gguf_file import read_gguf, sha256_of
from training.base.vocabulary import (
    Vocabulary,
    build_tokenizer,
    count_tokens,
    cut_vocabulary,
    shipped_tokenizer,
)
from training.data.corpus import Source, SourceKind
from training.finetune.chat_tokens import VERDICT_WORDS

WHOLE = Vocabulary(TOKENS[len(SPECIAL) :], MERGES)
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> TinyLlama:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def config(llama, small_corpora, tmp_path_factory) -> build.Config:
    folder = tmp_path_factory.mktemp("base")
    written = folder / "written.jsonl.gz"
    turns = [{"role": "user", "text": "hello"}, {"role": "assistant", "reply": "Hello world"}]
    with gzip.open(written, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"id": "a", "situation": "b", "turns": turns}) + "\n")
    return build.Config(
        gguf=llama.path,
        data_dir=small_corpora,
        sources=(Source(path="esconv/train.txt.gz", kind=SourceKind.ESCONV),),
        written=(written,),
        output=folder / "model",
        vocabulary_size=265,
        max_position_embeddings=256,
        image_side=56,
    )


@pytest.fixture(scope="module")
def base(config) -> Path:
    build.run(config)
    return config.output


def test_unpacks_a_q4_1_block_by_hand():
    # scale 0.5, minimum -1; the first byte holds weights 0 (low bits, 3) and 16 (high bits, 10)
    block = np.zeros(20, dtype=np.uint8)
    block[:4] = np.array([0.5, -1], dtype=np.float16).view(np.uint8)
    block[4] = 10 * 16 + 3

    values = unpacked(torch.from_numpy(block)[None], "q4_1")

    assert values.shape == (1, 32)
    assert values[0, [0, 1, 16, 31]].tolist() == [0.5, -1, 4, -1]


@pytest.mark.parametrize(("kind", "theirs"), [("q4_1", Kind.Q4_1), ("q8_0", Kind.Q8_0)])
def test_unpacks_blocks_as_gguf_does(kind, theirs):
    values = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
    blocks = gguf.quants.quantize(values, theirs)

    assert (
        unpacked(torch.from_numpy(blocks), kind).numpy() == gguf.quants.dequantize(blocks, theirs)
    ).all()


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_packing_error_is_at_most_half_a_step(seed, scale):
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * scale
    blocks = packed_rows(values)
    again = unpacked(blocks, "q8_0")

    assert blocks.shape == (3, 68)
    largest = values.view(3, 2, 32).abs().amax(-1, keepdim=True)
    assert ((again - values).view(3, 2, 32).abs() <= largest / 127 * 0.51 + largest / 1000).all()


def test_zero_block_stays_zero():
    assert unpacked(packed_rows(torch.zeros(1, 32)), "q8_0").eq(0).all()


def test_rejects_incomplete_blocks():
    with pytest.raises(ValueError, match="rows of 33 bytes are not whole blocks of 34"):
        unpacked(torch.zeros(2, 33, dtype=torch.uint8), "q8_0")


def test_hidden_states_equal_those_of_the_llama(llama, base, config):
    model = load_model(base, torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    text = "<|im_start|>user\nhello world<|im_end|>\n"
    ours = tokenizer(text, return_tensors="pt")["input_ids"]
    theirs = torch.tensor([[TOKENS.index(t) for t in tokenizer.convert_ids_to_tokens(ours[0])]])
    with torch.no_grad():
        actual = model(input_ids=ours, output_hidden_states=True).hidden_states
        expected = llama.model(input_ids=theirs, output_hidden_states=True).hidden_states

    assert len(actual) == len(expected) == 3
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_matrices_keep_the_blocks_of_the_gguf(llama, base):
    packed = packed_weights.read_packed(base)
    name = "model.language_model.layers.1.mlp.down_proj.weight"

    blocks = gguf.GGUFReader(llama.path).tensors
    theirs = next(t.data for t in blocks if t.name == "blk.1.ffn_down.weight")
    assert (packed[f"{name}:q4_1"].numpy() == theirs).all()
    assert name not in packed


def test_tags_and_verdict_words_are_single_tokens(base):
    tokenizer = AutoTokenizer.from_pretrained(base)

    for word in (*TAGS, *VERDICT_WORDS):
        assert len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1, word
    scorer = load_label_scorer(str(base), pool=ModelPool())
    scorer.check_labels(VERDICT_WORDS)
    scorer.close()


def test_some_hidden_state_makes_each_tag_most_likely(base):
    """If a row were the mean of others, its logit could never exceed all of theirs."""
    rows = load_model(base, torch.float32).get_input_embeddings().weight.detach()
    tokenizer = AutoTokenizer.from_pretrained(base)
    for tag in TAGS:
        row = rows[tokenizer.convert_tokens_to_ids(tag)]
        # for a hidden state along the row, no other token has a larger logit
        assert (rows @ row).argmax() == tokenizer.convert_tokens_to_ids(tag), tag


def test_new_row_by_hand():
    row = build.new_row(torch.tensor([2.0, 0.0]), torch.tensor(3.0), torch.Generator())

    assert row[0].item() == pytest.approx(3 * math.sqrt(0.5))
    assert row[1].abs().item() == pytest.approx(3 * math.sqrt(0.5))


@many
@given(text=st.text(max_size=40))
def test_tokenizer_round_trips_any_text(base, text):
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token(base):
    vocabulary = AutoTokenizer.from_pretrained(base).get_vocab()

    assert LACKING in vocabulary
    assert len({t for t in vocabulary if len(t) == 1}) == 256


def test_cut_keeps_used_tokens_and_their_ancestors():
    full = build_tokenizer(WHOLE)
    uses = count_tokens(full, ["hello hello", " world"])
    assert uses["hello"] == 2
    small = cut_vocabulary(WHOLE, {"hello": 5, "Tr": 1}, ["True"], 256 + 7)

    assert {"hello", "hell", "he", "ll", "True", "Tr", "ue"} <= {*small.tokens}
    assert len(small.tokens) == 256 + 7
    assert [m for m in small.merges if m.startswith("<")] == []
    assert build_tokenizer(small).encode("hello").tokens == ["hello"]


def test_rejects_a_size_below_the_number_of_bytes():
    with pytest.raises(ConfigError, match="at least 259 tokens, got 100"):
        cut_vocabulary(WHOLE, {}, ["True"], 100)


def test_special_tokens_come_first(base):
    tokenizer = shipped_tokenizer(WHOLE, 99)

    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == list(SPECIAL[:3])
    assert tokenizer.eos_token == "<|im_end|>"
    assert "<repo_name>" not in AutoTokenizer.from_pretrained(base).get_vocab()


def test_reports_invalid_gguf_files(tmp_path, config, llama):
    def error_of(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            read_gguf(path)
        return str(caught.value)

    assert "no such file" in error_of(tmp_path / "none.gguf")
    cut_short = tmp_path / "cut.gguf"
    cut_short.write_bytes(llama.path.read_bytes()[:20_000])
    assert "truncated" in error_of(cut_short)
    other = tmp_path / "text.gguf"
    other.write_text("hello" * 100)
    assert "cannot be read as GGUF" in error_of(other)
    assert "contains a gemma" in error_of(
        write_tiny_gguf(tmp_path / "b.gguf", architecture="gemma").path
    )
    assert "gpt2/qwen2" in error_of(write_tiny_gguf(tmp_path / "c.gguf", pre="qwen2").path)
    assert "is stored as Q5_0" in error_of(
        write_tiny_gguf(tmp_path / "d.gguf", matrices=Kind.Q5_0).path
    )
    with pytest.raises(CheckpointError, match=f"{sha256_of(llama.path)}, not 00"):
        build.run(config.model_copy(update={"sha256": "00"}))


def test_reports_a_truncated_packed_file(base, tmp_path):
    folder = tmp_path / "cut"
    folder.mkdir()
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    whole = (base / packed_weights.PACKED).read_bytes()
    (folder / packed_weights.PACKED).write_bytes(whole[:-100])

    with pytest.raises(CheckpointError, match=r"packed\.safetensors is truncated"):
        load_label_scorer(str(folder), pool=ModelPool())
