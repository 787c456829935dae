"""The encoder stage: from a teacher and corpora to a loadable encoder and its metrics."""

import json

import numpy as np
import pytest

from compeer_core.encoder import load_encoder
from compeer_core.errors import ConfigError
from tests.sentence_models import build_sentence_bert
from training.common import results
from training.common.interrupts import StopRequest
from training.encoder import distil
from training.encoder.distil import Config
from training.encoder.teacher import EmbeddingCache, Teacher
from training.stages import StoppedEarly

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def small_teacher(tmp_path_factory, small_corpora):
    """A one-layer BERT with word pieces trained on the small corpora."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    from training.data.corpus import Source, SourceKind, read_documents

    source = Source(path="esconv/train.txt.gz", kind=SourceKind.ESCONV)
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces.train_from_iterator(
        read_documents(small_corpora, source),
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    vocabulary = sorted(pieces.get_vocab().items(), key=lambda item: item[1])
    words = [word for word, _ in vocabulary]
    return build_sentence_bert(tmp_path_factory.mktemp("teacher"), words, width=16)


@pytest.fixture
def config(small_corpora, small_teacher, tmp_path):
    return Config(
        data_dir=small_corpora,
        output=tmp_path / "run",
        sources=({"path": "esconv/train.txt.gz", "kind": "esconv"},),
        validation="esconv/valid.txt.gz",
        test="esconv/test.txt.gz",
        teacher=str(small_teacher),
        dimension=8,
        training={"epochs": 3, "batch_size": 16},
        pairs=200,
        timed_texts=8,
        timed_rounds=2,
        results=tmp_path / "results",
    )


def test_stage_writes_an_encoder_and_its_metrics(config):
    distil.run(config)

    encoder = load_encoder(config.output / "encoder")
    assert encoder.encode(["I hear you."]).shape == (1, 8)
    result = results.load(config.results / "encoder.json")
    metrics = {metric.name: metric for metric in result.metrics}
    shipped = metrics["Spearman with the teacher, replies of different dialogues: shipped"]
    assert shipped.low <= shipped.value <= shipped.high
    assert shipped.n == 200
    assert metrics["Size on disk"].value < 8
    rows = [json.loads(line) for line in (config.output / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_dry_run_writes_nothing(config):
    distil.run(config, dry_run=True)

    assert not config.output.exists()


def test_interrupted_run_resumes_to_the_same_table(config, monkeypatch):
    distil.run(config)
    expected = (config.output / "encoder" / "model.safetensors").read_bytes()
    again = config.model_copy(update={"output": config.output.with_name("again")})

    with monkeypatch.context() as context:
        context.setattr(StopRequest, "__enter__", _already_requested)
        with pytest.raises(StoppedEarly, match="resume with --resume"):
            distil.run(again)
    distil.run(again, resume=again.output)

    assert (again.output / "encoder" / "model.safetensors").read_bytes() == expected


def _already_requested(self):
    self.requested = True
    return self


def test_cache_reuses_embeddings_and_repairs_truncated_files(tmp_path, small_teacher):
    teacher = Teacher(str(small_teacher))
    cache = EmbeddingCache(tmp_path, teacher)
    first = cache.embeddings(["I hear you.", "Rest well."], StopRequest())
    # a crash in the middle of a chunk: an incomplete line and vector
    with (tmp_path / "vectors.f16").open("ab") as file:
        file.write(b"x" * 5)
    with (tmp_path / "texts.jsonl").open("a", encoding="utf-8") as file:
        file.write('"half a')

    encoded = []
    encode = teacher.encode
    teacher.encode = lambda texts: encoded.extend(texts) or encode(texts)
    second = cache.embeddings(["Rest well.", "How are you?", "I hear you."], StopRequest())

    assert encoded == ["How are you?"]
    assert (second[[2, 0]] == first).all()
    assert second[1] == pytest.approx(encode(["How are you?"])[0], abs=1e-3)


def test_rejects_the_cache_of_another_teacher(tmp_path, small_teacher):
    teacher = Teacher(str(small_teacher))
    EmbeddingCache(tmp_path, teacher)
    teacher.name = "another"

    with pytest.raises(ConfigError, match="another teacher"):
        EmbeddingCache(tmp_path, teacher)


def test_single_pieces_are_encoded_with_special_tokens(small_teacher):
    teacher = Teacher(str(small_teacher))
    tokenizer = teacher.model.tokenizer
    name = tokenizer.convert_ids_to_tokens(30)

    pieces = teacher.encode_pieces(40)

    assert pieces.shape == (40, 16)
    if tokenizer.tokenize(name) == [name]:
        own = pieces[30] / np.linalg.norm(pieces[30])
        assert own == pytest.approx(teacher.encode([name])[0], abs=1e-4)


def test_rejects_an_encoder_above_the_size_limit(config, monkeypatch):
    monkeypatch.setattr(distil, "LARGEST", 1000)

    with pytest.raises(ConfigError, match="choose a smaller dimension"):
        distil.run(config)
