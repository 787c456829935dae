"""Training and test texts of the encoder: turns and sentences of the corpora.

Consecutive turns of one speaker are joined, like the replies that Eq. 6 compares. Texts of more than
`longest_words` words are split into pieces of one to three sentences, because the teacher truncates its
input to 256 word pieces.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from training.data.corpus import Source, SourceKind, read_documents

_TURN = re.compile(r"<\|im_start\|>(user|assistant)\n(.*?)<\|im_end\|>", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")


class TextSource(FrozenModel):
    """A file of training texts."""

    path: str
    """Relative to the corpora folder."""
    kind: SourceKind
    """File format; see `training.data.corpus`."""
    most: int | None = Field(default=None, ge=1)
    """Maximum number of distinct texts, sampled by the seed; None uses all."""


@dataclass(frozen=True)
class Replies:
    """Supporter turns of held-out dialogues.

    Attributes:
        texts: The turns.
        dialogues: The number of each turn's dialogue.
    """

    texts: tuple[str, ...]
    dialogues: tuple[int, ...]


def training_texts(
    folder: Path,
    sources: Sequence[TextSource],
    longest_words: int,
    held_out: frozenset[str],
    most: int | None,
    seed: int,
) -> list[str]:
    """Return the distinct texts of all sources in random order.

    Args:
        folder: Folder of the corpora.
        sources: The files.
        longest_words: Maximum length of a text in words.
        held_out: Texts to exclude, such as a greeting that also occurs in the test split.
        most: Maximum number of texts; None uses all.
        seed: Seed of the sampling and of the order.

    Raises:
        ConfigError: A file is missing or has another format, or there are no texts.
    """
    rng = np.random.default_rng(seed)
    distinct: dict[str, None] = {}
    for source in sources:
        own = list(
            dict.fromkeys(
                part
                for text in _texts(folder, source)
                for part in _split_text(text, longest_words, rng)
                if part
            )
        )
        if source.most is not None and len(own) > source.most:
            own = [own[i] for i in sorted(rng.choice(len(own), source.most, replace=False))]
        distinct.update(dict.fromkeys(own))
    texts = list(distinct)
    shuffled = (texts[i] for i in rng.permutation(len(texts)))
    selected = [text for text in shuffled if text not in held_out][:most]
    if len(selected) < 2:
        raise ConfigError(f"{folder}: the sources contain no training texts")
    return selected


def replies_of(folder: Path, path: str) -> Replies:
    """Return the supporter turns of an ESConv split.

    Raises:
        ConfigError: The file is missing, has another format, or has fewer than two dialogues.
    """
    texts: list[str] = []
    dialogues: list[int] = []
    source = Source(path=path, kind=SourceKind.ESCONV)
    for number, document in enumerate(read_documents(folder, source)):
        turns = [_flat(text) for role, text in _TURN.findall(document) if role == "assistant"]
        texts += turns
        dialogues += [number] * len(turns)
    if len(set(dialogues)) < 2:
        raise ConfigError(f"{folder / path}: fewer than two dialogues, which pairs of replies need")
    return Replies(tuple(texts), tuple(dialogues))


def _texts(folder: Path, source: TextSource) -> Iterator[str]:
    for document in read_documents(folder, Source(path=source.path, kind=source.kind)):
        if source.kind is SourceKind.PLAIN:
            yield _flat(document)
        else:
            yield from (_flat(text) for _, text in _TURN.findall(document))


def _flat(text: str) -> str:
    return " ".join(text.split())


def _split_text(text: str, longest_words: int, rng: np.random.Generator) -> Iterator[str]:
    if len(text.split()) <= longest_words:
        yield text
        return
    sentences = _SENTENCE_END.split(text)
    start = 0
    while start < len(sentences):
        end = start + int(rng.integers(1, 4))
        yield " ".join(" ".join(sentences[start:end]).split()[:longest_words])
        start = end
