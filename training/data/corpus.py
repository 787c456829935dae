"""Documents for the tokenizer, pre-training and the sentence encoder, read from a folder of corpora.

A document is one string. Dialogues become chat documents in the ChatML layout of SFT, so a model
learns turn taking in pre-training:

    <|im_start|>user
    ...<|im_end|>
    <|im_start|>assistant
    ...<|im_end|>

Marker strings inside corpus texts are neutralised, so only this module writes markers.
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.prompts import neutralise
from compeer_core.row_files import json_lines, parse_json

DOCUMENT_END = "<|endoftext|>"
"""Separates documents in plain-text files and ends each tokenised document."""

_UNREADABLE = (
    *(AttributeError, KeyError, TypeError, ValueError, csv.Error),  # another layout
    *(EOFError, OSError, zlib.error),  # a download cut short
)
_TURN_MARKER = re.compile(r"<\|im_start\|>(?:user|assistant)\n|<\|im_end\|>")
_SPEAKER_LINE = re.compile(r"^([A-Z]|User|Assistant): (.*)$")


class SourceKind(StrEnum):
    """Format of a file."""

    PLAIN = "plain"
    """Text documents separated by a line `<|endoftext|>`."""
    DIALOGUE = "dialogue"
    """As `plain`; each line begins with one of two speakers (`A: `, `M: `, `User: ` ...)."""
    ESCONV = "esconv"
    """ESConv, one JSON object per line (`dialog[].speaker` is usr or sys)."""
    COUNSELCHAT = "counselchat"
    """counsel-chat CSV: a question and one answer per row; only rows of its train split."""


class Source(FrozenModel):
    """One file of the mix."""

    path: str
    """Relative to the folder of corpora; `.gz` is decompressed."""
    kind: SourceKind
    share: float = Field(default=1.0, ge=0)
    """Share of the file in one epoch: 0.3 takes 30 % of its documents, 2 takes each twice."""


def chat_document(turns: Sequence[tuple[str, str]]) -> str:
    """Return one ChatML document; adjacent turns of one role are joined.

    Args:
        turns: (role, text) with role "user" or "assistant".
    """
    merged: list[tuple[str, str]] = []
    for role, text in turns:
        text = neutralise(text.strip())
        if not text:
            continue
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]}\n{text}")
        else:
            merged.append((role, text))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in merged)


def read_documents(folder: Path, source: Source) -> Iterator[str]:
    """Yield every document of one file, in file order.

    Raises:
        ConfigError: The file is missing, damaged, or of another format.
    """
    check_files(folder, [source])
    path = folder / source.path
    try:
        yield from _READERS[source.kind](path)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: cannot be read as {source.kind} ({error!r})") from error


def check_files(folder: Path, sources: Iterable[Source]) -> None:
    """Check that the files exist.

    Raises:
        ConfigError: One is missing.
    """
    for source in sources:
        path = folder / source.path
        if not path.is_file():
            raise ConfigError(f"{path}: no such corpus file (check data_dir and the sources)")


def utterances_of(document: str) -> list[str]:
    """Return the lines of a document, without the markers of chat documents."""
    return [line for line in _TURN_MARKER.sub("", document).split("\n") if line]


def mixed_documents(
    folder: Path,
    sources: Sequence[Source],
    seed: int,
    keep: Callable[[str], bool] = lambda document: True,
) -> list[str]:
    """Return one epoch of the mix: every source by its share, shuffled by `seed`.

    Args:
        folder: The corpora.
        sources: The files.
        seed: Draws the shares and the order.
        keep: Filters documents.
    """
    rng = np.random.default_rng(seed)
    mix: list[str] = []
    for source in sources:
        documents = [text for text in read_documents(folder, source) if keep(text)]
        whole, rest = divmod(source.share, 1.0)
        mix += documents * int(whole)
        chosen = rng.choice(len(documents), size=round(rest * len(documents)), replace=False)
        mix += [documents[i] for i in sorted(chosen)]
    order = rng.permutation(len(mix))
    return [mix[i] for i in order]


def _open_text(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _read_blocks(path: Path) -> Iterator[str]:
    lines: list[str] = []
    with _open_text(path) as file:
        for line in file:
            if line.strip() == DOCUMENT_END:
                if text := "".join(lines).strip():
                    yield text
                lines = []
            else:
                lines.append(line)
    if text := "".join(lines).strip():
        yield text


def _read_plain(path: Path) -> Iterator[str]:
    return (neutralise(block) for block in _read_blocks(path))


def _read_dialogue(path: Path) -> Iterator[str]:
    for block in _read_blocks(path):
        turns: list[tuple[str, str]] = []
        opener = ""
        for line in block.split("\n"):  # splitlines() would also cut at U+2028 inside a turn
            match = _SPEAKER_LINE.match(line)
            if match is None:
                continue  # a line that sets the scene
            opener = opener or match[1]
            turns.append(("user" if match[1] == opener else "assistant", match[2]))
        if turns:
            yield chat_document(turns)


def _read_esconv(path: Path) -> Iterator[str]:
    for where, line in json_lines(path):
        turns = parse_json(where, line)["dialog"]
        yield chat_document(
            [("user" if t["speaker"] == "usr" else "assistant", t["text"]) for t in turns]
        )


def _read_counselchat(path: Path) -> Iterator[str]:
    with _open_text(path) as file:
        for row in csv.DictReader(file):
            if row.get("split", "train") != "train":
                continue
            question = " ".join(row["questionText"].split()) or row["questionTitle"]
            answer = " ".join(re.sub(r"<[^>]+>", " ", row["answerText"]).split())
            if answer:
                yield chat_document([("user", question), ("assistant", answer)])


_READERS: dict[SourceKind, Callable[[Path], Iterator[str]]] = {
    SourceKind.PLAIN: _read_plain,
    SourceKind.DIALOGUE: _read_dialogue,
    SourceKind.ESCONV: _read_esconv,
    SourceKind.COUNSELCHAT: _read_counselchat,
}
