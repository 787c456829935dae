"""A board as English text, JSON, Markdown and CSV.

The same board gives the same bytes. Model names are untrusted: they are escaped so that they cannot end
a table cell, run as a spreadsheet formula or be parsed as a tag.
"""

import csv
import io
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC
from types import MappingProxyType

from compeer_core.row_files import guarded
from compeer_core.stats import Estimate
from compeer_core.taxonomy import Preference
from compeer_core.votes.leaderboard.board import Board, Filters, ModelRow, Pair, Settings, Status

PROGRAM = "python -m compeer_core.votes"
Cell = str | int | float | None

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~&])")
_ANSWERS = MappingProxyType(
    {
        Preference.FIRST: "left",
        Preference.SECOND: "right",
        Preference.BOTH: "about equal",
        Preference.NEITHER: "neither",
    }
)


# --- Sentences ---------------------------------------------------------------------------------------


def sentence(board: Board) -> str:
    """Return the result of the board, or why there is none, in one or two sentences.

    For instance: *urp is preferred to base in 64 % of decided votes (95 % CI 55–72, 143 votes, 31
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
        text = f"{best.model} is preferred to {best.against} in {share}"
    else:
        text = f"{best.model} ranks first after correction for position, but won {share}"
        text += f" against {best.against}"
    text += f" (95 % CI {_between(best.win_share)}, {_number(best.votes, 'vote')}, "
    text += f"{_number(best.raters, 'rater')})."
    if best.win_share.low <= 0.5 <= best.win_share.high:
        text += " This may be chance: the interval contains 50 %."
    return text


def remarks(board: Board) -> list[str]:
    """Return what a reader must know to interpret the board, one sentence each."""
    sentences = []
    if board.never_lost:
        names = ", ".join(board.never_lost)
        sentences.append(
            f"Never lost even half a vote to the others: {names}. Only the ridge bounds such a score, "
            "so its upper end means little."
        )
    if board.influence is not None:
        if board.influence.order_holds:
            sentences.append("No single rater changes the order.")
        else:
            sentences.append("The order depends on single raters: leaving out one changes it.")
        sentences.append(
            "Leaving out any one rater changes no score by more than "
            f"{board.influence.largest_shift} points."
        )
    effects = board.effects
    if effects.left_share is not None:
        sentences.append(
            f"Of two equal replies the left one is preferred in {_percent(effects.left_share.value)} % "
            f"of votes (95 % CI {_between(effects.left_share)}); scores are corrected for it."
        )
    if effects.longer_share is not None:
        sentences.append(
            f"The longer reply won {_percent(effects.longer_share.value)} % of "
            f"{_number(effects.longer_votes, 'decided vote')} (95 % CI "
            f"{_between(effects.longer_share)}); scores are not corrected for it."
        )
    return sentences


def command(board: Board) -> str:
    """Return the command that reproduces this board from the store."""
    words = [*PROGRAM.split(), "board"]
    if board.as_of is not None:
        words += ["--as-of", _time(board)]
    defaults, settings = Settings(), board.settings
    for name in Settings.model_fields:
        if getattr(settings, name) != getattr(defaults, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    filters = board.filters
    if filters.kind != Filters().kind:
        words += ["--kind", filters.kind]
    for option, values in (
        ("--language", filters.languages),
        ("--topic", filters.topics),
        ("--admit", filters.admit),
    ):
        for value in values:
            words.append(f"{option}={value}")
    for option, flag in (("--image", filters.has_image), ("--reasoning", filters.with_reasoning)):
        if flag is not None:
            words += [option, "with" if flag else "without"]
    return shlex.join(words)


# --- Files ---------------------------------------------------------------------------------------


def to_json(board: Board) -> str:
    """Return the whole board."""
    return board.model_dump_json(indent=2) + "\n"


def to_markdown(board: Board) -> str:
    """Return the headline, the tables, and the command that reproduces the board."""
    lines = [_plain(sentence(board)), ""]
    if board.models:
        lines += [*_markdown(_models(board, readable=True)), ""]
        lines += [
            "Pairs, from the point of view of the first model:",
            "",
            *_markdown(_pairs(board, readable=True)),
            "",
        ]
    for remark in remarks(board):
        lines += [f"- {_plain(remark)}"]
    if board.models:
        lines += [""]
    lines += _judge_markdown(board)
    lines += [_caption(board)]
    return "\n".join(lines) + "\n"


def to_csv(board: Board, table: str = "models") -> str:
    """Return one of the `TABLES`. Intervals are two columns; shares are from 0 to 1."""
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(
        [guarded(cell) if isinstance(cell, str) else cell for cell in row]
        for row in TABLES[table](board)
    )
    return file.getvalue()


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
    for person, inner in board.judge.table.items():
        rows += [[person.value, judge.value, votes] for judge, votes in inner.items()]
    return rows


TABLES: Mapping[str, Callable[[Board], list[list[Cell]]]] = MappingProxyType(
    {"models": _models, "pairs": _pairs, "judge": _judge}
)
"""The tables of `to_csv`: a row for each model, pair of models, or pair of person's and judge's answers."""


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
    heading = f"People and the judge on the same {_number(judge.votes, 'pair')} of replies"
    heading += f" ({_number(judge.raters, 'rater')})"
    measures = [
        f"{name} {_with_interval(measure, percent=percent)}"
        for name, measure, percent in (
            ("same answer", judge.raw, True),
            ("kappa", judge.kappa, False),
            ("AC1", judge.ac1, False),
            ("the preferred reply has the higher reward", judge.reward_share, True),
        )
        if measure is not None
    ]
    rows: list[list[Cell]] = [["person \\ judge", *_ANSWERS.values()]]
    rows += [[_ANSWERS[person], *inner.values()] for person, inner in judge.table.items()]
    return [f"{heading}: {'; '.join(measures)}.", "", *_markdown(rows), ""]


def _with_interval(estimate: Estimate, *, percent: bool) -> str:
    if percent:
        return f"{_percent(estimate.value)} % (95 % CI {_between(estimate)})"
    return f"{estimate.value:.2f} (95 % CI {estimate.low:.2f} to {estimate.high:.2f})"


def _caption(board: Board) -> str:
    left_out = {name: count for name, count in board.left_out.model_dump().items() if count}
    flags = ", ".join(f"{_plain(name)} {count}" for name, count in board.flags.items())
    counts = f"{_number(board.votes, 'vote')} of {_number(board.raters, 'rater')}"
    if left_out:
        reasons = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in left_out.items())
        counts += f"; left out: {reasons}" + (f" ({flags})" if flags else "")
    when = "all votes" if board.as_of is None else f"as of {_time(board)}"
    return (
        f"{counts}. Vote set {board.vote_set[:12]}, {when}, code {board.code}, "
        f"seed {board.settings.seed}, {board.settings.fits} resamples of raters. "
        f"Reproduce: `{command(board).replace('`', '')}`"
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
    """Return a text that Markdown shows literally, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
