"""The teacher and what it said: embeddings are made once and kept in the run directory.

```text
<folder>/texts.jsonl    one text a line
<folder>/vectors.f16    its embedding, in the same order
<folder>/pieces.npy     what each word piece means alone
<folder>/teacher.json   whose they are
```

The first two only grow, a chunk at a time, so a run that is stopped loses at most a chunk.
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
    """A sentence-transformers model whose embeddings are the mean of its last layer."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        """Load it.

        Args:
            name: `offline` for the one that the extra of that name brings, else a name or a folder.
            device: Where it runs.

        Raises:
            ConfigError: The extra is not installed.
            CheckpointError: It cannot be loaded.
        """
        from sentence_transformers import SentenceTransformer

        place = str(offline_model()) if name == OFFLINE else name
        try:
            self.model = SentenceTransformer(place, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"teacher {name!r} cannot be loaded: {error}") from error
        self.name = "all-MiniLM-L6-v2" if name == OFFLINE else name

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return embeddings of length 1, shape (texts, dimension)."""
        found = self.model.encode(
            list(texts), batch_size=32, normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(found, dtype=np.float32)

    @torch.inference_mode()
    def encode_pieces(self, count: int) -> Vectors:
        """Return what each word piece means alone: the mean of `[CLS] piece [SEP]`, by token id."""
        tokenizer: Any = self.model.tokenizer
        layers: Any = self.model[0].auto_model
        found = []
        for start in range(0, count, _CHUNK):
            ids = torch.arange(start, min(start + _CHUNK, count), device=layers.device)
            begin, end = (
                torch.full_like(ids, special)
                for special in (tokenizer.cls_token_id, tokenizer.sep_token_id)
            )
            rows = torch.stack([begin, ids, end], dim=1)
            hidden = layers(input_ids=rows, attention_mask=torch.ones_like(rows)).last_hidden_state
            found.append(hidden.mean(1).float().cpu().numpy())
        return np.concatenate(found)


class Memory:
    """What a teacher said about texts, on disk."""

    def __init__(self, folder: Path, teacher: Teacher) -> None:
        """Open the folder, or begin it.

        Raises:
            ConfigError: It holds what another teacher said.
        """
        self._folder = folder
        self._teacher = teacher
        self._texts = folder / "texts.jsonl"
        self._vectors = folder / "vectors.f16"
        dimension = teacher.model.get_embedding_dimension()
        assert dimension is not None
        self._dimension = dimension
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "teacher.json"
        if note.exists() and json.loads(note.read_text(encoding="utf-8")) != teacher.name:
            raise ConfigError(
                f"{folder}: holds embeddings of another teacher; choose another output"
            )
        note.write_text(json.dumps(teacher.name), encoding="utf-8")

    def embeddings(self, texts: Sequence[str], stopping: StopRequest) -> Vectors | None:
        """Return the teacher's embeddings, made now where they are not known yet.

        Returns:
            Shape (texts, dimension), to 16 bits; None if a person asked to stop before the end.
        """
        known = self._known()
        missing = sorted((text for text in dict.fromkeys(texts) if text not in known), key=len)
        # Texts of one length together, since a batch is as slow as its longest; chunks in an
        # order of their own, so that the time left can be told.
        chunks = [missing[start : start + _CHUNK] for start in range(0, len(missing), _CHUNK)]
        order = np.random.default_rng(0).permutation(len(chunks))
        for number in track(order.tolist(), "teacher", total=len(chunks), unit="chunks"):
            if stopping.requested:
                return None
            self._add(chunks[number], self._teacher.encode(chunks[number]))
        known = self._known()
        vectors = np.fromfile(self._vectors, dtype=np.float16).reshape(-1, self._dimension)
        result: Vectors = vectors[[known[text] for text in texts]].astype(np.float32)
        return result

    def pieces(self, count: int) -> Vectors:
        """Return what each word piece means to the teacher alone, shape (count, width)."""
        path = self._folder / "pieces.npy"
        if not path.exists():
            fresh = path.with_suffix(".new.npy")
            np.save(fresh, self._teacher.encode_pieces(count))
            fresh.replace(path)
        result: Vectors = np.load(path)
        return result

    def _known(self) -> dict[str, int]:
        """Return the row of each text; what a crash cut off is taken out of both files."""
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

    def _add(self, texts: Sequence[str], vectors: Vectors) -> None:
        with self._vectors.open("ab") as file:
            file.write(vectors.astype(np.float16).tobytes())
        with self._texts.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(text) + "\n" for text in texts))
