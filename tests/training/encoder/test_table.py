"""From pieces of words to a table that is small and compares texts as its teacher does."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from compeer_core.encoder import load_encoder
from training.encoder.table import (
    Bags,
    Training,
    fewer_pieces,
    ids_of,
    mapped_table,
    quantised,
    raw_table,
    save,
    trained,
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


def test_frequent_pieces_weigh_less():
    rng = np.random.default_rng(0)
    pieces = rng.normal(size=(500, 6)).astype(np.float32)

    raw = raw_table(pieces, 6)

    # What principal components turn keeps its length; the weight is SIF / (SIF + p).
    share = 1 / np.arange(2, 502)
    expected = 1e-4 / (1e-4 + share / share.sum())
    found = np.linalg.norm(raw, axis=1) / np.linalg.norm(pieces - pieces.mean(axis=0), axis=1)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_linear_teacher_is_matched_by_the_map_alone():
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(30, 5)).astype(np.float32)
    rows = [rng.integers(30, size=rng.integers(1, 9)).tolist() for _ in range(200)]
    means = np.stack([raw[row].mean(axis=0) for row in rows])
    targets = (means @ rng.normal(size=(5, 4)) + rng.normal(size=4)).astype(np.float32)

    table = mapped_table(raw, rows, targets, dimension=4)

    ours = np.stack([table[row].mean(axis=0) for row in rows])
    assert ours @ ours.T == pytest.approx(targets @ targets.T, abs=1e-2)


def test_training_lowers_the_loss_and_the_seed_decides_it():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(40, 8))
    rows = [rng.integers(40, size=rng.integers(2, 9)).tolist() for _ in range(256)]
    targets = np.stack([truth[row].mean(axis=0) for row in rows])
    targets = (targets / np.linalg.norm(targets, axis=1, keepdims=True)).astype(np.float32)
    start = rng.normal(size=(40, 8)).astype(np.float32)
    how = Training(epochs=5, batch_size=64, lr=0.3, dropped=0.1)

    first = list(trained(start, rows, targets, how, seed=3))
    again = list(trained(start, rows, targets, how, seed=3))

    losses = [loss for _, loss, _ in first]
    assert losses[-1] < 0.5 * losses[0]
    assert (first[-1][2] == again[-1][2]).all()
    assert [epoch for epoch, _, _ in first] == [1, 2, 3, 4, 5]


def test_a_piece_that_no_text_has_goes_and_its_word_is_spelt():
    full = word_pieces()
    texts = ["sad tea", "sad seat"]

    small, kept = fewer_pieces(full, ids_of(full, texts), least=2)

    assert "sad" in small.get_vocab()
    assert not {"tea", "seat", "[CLS]", "[PAD]"} & small.get_vocab().keys()
    assert small.encode("tea", add_special_tokens=False).tokens == ["t", "##e", "##a"]
    names = full.get_vocab()
    assert kept == [
        names[name] for name, _ in sorted(small.get_vocab().items(), key=lambda i: i[1])
    ]


def test_eight_bits_keep_a_row_to_a_half_step():
    table = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)

    small = quantised(table)

    back = small["embeddings"].astype(np.float32) * small["weights"][:, None]
    assert (abs(back - table).max(axis=1) <= 0.5001 * abs(table).max(axis=1) / 127).all()


def test_what_is_saved_is_read_here_and_by_sentence_transformers(tmp_path):
    from sentence_transformers import SentenceTransformer

    tokenizer, kept = fewer_pieces(word_pieces(), [], least=0)
    table = np.random.default_rng(0).normal(size=(len(kept), 4)).astype(np.float32)
    texts = ["sad tea", "seated"]

    save(tmp_path / "encoder", tokenizer, table)

    ours = load_encoder(tmp_path / "encoder").encode(texts)
    theirs = SentenceTransformer(str(tmp_path / "encoder"), device="cpu").encode(texts)
    assert ours / 2 == pytest.approx(theirs, abs=1e-5)  # sums and means of two pieces
    expected = Bags.of(ids_of(tokenizer, texts)).mean(torch.from_numpy(table))
    assert theirs == pytest.approx(expected.numpy(), abs=0.02)
