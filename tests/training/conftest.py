"""Shared fixtures: small corpora, a tokenizer trained on them, and a tiny model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.training.corpora_fixture import write_corpora

if TYPE_CHECKING:  # tests that do not need torch should not import it
    from transformers import PreTrainedTokenizerFast

    from training.finetune.architecture import ModelShape


@pytest.fixture(scope="session")
def small_corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `corpora_fixture.write_corpora`."""
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def drawn_plots() -> None:
    """Draw the plots in this test; see `_undrawn_plots`."""


@pytest.fixture(autouse=True)
def _undrawn_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save plots as empty files: drawing them can take longer than the small run they are about."""
    if "drawn_plots" not in request.fixturenames:
        for owner, method in ((Figure, "savefig"), (FigureCanvasAgg, "print_png")):
            monkeypatch.setattr(owner, method, lambda _, path, **options: Path(path).touch())


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: reproducible sums, and faster for tiny shapes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer(small_corpora: Path) -> "PreTrainedTokenizerFast":
    """A byte-level BPE of 600 tokens, with a chat template."""
    from tests.checkpoints import train_bpe
    from training.data.corpus import Source, SourceKind, mixed_documents
    from training.finetune.chat_tokens import SPECIAL_TOKENS, chat_tokenizer, label_lines

    sources = [
        Source(path="esconv/train.txt.gz", kind=SourceKind.ESCONV),
        Source(path="english/dailydialog.txt.gz", kind=SourceKind.DIALOGUE),
    ]
    documents = [*mixed_documents(small_corpora, sources, 0), *label_lines()]
    return chat_tokenizer(train_bpe(SPECIAL_TOKENS, 600, documents), 2048)


@pytest.fixture(scope="session")
def tiny_shape() -> "ModelShape":
    """Two layers of width 32 in the language model and in the image tower."""
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
    """The tokenizer, saved as by its stage."""
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
    """An untrained checkpoint with its processor. Read-only."""
    from training.finetune.architecture import build_model
    from training.vision.train import build_processor

    folder = tmp_path_factory.mktemp("base")
    build_model(tiny_shape, tokenizer, seed=1).save_pretrained(folder)
    build_processor(tokenizer_folder, tiny_shape, 56).save_pretrained(folder)
    return folder
