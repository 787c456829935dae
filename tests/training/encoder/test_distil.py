"""The stage: from a teacher and corpora to a folder that loads, and numbers."""

import json

import numpy as np
import pytest

from compeer_core.encoder import load_encoder
from compeer_core.errors import ConfigError
from training.common import results
from training.common.interrupts import StopRequest
from training.encoder import distil
from training.encoder.distil import Config
from training.encoder.teacher import Memory, Teacher
from training.stages import StoppedEarly

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def small_teacher(tmp_path_factory, small_corpora):
    """A BERT of one layer whose word pieces are learnt from the small corpora."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, BertTokenizerFast

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
    base = tmp_path_factory.mktemp("bert")
    vocabulary = sorted(pieces.get_vocab().items(), key=lambda item: item[1])
    (base / "vocab.txt").write_text("\n".join(word for word, _ in vocabulary), encoding="utf-8")
    BertTokenizerFast(str(base / "vocab.txt")).save_pretrained(base)
    shape = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    BertModel(shape).save_pretrained(base)
    whole = tmp_path_factory.mktemp("teacher")
    SentenceTransformer(modules=[Transformer(str(base)), Pooling(16)], device="cpu").save(
        str(whole)
    )
    return whole


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


def test_the_stage_writes_an_encoder_and_its_numbers(config):
    distil.run(config)

    encoder = load_encoder(config.output / "encoder")
    assert encoder.encode(["I hear you."]).shape == (1, 8)
    found = {one.name: one for one in results.load(config.results / "encoder.json").metrics}
    shipped = found["Spearman with the teacher, replies of different dialogues: shipped"]
    assert shipped.low <= shipped.value <= shipped.high
    assert shipped.n == 200
    assert found["Size on disk"].value < 8
    rows = [json.loads(line) for line in (config.output / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_a_dry_run_writes_nothing(config):
    distil.run(config, dry_run=True)

    assert not config.output.exists()


def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_table(config, monkeypatch):
    distil.run(config)
    whole = (config.output / "encoder" / "model.safetensors").read_bytes()
    again = config.model_copy(update={"output": config.output.with_name("again")})

    with monkeypatch.context() as context:
        context.setattr(StopRequest, "__enter__", _asked)
        with pytest.raises(StoppedEarly, match="go on with --resume"):
            distil.run(again)
    distil.run(again, resume=again.output)

    assert (again.output / "encoder" / "model.safetensors").read_bytes() == whole


def _asked(self):
    self.requested = True
    return self


def test_what_the_teacher_said_is_kept_and_a_torn_file_is_mended(tmp_path, small_teacher):
    teacher = Teacher(str(small_teacher))
    memory = Memory(tmp_path, teacher)
    first = memory.embeddings(["I hear you.", "Rest well."], StopRequest())
    # A crash in the middle of a chunk: half a line, half a vector.
    with (tmp_path / "vectors.f16").open("ab") as file:
        file.write(b"x" * 5)
    with (tmp_path / "texts.jsonl").open("a", encoding="utf-8") as file:
        file.write('"half a')

    asked = []
    encode = teacher.encode
    teacher.encode = lambda texts: asked.extend(texts) or encode(texts)
    found = memory.embeddings(["Rest well.", "How are you?", "I hear you."], StopRequest())

    assert asked == ["How are you?"]
    assert (found[[2, 0]] == first).all()
    assert found[1] == pytest.approx(encode(["How are you?"])[0], abs=1e-3)


def test_the_memory_of_another_teacher_is_refused(tmp_path, small_teacher):
    teacher = Teacher(str(small_teacher))
    Memory(tmp_path, teacher)
    teacher.name = "another"

    with pytest.raises(ConfigError, match="another teacher"):
        Memory(tmp_path, teacher)


def test_a_piece_alone_is_read_between_the_marks_of_a_text(small_teacher):
    teacher = Teacher(str(small_teacher))
    tokenizer = teacher.model.tokenizer
    name = tokenizer.convert_ids_to_tokens(30)

    pieces = teacher.encode_pieces(40)

    assert pieces.shape == (40, 16)
    if tokenizer.tokenize(name) == [name]:
        own = pieces[30] / np.linalg.norm(pieces[30])
        assert own == pytest.approx(teacher.encode([name])[0], abs=1e-4)


def test_an_encoder_that_is_too_large_is_not_measured(config, monkeypatch):
    monkeypatch.setattr(distil, "LARGEST", 1000)

    with pytest.raises(ConfigError, match="choose a smaller dimension"):
        distil.run(config)
