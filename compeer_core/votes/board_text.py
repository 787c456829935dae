"""A board in words, as JSON, as a Markdown table and as CSV.

The same board gives the same bytes. Names of models come from outside, so that none of them can end
a table's cell, be run by a spreadsheet, or be read as a tag.
"""

import csv
import io
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC
from types import MappingProxyType

from compeer_core.taxonomy import Preference
from compeer_core.votes.board import Board, Filters, ModelRow, Pair, Settings, Status
from compeer_core.votes.rating import Estimate

PROGRAM = "python -m compeer_core.votes"
Cell = str | int | float | None

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~&])")
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_SAID = MappingProxyType(
    {
        Preference.FIRST: "left",
        Preference.SECOND: "right",
        Preference.BOTH: "about equal",
        Preference.NEITHER: "neither",
    }
)


# --- Words ---------------------------------------------------------------------------------------


def sentence(board: Board) -> str:
    """Return what the board says, or why it says nothing, in one or two sentences.

    For instance: *urp is preferred to base in 64 % of decided votes (95 % 55–72, 143 votes, 31
    raters).*
    """
    if board.status is Status.NOT_ENOUGH_VOTES:
        return f"Not enough votes to rank models: {board.comparing} of {board.needed} needed."
    if board.status is Status.NOT_ENOUGH_RATERS:
        return (
            "Not enough people to rank models: "
            f"{board.comparing_raters} of {board.needed} needed, with {board.comparing} votes."
        )
    if board.status is Status.DISCONNECTED:
        parts = "; ".join(", ".join(part) for part in board.parts)
        return f"No ranks: nobody compared a model of one group with one of another ({parts})."
    if board.headline is None:
        return "Every vote was a tie: no model is preferred."
    best = board.headline
    share = f"{_percent(best.win_share.value)} % of decided votes"
    if best.win_share.value >= 0.5:
        told = f"{best.model} is preferred to {best.against} in {share}"
    else:
        told = f"{best.model} ranks first once its places are taken into account, but won {share}"
        told += f" against {best.against}"
    told += f" (95 % {_between(best.win_share)}, {_number(best.votes, 'vote')}, "
    told += f"{_number(best.raters, 'rater')})."
    if best.win_share.low <= 0.5 <= best.win_share.high:
        told += " That can be chance: the interval contains 50 %."
    return told


def remarks(board: Board) -> list[str]:
    """Return what a reader must know about the votes, a sentence each."""
    said = []
    if board.never_lost:
        names = ", ".join(board.never_lost)
        said.append(
            f"Never lost half a vote to the others: {names}. Nothing but the ridge keeps such a "
            "score from growing, so that its upper end means little."
        )
    if board.influence is not None:
        if board.influence.order_holds:
            said.append("No single rater changes the order.")
        else:
            said.append("The order depends on single raters: without one of them it is another.")
        said.append(
            f"Without any one rater no score moves by more than {board.influence.largest_shift} points."
        )
    effects = board.effects
    if effects.left_share is not None:
        said.append(
            f"Of two equal replies the left one is preferred in {_percent(effects.left_share.value)} % "
            f"of votes (95 % {_between(effects.left_share)}); scores are free of it."
        )
    if effects.longer_share is not None:
        said.append(
            f"The longer reply won {_percent(effects.longer_share.value)} % of "
            f"{_number(effects.longer_votes, 'decided vote')} (95 % {_between(effects.longer_share)}); "
            "scores are not free of it."
        )
    return said


def command(board: Board) -> str:
    """Return the command that makes this board again from the store, as JSON."""
    words = [*PROGRAM.split(), "board"]
    if board.as_of is not None:
        words += ["--as-of", _time(board)]
    plain, settings = Settings(), board.settings
    for name in Settings.model_fields:
        if getattr(settings, name) != getattr(plain, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    filters = board.filters
    if filters.kind != Filters().kind:
        words += ["--kind", filters.kind]
    for option, values in (
        ("--language", filters.languages),
        ("--topic", filters.topics),
        ("--rater-group", filters.rater_groups),
        ("--admit", filters.admit),
    ):
        for value in values:
            words.append(f"{option}={value}")
    for option, wanted in (("--image", filters.has_image), ("--reasoning", filters.with_reasoning)):
        if wanted is not None:
            words += [option, "with" if wanted else "without"]
    return shlex.join(words)


# --- Files ---------------------------------------------------------------------------------------


def to_json(board: Board) -> str:
    """Return all of the board."""
    return board.model_dump_json(indent=2) + "\n"


def to_markdown(board: Board) -> str:
    """Return the head sentence, the tables, and what is needed to make the board again."""
    lines = [_plain(sentence(board)), ""]
    if board.models:
        lines += [*_markdown(_models(board, readable=True)), ""]
        lines += ["Pairs, seen from the first:", "", *_markdown(_pairs(board, readable=True)), ""]
    for remark in remarks(board):
        lines += [f"- {_plain(remark)}"]
    if board.models:
        lines += [""]
    lines += _judge_markdown(board)
    lines += [_caption(board)]
    return "\n".join(lines) + "\n"


def to_csv(board: Board, table: str = "models") -> str:
    """Return one of the `TABLES`. Intervals are two columns; shares are from 0 to 1."""
    written = io.StringIO(newline="")
    writer = csv.writer(written, lineterminator="\n")
    writer.writerows([_guarded(cell) for cell in row] for row in TABLES[table](board))
    return written.getvalue()


def _columns(name: str, estimate: Estimate | None) -> Mapping[str, Cell]:
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _share(name: str, estimate: Estimate | None, *, readable: bool) -> Mapping[str, Cell]:
    if not readable:
        return _columns(name, estimate)
    if estimate is None:
        return {name: None}
    return {name: f"{_percent(estimate.value)} % ({_between(estimate)})"}


def _standing(row: ModelRow, *, readable: bool) -> Mapping[str, Cell]:
    """Return the columns of rank, name and score."""
    if not readable:
        ranks = {"rank": row.rank, "rank_low": row.rank_low, "rank_high": row.rank_high}
        return {**ranks, "model": row.model, **_columns("score", row.score)}
    if row.rank is None or row.score is None:
        return {"rank": None, "model": row.model, "score": None}
    certain = row.rank_low == row.rank_high
    score = row.score
    return {
        "rank": str(row.rank) if certain else f"{row.rank} ({row.rank_low}–{row.rank_high})",
        "model": row.model,
        "score": f"{score.value:.0f} ({score.low:.0f}–{score.high:.0f})",
    }


def _models(board: Board, *, readable: bool = False) -> list[list[Cell]]:
    return _with_head(
        [
            {
                **_standing(row, readable=readable),
                **_counts(row),
                **_share("win_share", row.win_share, readable=readable),
                **_share("unacceptable_share", row.unacceptable_share, readable=readable),
            }
            for row in board.models
        ]
    )


def _pairs(board: Board, *, readable: bool = False) -> list[list[Cell]]:
    return _with_head(
        [
            {
                "first": pair.first,
                "second": pair.second,
                **_counts(pair),
                **_share("win_share", pair.win_share, readable=readable),
            }
            for pair in board.pairs
        ]
    )


def _counts(row: ModelRow | Pair) -> Mapping[str, Cell]:
    names = ("votes", "raters", "wins", "losses", "ties", "neither")
    return {name: getattr(row, name) for name in names}


def _judge(board: Board) -> list[list[Cell]]:
    rows: list[list[Cell]] = [["person", "judge", "votes"]]
    for said, inner in board.judge.table.items():
        rows += [[said.value, judged.value, votes] for judged, votes in inner.items()]
    return rows


TABLES: Mapping[str, Callable[[Board], list[list[Cell]]]] = MappingProxyType(
    {"models": _models, "pairs": _pairs, "judge": _judge}
)
"""What `to_csv` can write: one row for each model, each pair, or each two answers of person and judge."""


def _with_head(rows: Sequence[Mapping[str, Cell]]) -> list[list[Cell]]:
    return [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []


def _markdown(rows: Iterable[Sequence[Cell]]) -> list[str]:
    head, *body = rows
    lines = [_line([str(cell).replace("_", " ") for cell in head]), "|---" * len(head) + "|"]
    return lines + [_line(row) for row in body]


def _line(row: Sequence[Cell]) -> str:
    return "| " + " | ".join("–" if cell is None else _plain(str(cell)) for cell in row) + " |"


def _judge_markdown(board: Board) -> list[str]:
    judge = board.judge
    if not judge.votes:
        return []
    told = f"People and the judge on the same {_number(judge.votes, 'pair')} of replies"
    told += f" ({_number(judge.raters, 'rater')})"
    measures = [
        f"{name} {shown}"
        for name, shown in (
            ("same answer", _told(judge.raw, percent=True)),
            ("kappa", _told(judge.kappa)),
            ("AC1", _told(judge.ac1)),
            ("the preferred reply has the higher reward", _told(judge.reward_share, percent=True)),
        )
        if shown
    ]
    rows: list[list[Cell]] = [["person \\ judge", *_SAID.values()]]
    rows += [[_SAID[said], *inner.values()] for said, inner in judge.table.items()]
    return [f"{told}: {'; '.join(measures)}.", "", *_markdown(rows), ""]


def _told(estimate: Estimate | None, *, percent: bool = False) -> str:
    if estimate is None:
        return ""
    if percent:
        return f"{_percent(estimate.value)} % (95 % {_between(estimate)})"
    return f"{estimate.value:.2f} (95 % {estimate.low:.2f} to {estimate.high:.2f})"


def _caption(board: Board) -> str:
    left_out = {name: count for name, count in board.left_out.model_dump().items() if count}
    flags = ", ".join(f"{_plain(name)} {count}" for name, count in board.flags.items())
    told = f"{_number(board.votes, 'vote')} of {_number(board.raters, 'rater')}"
    if left_out:
        reasons = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in left_out.items())
        told += f"; left out: {reasons}" + (f" ({flags})" if flags else "")
    when = "all votes" if board.as_of is None else f"as of {_time(board)}"
    return (
        f"{told}. Votes {board.vote_set[:12]}, {when}, code {board.code}, seed {board.settings.seed}, "
        f"{board.settings.fits} resamples of raters. Again: `{command(board).replace('`', '')}`"
    )


# --- Numbers and names ---------------------------------------------------------------------------


def _time(board: Board) -> str:
    assert board.as_of is not None
    return board.as_of.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _percent(share: float) -> int:
    return round(share * 100)


def _between(estimate: Estimate) -> str:
    return f"{_percent(estimate.low)}–{_percent(estimate.high)}"


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it stands, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _guarded(cell: Cell) -> Cell:
    """Return a cell that no spreadsheet runs as a formula."""
    if isinstance(cell, str) and cell.lstrip("'").lstrip().startswith(_FORMULA):
        return f"'{cell}"
    return cell
