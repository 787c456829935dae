"""Small corpora, a tokenizer learnt from them, and a model of a few thousand weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.training.corpora_fixture import write_corpora

if TYPE_CHECKING:  # torch is not loaded for the tests that do without
    from transformers import PreTrainedTokenizerFast

    from training.finetune.architecture import ModelShape


@pytest.fixture(scope="session")
def small_corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of files of `corpora_fixture.write_corpora`."""
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread: sums are added up in one order, and tiny shapes are faster so."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer(small_corpora: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of COMPEER-nano, with a small vocabulary."""
    from training.data.corpus import Source, SourceKind, mixed_documents
    from training.finetune.chat_tokens import label_lines
    from training.nano.tokenizer import train_tokenizer

    sources = [
        Source(path="esconv/train.txt.gz", kind=SourceKind.ESCONV),
        Source(path="english/dailydialog.txt.gz", kind=SourceKind.DIALOGUE),
    ]
    return train_tokenizer([*mixed_documents(small_corpora, sources, 0), *label_lines()], 600, 2048)


@pytest.fixture(scope="session")
def tiny_shape() -> "ModelShape":
    """Two layers of 32 in either half."""
    from training.finetune.architecture import ModelShape

    return ModelShape(
        hidden_size=32,
        layers=2,
        attention_heads=2,
        key_value_heads=1,
        intermediate_size=48,
        vision_hidden_size=32,
        vision_layers=2,
        vision_heads=2,
        vision_intermediate_size=48,
    )


@pytest.fixture(scope="session")
def tokenizer_folder(
    tokenizer: "PreTrainedTokenizerFast", tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tokenizer as its stage saves it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_base(
    tokenizer: "PreTrainedTokenizerFast",
    tokenizer_folder: Path,
    tiny_shape: "ModelShape",
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An untrained checkpoint with its processor; nobody may write into it."""
    from training.finetune.architecture import build_model
    from training.vision.train import build_processor

    folder = tmp_path_factory.mktemp("base")
    build_model(tiny_shape, tokenizer, seed=1).save_pretrained(folder)
    build_processor(tokenizer_folder, tiny_shape, 56).save_pretrained(folder)
    return folder
