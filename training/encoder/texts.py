"""What the encoder is taught and measured on: turns and sentences of the corpora.

Dialogues give their turns, neighbouring turns of one speaker joined, as the replies are that
Eq. 6 compares. What is longer than `longest_words` is cut into pieces of one to three sentences, so
that the teacher, which reads 256 pieces of words, sees all of a text that it is asked about.
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
    """One file of texts to learn from."""

    path: str
    """Relative to the corpora folder."""
    kind: SourceKind
    """How the file is read; see `training.data.corpus`."""
    most: int | None = Field(default=None, ge=1)
    """At most so many different texts, drawn by the seed; None takes all."""


@dataclass(frozen=True)
class Replies:
    """Supporters' turns of held-out dialogues.

    Attributes:
        texts: One for each turn.
        dialogues: The number of the dialogue that each is from.
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
    """Return different texts of all sources, in an order drawn by the seed.

    Args:
        folder: Of the corpora.
        sources: The files.
        longest_words: What is longer is cut at ends of sentences.
        held_out: Texts that must not be among them, such as a greeting that a test has too.
        most: At most so many in all; None takes all.
        seed: Of what is drawn.

    Raises:
        ConfigError: A file is missing or of another kind, or there is nothing to learn from.
    """
    rng = np.random.default_rng(seed)
    texts: dict[str, None] = {}
    for source in sources:
        found = dict.fromkeys(
            part
            for text in _texts(folder, source)
            for part in _pieces(text, longest_words, rng)
            if part
        )
        own = list(found)
        if source.most is not None and len(own) > source.most:
            own = [own[i] for i in sorted(rng.choice(len(own), source.most, replace=False))]
        texts.update(dict.fromkeys(own))
    every = list(texts)
    shuffled = (every[i] for i in rng.permutation(len(every)))
    found_texts = [text for text in shuffled if text not in held_out][:most]
    if len(found_texts) < 2:
        raise ConfigError(f"{folder}: the sources hold no texts to learn from")
    return found_texts


def replies_of(folder: Path, path: str) -> Replies:
    """Return the supporters' turns of a split of ESConv.

    Raises:
        ConfigError: The file is missing or of another kind, or holds fewer than two dialogues.
    """
    texts: list[str] = []
    dialogues: list[int] = []
    source = Source(path=path, kind=SourceKind.ESCONV)
    for number, document in enumerate(read_documents(folder, source)):
        said = [_flat(text) for role, text in _TURN.findall(document) if role == "assistant"]
        texts += said
        dialogues += [number] * len(said)
    if len(set(dialogues)) < 2:
        raise ConfigError(
            f"{folder / path}: fewer than two dialogues to draw pairs of replies from"
        )
    return Replies(tuple(texts), tuple(dialogues))


def _texts(folder: Path, source: TextSource) -> Iterator[str]:
    for document in read_documents(folder, Source(path=source.path, kind=source.kind)):
        if source.kind is SourceKind.PLAIN:
            yield _flat(document)
        else:
            yield from (_flat(text) for _, text in _TURN.findall(document))


def _flat(text: str) -> str:
    return " ".join(text.split())


def _pieces(text: str, longest_words: int, rng: np.random.Generator) -> Iterator[str]:
    if len(text.split()) <= longest_words:
        yield text
        return
    sentences = _SENTENCE_END.split(text)
    start = 0
    while start < len(sentences):
        end = start + int(rng.integers(1, 4))
        yield " ".join(" ".join(sentences[start:end]).split()[:longest_words])
        start = end
