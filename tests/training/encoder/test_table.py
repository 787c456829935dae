"""The embedding table: raw distillation, mapping, training, pruning, quantisation."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from compeer_core.encoder import load_encoder
from training.encoder.table import (
    Bags,
    Training,
    mapped_table,
    prune_vocabulary,
    quantise,
    raw_table,
    save,
    token_ids,
    train_table,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def word_pieces() -> Tokenizer:
    letters = [*"adest", *(f"##{letter}" for letter in "adest")]
    words = ["[PAD]", "[UNK]", "[CLS]", *letters, "sad", "seat", "##ed", "tea"]
    tokenizer = Tokenizer(
        models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[CLS]"])
    return tokenizer


def test_frequent_pieces_have_lower_weights():
    rng = np.random.default_rng(0)
    pieces = rng.normal(size=(500, 6)).astype(np.float32)

    raw = raw_table(pieces, 6)

    # a full PCA is a rotation, which keeps lengths; the weight is SIF / (SIF + p)
    share = 1 / np.arange(2, 502)
    expected = 1e-4 / (1e-4 + share / share.sum())
    actual = np.linalg.norm(raw, axis=1) / np.linalg.norm(pieces - pieces.mean(axis=0), axis=1)
    assert actual == pytest.approx(expected, rel=1e-3)


def test_mapping_reproduces_a_linear_teacher():
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(30, 5)).astype(np.float32)
    rows = [rng.integers(30, size=rng.integers(1, 9)).tolist() for _ in range(200)]
    means = np.stack([raw[row].mean(axis=0) for row in rows])
    targets = (means @ rng.normal(size=(5, 4)) + rng.normal(size=4)).astype(np.float32)

    table = mapped_table(raw, rows, targets, dimension=4)

    ours = np.stack([table[row].mean(axis=0) for row in rows])
    assert ours @ ours.T == pytest.approx(targets @ targets.T, abs=1e-2)


def test_training_lowers_the_loss_reproducibly():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(40, 8))
    rows = [rng.integers(40, size=rng.integers(2, 9)).tolist() for _ in range(256)]
    targets = np.stack([truth[row].mean(axis=0) for row in rows])
    targets = (targets / np.linalg.norm(targets, axis=1, keepdims=True)).astype(np.float32)
    start = rng.normal(size=(40, 8)).astype(np.float32)
    settings = Training(epochs=5, batch_size=64, lr=0.3, dropped=0.1)

    first = list(train_table(start, rows, targets, settings, seed=3))
    again = list(train_table(start, rows, targets, settings, seed=3))

    losses = [loss for _, loss, _ in first]
    assert losses[-1] < 0.5 * losses[0]
    assert (first[-1][2] == again[-1][2]).all()
    assert [epoch for epoch, _, _ in first] == [1, 2, 3, 4, 5]


def test_pruned_words_are_spelt_with_letters():
    full = word_pieces()
    texts = ["sad tea", "sad seat"]

    small, remaining = prune_vocabulary(full, token_ids(full, texts), least=2)

    assert "sad" in small.get_vocab()
    assert not {"tea", "seat", "[CLS]", "[PAD]"} & small.get_vocab().keys()
    assert small.encode("tea", add_special_tokens=False).tokens == ["t", "##e", "##a"]
    names = full.get_vocab()
    assert remaining == [
        names[name] for name, _ in sorted(small.get_vocab().items(), key=lambda i: i[1])
    ]


def test_quantisation_error_is_at_most_half_a_step():
    table = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)

    small = quantise(table)

    back = small["embeddings"].astype(np.float32) * small["weights"][:, None]
    assert (abs(back - table).max(axis=1) <= 0.5001 * abs(table).max(axis=1) / 127).all()


def test_saved_encoder_loads_here_and_in_sentence_transformers(tmp_path):
    from sentence_transformers import SentenceTransformer

    tokenizer, remaining = prune_vocabulary(word_pieces(), [], least=0)
    table = np.random.default_rng(0).normal(size=(len(remaining), 4)).astype(np.float32)
    texts = ["sad tea", "seated"]

    save(tmp_path / "encoder", tokenizer, table)

    ours = load_encoder(tmp_path / "encoder").encode(texts)
    theirs = SentenceTransformer(str(tmp_path / "encoder"), device="cpu").encode(texts)
    assert ours / 2 == pytest.approx(theirs, abs=1e-5)  # sums and means of two pieces
    expected = Bags.of(token_ids(tokenizer, texts)).mean(torch.from_numpy(table))
    assert theirs == pytest.approx(expected.numpy(), abs=0.02)
