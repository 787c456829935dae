"""A table of word pieces: distilled, mapped onto the teacher, trained, stored.

1. *Raw distillation* as model2vec does it (`StaticEmbedding.from_distillation`): the teacher reads
   each piece alone, principal components, and less weight for frequent pieces, whose frequency is
   told from their rank by Zipf's law. Done here, because model2vec's `distill` extra asks for an
   older transformers than this project.
2. *Mapping*: one linear map, by ridge regression, brings the mean of a text's rows as near to the
   teacher's embedding as a linear map can.
3. *Training*: the rows themselves learn. The loss of a batch is 1 - r, where r is the correlation
   over all pairs of its texts between our cosines and the teacher's: what Eq. 6 needs are cosines,
   not embeddings.
4. *Storing*: pieces that no text had are dropped but for those that spell any word, and each row
   becomes whole numbers of 8 bits with one weight, a layout that sentence-transformers reads too.
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
"""Arora et al. 2017, and model2vec's default: a piece of frequency p weighs SIF / (SIF + p)."""
UNKNOWN = "[UNK]"


class Training(FrozenModel):
    """How the rows learn."""

    epochs: int = Field(default=6, ge=0)
    """Passes over the texts; 0 leaves the mapped table as it is."""
    batch_size: int = Field(default=512, ge=3)
    """Texts whose pairs make a loss."""
    lr: float = Field(default=0.1, gt=0)
    """Adam's, in parts of a number's typical size in the mapped table; up for a tenth of the steps,
    then down as a cosine."""
    dropped: float = Field(default=0.0, ge=0, lt=1)
    """Share of the pieces of a text that are left out at random, so that no piece is relied on."""


@dataclass(frozen=True)
class Bags:
    """Texts as the ids of their pieces, one behind the other, for an embedding bag."""

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
        pieces: What the teacher makes of each piece alone, shape (vocabulary, width), in the order
            of the vocabulary, which is that of frequency.
        dimension: Principal components that are kept.

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
    """Return the table after the linear map that brings texts nearest to the teacher.

    Args:
        raw: Shape (vocabulary, any).
        rows: Ids of the pieces of each text.
        targets: The teacher's embeddings, shape (texts, width).
        dimension: Principal directions of the teacher's embeddings that are kept.
    """
    table, wanted = torch.from_numpy(raw), torch.from_numpy(targets)
    means = Bags.of(rows).mean(table)
    # A constant beside the means: adding it to every row adds it to every mean.
    known = torch.cat([means, torch.ones(len(means), 1)], dim=1)
    ridge = 1e-6 * len(known) * means.var() * torch.eye(known.shape[1])
    solution = torch.linalg.solve(known.T @ known + ridge, known.T @ wanted)
    _, _, directions = torch.linalg.svd(wanted, full_matrices=False)
    full = table @ solution[:-1] + solution[-1]
    result: Floats = (full @ directions[:dimension].T).contiguous().numpy()
    return result


def trained(
    table: Floats, rows: Ids, targets: Floats, training: Training, seed: int
) -> Iterator[tuple[int, float, Floats]]:
    """Train the table; yield after each epoch its number, the mean loss and the table.

    Args:
        table: Where to begin, shape (vocabulary, dimension).
        rows: Ids of the pieces of each text.
        targets: The teacher's embeddings of length 1, shape (texts, width).
        training: How.
        seed: Of the order of texts and of what is dropped.
    """
    rng = np.random.default_rng(seed)
    weights = torch.nn.Parameter(torch.from_numpy(table.copy()))
    wanted = torch.from_numpy(targets)
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
            kept = [_without_some(rows[i], training.dropped, rng) for i in chosen]
            ours = functional.normalize(Bags.of(kept).mean(weights), dim=-1)
            theirs = wanted[torch.from_numpy(chosen)]
            loss = 1 - _correlation((ours @ ours.T)[pairs], (theirs @ theirs.T)[pairs])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item()
        yield epoch, total / per_epoch, weights.detach().numpy().copy()


def _without_some(row: list[int], share: float, rng: np.random.Generator) -> list[int]:
    if not share:
        return row
    return [piece for piece in row if rng.random() >= share] or row


def _correlation(first: Tensor, second: Tensor) -> Tensor:
    one, other = first - first.mean(), second - second.mean()
    result: Tensor = (one * other).sum() / (one.norm() * other.norm() + 1e-12)
    return result


# --- storing --------------------------------------------------------------------------------------


def fewer_pieces(tokenizer: Tokenizer, rows: Ids, least: int) -> tuple[Tokenizer, list[int]]:
    """Return a tokenizer of the pieces that are needed, and their ids in the old one.

    Kept are pieces that at least `least` texts have, and all of one letter, so that a word whose own
    piece is gone is spelt by shorter ones.

    Args:
        tokenizer: A WordPiece.
        rows: Ids of the pieces of each text.
        least: Texts that must have a piece.
    """
    counts = Counter(piece for row in rows for piece in set(row))
    vocabulary = tokenizer.get_vocab()
    kept = [
        name
        for name, number in sorted(vocabulary.items(), key=lambda item: item[1])
        if name == UNKNOWN or counts[number] >= least or _is_letter(name)
    ]
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    state["model"]["vocab"] = {name: number for number, name in enumerate(kept)}
    state["model"]["max_input_chars_per_word"] = 40
    # What only a model with layers needs: special tokens, their template, padding.
    state |= {"added_tokens": [], "post_processor": None, "padding": None, "truncation": None}
    return Tokenizer.from_str(json.dumps(state)), [vocabulary[name] for name in kept]


def _is_letter(name: str) -> bool:
    letter = name.removeprefix("##")
    return len(letter) == 1 and letter.isascii()


def quantised(table: Floats) -> dict[str, NDArray[Any]]:
    """Return the table as whole numbers of 8 bits and one weight for each row.

    Example:
        >>> small = quantised(np.array([[1.27, -0.5], [0.0, 0.0]], dtype=np.float32))
        >>> small["embeddings"].tolist(), small["weights"].round(4).tolist()
        ([[127, -50], [0, 0]], [0.009999999776482582, 1.0])
    """
    largest = np.abs(table).max(axis=1)
    weights = np.where(largest > 0, largest / 127, 1.0).astype(np.float32)
    whole = np.rint(table / weights[:, np.newaxis]).astype(np.int8)
    return {"embeddings": whole, "weights": weights}


def save(folder: Path, tokenizer: Tokenizer, table: Floats) -> None:
    """Write a folder that `compeer_core.encoder` and sentence-transformers read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    save_file(quantised(table), folder / "model.safetensors", metadata={"format": "pt"})
    modules = [
        {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.models.StaticEmbedding",
        }
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Ids:
    """Return the ids of the pieces of each text."""
    found = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in found]
