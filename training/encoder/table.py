"""A static embedding table of word pieces: distil, map to the teacher, train, store.

1. *Raw distillation* as in model2vec (`StaticEmbedding.from_distillation`): the teacher's embedding of
   each piece alone, reduced by PCA and down-weighted by frequency, which Zipf's law estimates from the
   rank. Reimplemented because model2vec's `distill` extra requires an older transformers.
2. *Mapping*: ridge regression of the teacher's embeddings on the means of each text's rows.
3. *Training*: all rows are trained. The loss of a batch is 1 - r, where r is the correlation between
   our cosines and the teacher's over all pairs of texts: Eq. 6 uses cosines, not embeddings.
4. *Storing*: pieces that occur in no text are removed, except those needed to spell any word. Rows are
   stored as int8 with a scale per row, a layout that sentence-transformers loads as well.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from compeer_core.config import FrozenModel

Floats = NDArray[np.float32]
Ids = list[list[int]]

SIF = 1e-4
"""Smooth inverse frequency (Arora et al. 2017; model2vec's default): weight SIF / (SIF + p)."""
UNKNOWN = "[UNK]"


class Training(FrozenModel):
    """Training settings of the table."""

    epochs: int = Field(default=6, ge=0)
    """Number of epochs; 0 uses the mapped table."""
    batch_size: int = Field(default=512, ge=3)
    """Texts per batch, all of whose pairs are in the loss."""
    lr: float = Field(default=0.1, gt=0)
    """Adam's peak learning rate, relative to the RMS of the mapped table; one-cycle schedule with a
    tenth of the steps for warm-up."""
    dropped: float = Field(default=0.0, ge=0, lt=1)
    """Share of the pieces of a text that are dropped at random."""


@dataclass(frozen=True)
class Bags:
    """Concatenated token ids of texts, for an embedding bag."""

    ids: Tensor
    starts: Tensor

    @classmethod
    def of(cls, rows: Ids) -> "Bags":
        lengths = [len(row) for row in rows]
        return cls(
            torch.tensor([piece for row in rows for piece in row], dtype=torch.long),
            torch.tensor(np.cumsum([0, *lengths[:-1]]), dtype=torch.long),
        )

    def mean(self, table: Tensor) -> Tensor:
        """Return the mean row of each text, shape (texts, dimension)."""
        return functional.embedding_bag(self.ids, table, self.starts, mode="mean")


def raw_table(pieces: Floats, dimension: int) -> Floats:
    """Return the raw distillation.

    Args:
        pieces: The teacher's embedding of each piece alone, shape (vocabulary, width), ordered by
            frequency as the vocabulary is.
        dimension: Number of principal components.

    Example:
        >>> raw_table(np.eye(4, dtype=np.float32), 2).shape
        (4, 2)
    """
    centred = pieces - pieces.mean(axis=0)
    _, _, components = np.linalg.svd(centred, full_matrices=False)
    zipf = 1.0 / np.arange(2, len(pieces) + 2)
    weights = SIF / (SIF + zipf / zipf.sum())
    result: Floats = (centred @ components[:dimension].T * weights[:, np.newaxis]).astype(
        np.float32
    )
    return result


def mapped_table(raw: Floats, rows: Ids, targets: Floats, dimension: int) -> Floats:
    """Return the table after a linear map fitted to the teacher's embeddings of texts.

    Args:
        raw: Shape (vocabulary, any).
        rows: Token ids of each text.
        targets: The teacher's embeddings, shape (texts, width).
        dimension: Number of singular directions of the teacher's embeddings to keep.
    """
    table, embeddings = torch.from_numpy(raw), torch.from_numpy(targets)
    means = Bags.of(rows).mean(table)
    # The intercept can be added to every row, since rows are averaged.
    features = torch.cat([means, torch.ones(len(means), 1)], dim=1)
    ridge = 1e-6 * len(features) * means.var() * torch.eye(features.shape[1])
    solution = torch.linalg.solve(features.T @ features + ridge, features.T @ embeddings)
    _, _, directions = torch.linalg.svd(embeddings, full_matrices=False)
    full = table @ solution[:-1] + solution[-1]
    result: Floats = (full @ directions[:dimension].T).contiguous().numpy()
    return result


def train_table(
    table: Floats, rows: Ids, targets: Floats, training: Training, seed: int
) -> Iterator[tuple[int, float, Floats]]:
    """Train the table; yield the number, mean loss and table of each epoch.

    Args:
        table: Initial table, shape (vocabulary, dimension).
        rows: Token ids of each text.
        targets: The teacher's unit-length embeddings, shape (texts, width).
        training: Training settings.
        seed: Seed of the order of texts and of dropped pieces.
    """
    rng = np.random.default_rng(seed)
    weights = torch.nn.Parameter(torch.from_numpy(table.copy()))
    embeddings = torch.from_numpy(targets)
    size = min(training.batch_size, len(rows))
    per_epoch = len(rows) // size
    lr = training.lr * float(weights.detach().square().mean().sqrt())
    optimizer = torch.optim.Adam([weights], lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=max(2, per_epoch * training.epochs), pct_start=0.1001
    )
    pairs = torch.ones(size, size).triu(1).bool()
    for epoch in range(1, training.epochs + 1):
        order = rng.permutation(len(rows))
        total = 0.0
        for step in range(per_epoch):
            chosen = order[step * size : (step + 1) * size]
            bags = Bags.of([_drop_pieces(rows[i], training.dropped, rng) for i in chosen])
            ours = functional.normalize(bags.mean(weights), dim=-1)
            theirs = embeddings[torch.from_numpy(chosen)]
            loss = 1 - _correlation((ours @ ours.T)[pairs], (theirs @ theirs.T)[pairs])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item()
        yield epoch, total / per_epoch, weights.detach().numpy().copy()


def _drop_pieces(row: list[int], share: float, rng: np.random.Generator) -> list[int]:
    if not share:
        return row
    return [piece for piece in row if rng.random() >= share] or row


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    first, second = first - first.mean(), second - second.mean()
    result: Tensor = (first * second).sum() / (first.norm() * second.norm() + 1e-12)
    return result


# --- storing --------------------------------------------------------------------------------------


def prune_vocabulary(tokenizer: Tokenizer, rows: Ids, least: int) -> tuple[Tokenizer, list[int]]:
    """Return a tokenizer without rare pieces, and the old ids of the remaining ones.

    All single letters remain, so any word can still be spelt.

    Args:
        tokenizer: A WordPiece tokenizer.
        rows: Token ids of each text.
        least: Minimum number of texts that contain a piece.
    """
    counts = Counter(piece for row in rows for piece in set(row))
    vocabulary = tokenizer.get_vocab()
    remaining = [
        name
        for name, number in sorted(vocabulary.items(), key=lambda item: item[1])
        if name == UNKNOWN or counts[number] >= least or _is_letter(name)
    ]
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    state["model"]["vocab"] = {name: number for number, name in enumerate(remaining)}
    state["model"]["max_input_chars_per_word"] = 40
    # A static embedding needs no special tokens, template or padding.
    state |= {"added_tokens": [], "post_processor": None, "padding": None, "truncation": None}
    return Tokenizer.from_str(json.dumps(state)), [vocabulary[name] for name in remaining]


def _is_letter(name: str) -> bool:
    letter = name.removeprefix("##")
    return len(letter) == 1 and letter.isascii()


def quantise(table: Floats) -> dict[str, NDArray[Any]]:
    """Return the table as int8 with a scale per row.

    Example:
        >>> small = quantise(np.array([[1.27, -0.5], [0.0, 0.0]], dtype=np.float32))
        >>> small["embeddings"].tolist(), small["weights"].round(4).tolist()
        ([[127, -50], [0, 0]], [0.009999999776482582, 1.0])
    """
    largest = np.abs(table).max(axis=1)
    weights = np.where(largest > 0, largest / 127, 1.0).astype(np.float32)
    whole = np.rint(table / weights[:, np.newaxis]).astype(np.int8)
    return {"embeddings": whole, "weights": weights}


def save(folder: Path, tokenizer: Tokenizer, table: Floats) -> None:
    """Write a folder that `compeer_core.encoder` and sentence-transformers load."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    save_file(quantise(table), folder / "model.safetensors", metadata={"format": "pt"})
    modules = [
        {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.models.StaticEmbedding",
        }
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Ids:
    """Return the token ids of each text."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]
