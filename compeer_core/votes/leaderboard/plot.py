"""The scores of a board as an SVG picture: for each model a dot, and a line over its 95 % CI.

The SVG has no scripts and loads nothing. It takes the text colour of the page and is readable on a phone:
name, numbers and dot of a model are stacked, so that a width of 360 units is enough. The table of the
board has the same numbers; nothing depends on colour.
"""

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from compeer_core.votes.leaderboard.board import Board, ModelRow
from compeer_core.votes.leaderboard.text import sentence

_WIDTH = 360
_MARGIN = 16
_ROW = 60
_COLUMNS = 46
"""Approximate letters per line in common fonts; a Chinese character takes two."""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class PlotWords:
    """The texts of the picture."""

    title: str = "Scores and their 95 % CI"
    axis: str = "score (100 points more: preferred in 64 % of votes)"
    not_ranked: str = "not ranked"


@dataclass(frozen=True)
class _Axis:
    ticks: tuple[int, ...]

    def x(self, score: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return _MARGIN + (score - low) / (high - low) * (_WIDTH - 2 * _MARGIN)


def to_svg(board: Board, words: PlotWords | None = None, description: str | None = None) -> str:
    """Draw the models of a board from the best on; without ranks, their names and the reason.

    Args:
        board: The board.
        words: The texts of the picture; English if None.
        description: Read by screen readers after the title, and shown as the reason where nothing is
            ranked; the English headline if None.
    """
    words = words or PlotWords()
    description = sentence(board) if description is None else description
    ranked = [row for row in board.models if row.score is not None]
    axis = _axis(ranked)
    bottom = _MARGIN + 24 + _ROW * len(board.models)
    # A reason may list many names; a line holds 26 Chinese characters, or more of another script.
    below = 44 if axis else 18 * math.ceil(len(description) / 26)
    parts = list(_head(words, description, bottom + below))
    if axis is None:
        parts += [
            f'<foreignObject x="{_MARGIN}" y="{bottom}" width="{_WIDTH - 2 * _MARGIN}" '
            f'height="{below}"><p {_XHTML}>{_text(description)}</p></foreignObject>'
        ]
    else:
        parts += _scale(axis, bottom, words)
    for number, row in enumerate(board.models):
        parts += _model(row, _MARGIN + 36 + _ROW * number, axis, words)
    return "\n".join([*parts, "</svg>"]) + "\n"


_XHTML = 'xmlns="http://www.w3.org/1999/xhtml" style="margin:0;font-size:12px;color:inherit;overflow-wrap:anywhere"'


def _head(words: PlotWords, description: str, height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{_text(words.title)}. {_text(description)}" fill="currentColor" '
        'font-family="inherit" font-size="12" style="width:100%;max-width:540px;display:block">'
    )
    yield f'<text x="{_MARGIN}" y="{_MARGIN + 4}" font-weight="600">{_text(words.title)}</text>'


def _scale(axis: _Axis, bottom: int, words: PlotWords) -> Iterator[str]:
    for tick in axis.ticks:
        x = f"{axis.x(tick):.1f}"
        yield (
            f'<line x1="{x}" x2="{x}" y1="{_MARGIN + 20}" y2="{bottom}" stroke="currentColor" '
            'stroke-opacity="0.2"/>'
        )
        yield f'<text x="{x}" y="{bottom + 16}" font-size="10" text-anchor="middle">{tick}</text>'
    yield f'<text x="{_MARGIN}" y="{bottom + 36}" font-size="10">{_text(words.axis)}</text>'


def _model(row: ModelRow, y: int, axis: _Axis | None, words: PlotWords) -> Iterator[str]:
    rank = "" if row.rank is None else f"{row.rank}. "
    if row.rank is not None and row.rank_low != row.rank_high:
        rank = f"{row.rank}. ({row.rank_low}–{row.rank_high}) "
    faint = "" if row.score else ' fill-opacity="0.7"'
    name = _shortened(row.model, _COLUMNS - len(rank))
    yield f'<text x="{_MARGIN}" y="{y}"{faint}>{rank}<tspan>{_text(name)}</tspan></text>'
    below = f'<text x="{_MARGIN}" y="{y + 15}"{faint}>'
    if row.score is None or axis is None:
        yield f"{below}{_text(words.not_ranked)}</text>"
        return
    yield f"{below}{row.score.value:.0f} ({row.score.low:.0f}–{row.score.high:.0f})</text>"
    line = y + 27
    yield (
        f'<line x1="{axis.x(row.score.low):.1f}" x2="{axis.x(row.score.high):.1f}" y1="{line}" '
        f'y2="{line}" stroke="currentColor" stroke-width="3" stroke-opacity="0.55" '
        'stroke-linecap="round"/>'
    )
    yield f'<circle cx="{axis.x(row.score.value):.1f}" cy="{line}" r="5"/>'


def _shortened(name: str, columns: int) -> str:
    """Return a name cut to so many columns, with "…" where it is cut."""
    widths = [2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name]
    if sum(widths) <= columns:
        return name
    used = 1  # by the dots
    for place, width in enumerate(widths):
        used += width
        if used > columns:
            return f"{name[:place]}…"
    return name


def _axis(ranked: list[ModelRow]) -> _Axis | None:
    scores = [row.score for row in ranked if row.score is not None]
    if not scores:
        return None
    low, high = min(score.low for score in scores), max(score.high for score in scores)
    step = 10
    while (high - low) / step > 5:
        step = _next_step(step)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return _Axis(tuple(step * number for number in range(first, last + 1)))


def _next_step(step: int) -> int:
    """Return the step after this one in 10, 20, 50, 100, 200, ..."""
    return step * 5 // 2 if str(step).startswith("2") else step * 2


def _text(text: str) -> str:
    """Return a text escaped for XML."""
    return escape(_NOT_XML.sub("", text))
