"""The teacher, and a cache of its embeddings in the run directory.

```text
<folder>/texts.jsonl    one text per line
<folder>/vectors.f16    their embeddings, in the same order
<folder>/pieces.npy     embeddings of single word pieces
<folder>/teacher.json   the teacher's name
```

The first two are appended to in chunks, so an interrupted run loses at most one chunk.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compeer_core.encoder import OFFLINE, offline_model
from compeer_core.errors import CheckpointError, ConfigError
from training.common.interrupts import StopRequest
from training.common.progress import track

Vectors = NDArray[np.float32]

_CHUNK = 512
_log = logging.getLogger(__name__)


class Teacher:
    """A sentence-transformers model with mean pooling."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        """Load the model.

        Args:
            name: Model name or folder; `offline` is the model of the extra of that name.
            device: Device of the model.

        Raises:
            ConfigError: The extra is not installed.
            CheckpointError: The model cannot be loaded.
        """
        from sentence_transformers import SentenceTransformer

        source = str(offline_model()) if name == OFFLINE else name
        try:
            self.model = SentenceTransformer(source, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"teacher {name!r} cannot be loaded: {error}") from error
        self.name = "all-MiniLM-L6-v2" if name == OFFLINE else name

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return unit-length embeddings, shape (texts, dimension)."""
        embeddings = self.model.encode(
            list(texts), batch_size=32, normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(embeddings, dtype=np.float32)

    @torch.inference_mode()
    def encode_pieces(self, count: int) -> Vectors:
        """Return the mean of `[CLS] piece [SEP]` of each word piece, by token id."""
        tokenizer: Any = self.model.tokenizer
        layers: Any = self.model[0].auto_model
        embeddings = []
        for start in range(0, count, _CHUNK):
            ids = torch.arange(start, min(start + _CHUNK, count), device=layers.device)
            cls, sep = (
                torch.full_like(ids, special)
                for special in (tokenizer.cls_token_id, tokenizer.sep_token_id)
            )
            rows = torch.stack([cls, ids, sep], dim=1)
            hidden = layers(input_ids=rows, attention_mask=torch.ones_like(rows)).last_hidden_state
            embeddings.append(hidden.mean(1).float().cpu().numpy())
        return np.concatenate(embeddings)


class EmbeddingCache:
    """A teacher's embeddings of texts, on disk."""

    def __init__(self, folder: Path, teacher: Teacher) -> None:
        """Open or create the folder.

        Raises:
            ConfigError: It contains embeddings of another teacher.
        """
        self._folder = folder
        self._teacher = teacher
        self._texts = folder / "texts.jsonl"
        self._vectors = folder / "vectors.f16"
        dimension = teacher.model.get_embedding_dimension()
        assert dimension is not None
        self._dimension = dimension
        folder.mkdir(parents=True, exist_ok=True)
        name_file = folder / "teacher.json"
        if name_file.exists() and json.loads(name_file.read_text("utf-8")) != teacher.name:
            raise ConfigError(
                f"{folder}: contains embeddings of another teacher; choose another output"
            )
        name_file.write_text(json.dumps(teacher.name), encoding="utf-8")

    def embeddings(self, texts: Sequence[str], stop: StopRequest) -> Vectors | None:
        """Return the teacher's embeddings, computing those that are not cached.

        Returns:
            Shape (texts, dimension), rounded to 16 bits; None after an interrupt.
        """
        cached = self._row_by_text()
        missing = sorted((text for text in dict.fromkeys(texts) if text not in cached), key=len)
        # Sorted by length to reduce padding; chunks in random order, so that the estimate of the
        # time left is unbiased.
        chunks = [missing[start : start + _CHUNK] for start in range(0, len(missing), _CHUNK)]
        order = np.random.default_rng(0).permutation(len(chunks))
        for number in track(order.tolist(), "teacher", total=len(chunks), unit="chunks"):
            if stop.requested:
                return None
            self._append(chunks[number], self._teacher.encode(chunks[number]))
        cached = self._row_by_text()
        vectors = np.fromfile(self._vectors, dtype=np.float16).reshape(-1, self._dimension)
        result: Vectors = vectors[[cached[text] for text in texts]].astype(np.float32)
        return result

    def pieces(self, count: int) -> Vectors:
        """Return the teacher's embedding of each word piece alone, shape (count, width)."""
        path = self._folder / "pieces.npy"
        if not path.exists():
            temporary = path.with_suffix(".new.npy")
            np.save(temporary, self._teacher.encode_pieces(count))
            temporary.replace(path)
        result: Vectors = np.load(path)
        return result

    def _row_by_text(self) -> dict[str, int]:
        """Return the row of each text, after truncating both files to complete rows."""
        if not self._texts.exists() or not self._vectors.exists():
            return {}
        width = 2 * self._dimension
        rows = self._vectors.stat().st_size // width
        with self._texts.open(encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")][:rows]
        rows = len(lines)
        with self._vectors.open("r+b") as vectors:
            vectors.truncate(rows * width)
        if self._texts.stat().st_size != sum(len(line.encode()) for line in lines):
            self._texts.write_text("".join(lines), encoding="utf-8")
        return {json.loads(line): row for row, line in enumerate(lines)}

    def _append(self, texts: Sequence[str], vectors: Vectors) -> None:
        with self._vectors.open("ab") as file:
            file.write(vectors.astype(np.float16).tobytes())
        with self._texts.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(text) + "\n" for text in texts))
