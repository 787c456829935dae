"""A diff of two texts by words, or by characters for scripts without spaces."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

PieceKind = Literal["same", "removed", "added"]

_UNSPACED = "\u0e00-\u0eff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+(?:['’][^\W{_UNSPACED}]+)*|\s+|.", re.DOTALL)
MAX_TOKENS = 4000
"""For both texts together; longer ones would take seconds and are shown as replaced."""


@dataclass(frozen=True)
class Piece:
    """A piece of text that is in both, or in one only."""

    kind: PieceKind
    text: str


def words_diff(before: str, after: str) -> tuple[Piece, ...]:
    """Return the pieces of both texts in reading order, removed before added.

    Example:
        >>> [(piece.kind, piece.text) for piece in words_diff("You did well.", "You do well.")]
        [('same', 'You '), ('removed', 'did'), ('added', 'do'), ('same', ' well.')]
        >>> [piece.text for piece in words_diff("你很难过", "你很累") if piece.kind != "same"]
        ['难过', '累']
    """
    old, new = _TOKEN.findall(before), _TOKEN.findall(after)
    if len(old) + len(new) > MAX_TOKENS:
        return tuple(_pieces([("removed", before), ("added", after)]))
    pieces: list[tuple[PieceKind, str]] = []
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(old[start:end])))
        else:
            pieces.append(("removed", "".join(old[start:end])))
            pieces.append(("added", "".join(new[other_start:other_end])))
    return tuple(_pieces(_joined(pieces)))


def _joined(pieces: list[tuple[PieceKind, str]]) -> list[tuple[PieceKind, str]]:
    """Merge a single space between two changes into them, so that a new phrase reads as one."""
    result: list[tuple[PieceKind, str]] = []
    removed, added = "", ""
    for place, (kind, text) in enumerate(pieces):
        is_last = place == len(pieces) - 1
        if kind == "removed":
            removed += text
        elif kind == "added":
            added += text
        elif not text.strip() and (removed or added) and not is_last:
            removed, added = removed + text, added + text
        else:
            result += [("removed", removed), ("added", added), ("same", text)]
            removed, added = "", ""
    return [*result, ("removed", removed), ("added", added)]


def _pieces(pieces: list[tuple[PieceKind, str]]) -> Iterator[Piece]:
    for kind, text in pieces:
        if text:
            yield Piece(kind, text)
