"""Renders the results: preferences, their uncertainty, and their votes.

`results_html` draws a `Board` alone, so that it can be tested without a browser and without votes.
"""

import json
from collections.abc import Callable
from datetime import UTC
from functools import cache
from typing import Any

from compeer_core.stats import Estimate
from compeer_core.taxonomy import Preference
from compeer_core.votes.battles import Flag
from compeer_core.votes.leaderboard.board import (
    Board,
    Effects,
    Filters,
    Influence,
    LeftOut,
    ModelRow,
    Pair,
    Settings,
    Status,
)
from compeer_core.votes.leaderboard.plot import PlotWords, to_svg
from compeer_core.votes.leaderboard.text import command
from ui_components.results.boards import Choices
from ui_components.results.filters import write_filters
from ui_components.shared.models import Models
from ui_components.shared.templating import render
from ui_components.shared.terms import explained, terms_line
from ui_components.shared.texts import ASSETS, LANGUAGES, Texts, load_texts

MEASURED = ASSETS / "results" / "reading_small.json"
JSON_COMMAND = "{} --format json --output board.json"

Named = Callable[[str], str]


def titles(models: Models) -> Named:
    """Return a function from a model's name to its title; by default the name itself."""
    entries = models.entries("policy")
    known = {entry.name: entry.title or entry.name for entry in entries}
    doubled = {title for title in known.values() if list(known.values()).count(title) > 1}
    return lambda name: name if known.get(name, name) in doubled else known.get(name, name)


# --- states --------------------------------------------------------------------------------------


def counting_html(languages: tuple[str, ...] = LANGUAGES) -> str:
    """Draw the placeholder before the board is ready, in all languages or in one."""
    return render("results_counting.html", languages=[load_texts(each) for each in languages])


def trouble_html(texts: Texts, sentence: str) -> str:
    """Draw why there is no board, with a retry button."""
    return render("results_trouble.html", t=texts, sentence=sentence)


# --- the form ------------------------------------------------------------------------------------


def filters_html(choices: Choices, filters: Filters, texts: Texts) -> str:
    """Draw the filter form."""
    language = filters.languages[0] if filters.languages else ""
    topic = filters.topics[0] if filters.topics else ""
    presence = {None: "", True: "with", False: "without"}
    anything = ("", texts("results.any"))
    flags = choices.flags or {}
    return render(
        "results_filters.html",
        t=texts,
        key=form_key(choices, texts),
        selects=[
            _select(
                "language",
                texts,
                language,
                [anything, *((each, _language(each, texts)) for each in choices.languages)],
            ),
            _select(
                "image",
                texts,
                presence[filters.has_image],
                [anything, ("with", texts("results.with")), ("without", texts("results.without"))],
            ),
            _select("topic", texts, topic, [anything, *((each, each) for each in choices.topics)]),
            _select(
                "reasoning",
                texts,
                presence[filters.with_reasoning],
                [anything, ("with", texts("results.shown")), ("without", texts("results.hidden"))],
            ),
            _select(
                "kind",
                texts,
                filters.kind,
                [(kind, texts(f"results.kind_{kind}")) for kind in ("blind", "named", "any")],
            ),
        ],
        flags=[
            {
                "name": flag,
                "words": _flag(flag, texts),
                "count": count,
                "on": flag in filters.admit,
            }
            for flag, count in flags.items()
        ],
        admitted=bool(filters.admit),
    )


def form_key(choices: Choices, texts: Texts) -> str:
    """Return a key that changes when the form's choices change."""
    flags = sorted((choices.flags or {}).items())
    return repr((texts.language, choices.languages, choices.topics, flags))


def _select(
    name: str, texts: Texts, chosen: str, options: list[tuple[str, str]]
) -> dict[str, object]:
    return {
        "name": name,
        "label": texts(f"results.filter_{name}"),
        "options": [
            {"value": value, "words": words, "on": value == chosen} for value, words in options
        ],
        # Omit filters with a single choice.
        "useful": len(options) > 2 or any(value == chosen != "" for value, _ in options),
    }


# --- the board -----------------------------------------------------------------------------------


def results_html(board: Board, texts: Texts, models: Models, example: Board | None = None) -> str:
    """Draw a board.

    Args:
        board: The board.
        texts: The words.
        models: For titles, and for the models to compare if there are no votes.
        example: A board of simulated votes to draw below, marked as such.
    """
    named = titles(models)
    query = write_filters(board.filters)
    dated = write_filters(board.filters, as_of=_moment(board))
    text = sentence(board, texts, named)
    return render(
        "results.html",
        t=texts,
        board=_tables(board, texts, named, _plot(board, texts, models, text)),
        query=query,
        dated=dated,
        sentence=text,
        demo=_demo(board, texts),
        measured=_measured(texts, named) if example else "",
        example=_example(example, texts) if example else None,
        advice=_advice(board, texts),
        have=board.comparing_raters
        if board.status is Status.NOT_ENOUGH_RATERS
        else board.comparing,
        needed=board.needed,
        counted=texts(
            "results.counted",
            votes=_count(texts, "vote", board.votes),
            raters=_count(texts, "rater", board.raters),
        ),
        judge=_judge(board, texts),
        left_out=_left_out(board, texts),
        caption=texts(
            "results.caption",
            hash=board.vote_set[:12],
            moment=f"{board.as_of.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if board.as_of else "–",
            code=board.code,
            seed=board.settings.seed,
            fits=board.settings.fits,
        ),
        whole_hash=board.vote_set,
        command=JSON_COMMAND.format(command(board)),
    )


def _tables(board: Board, texts: Texts, named: Named, plot: str) -> dict[str, object]:
    """Draw the parts of a board that the example has too."""
    return {
        "ranked": board.status is Status.RANKED,
        "bare": not board.models,
        "plot": plot,
        "models": [_model(row, texts, named) for row in board.models],
        "terms": terms_line([named(row.model) for row in board.models], texts),
        "never_lost": texts(
            "results.never_lost", models=texts.listed(list(map(named, board.never_lost)))
        )
        if board.never_lost
        else "",
        "matrix": _matrix(board, texts, named),
        "effects": _effects(board.effects, board.influence, texts),
    }


def _example(board: Board, texts: Texts) -> dict[str, object]:
    """Draw the board of simulated votes, with its models named as examples."""

    def named(name: str) -> str:
        return texts("results.example_model", name=name)

    text = sentence(board, texts, named)
    rows = [row.model_copy(update={"model": named(row.model)}) for row in board.models]
    words = PlotWords(title=texts("results.example_plot"), axis=texts("results.plot_axis"))
    plot = to_svg(board.model_copy(update={"models": tuple(rows)}), words, text)
    return _tables(board, texts, named, plot) | {
        "sentence": text,
        "means": texts("results.example_means", votes=board.votes, models=len(rows)),
    }


def _measured(texts: Texts, named: Named) -> str:
    """Name the blind comparison that a language model made of two shipped models."""
    result = _measured_result()
    (metric,) = (each for each in result["metrics"] if each["name"].startswith("preferred over "))
    model, against = result["model"].split(", ")
    return texts(
        "results.measured",
        model=named(model),
        against=named(against),
        share=_percent(metric["value"] / 100, texts),
        between=texts("results.between", low=round(metric["low"]), high=round(metric["high"])),
        messages=metric["n"],
        command=result["command"],
    )


@cache
def _measured_result() -> Any:
    return json.loads(MEASURED.read_text(encoding="utf-8"))


def _demo(board: Board, texts: Texts) -> str:
    """Say that a board ranks models from fewer votes than usual; empty if it does not."""
    usual = Settings()
    is_enough = board.comparing >= usual.min_votes and board.comparing_raters >= usual.min_raters
    if board.status is not Status.RANKED or is_enough:
        return ""
    key = "demo_one" if board.comparing_raters == 1 else "demo"
    return texts(f"results.{key}", votes=usual.min_votes, raters=usual.min_raters)


def sentence(board: Board, texts: Texts, named: Named) -> str:
    """Return the headline, or why there is none."""
    if board.status is Status.NOT_ENOUGH_VOTES:
        return texts("results.not_enough_votes", have=board.comparing, needed=board.needed)
    if board.status is Status.NOT_ENOUGH_RATERS:
        votes = _count(texts, "vote", board.comparing)
        return texts(
            "results.not_enough_raters",
            have=board.comparing_raters,
            needed=board.needed,
            votes=votes,
        )
    if board.status is Status.DISCONNECTED:
        parts = [texts.listed([named(name) for name in part]) for part in board.parts]
        return texts("results.disconnected", parts=texts("results.apart").join(parts))
    best = board.headline
    if best is None:
        return texts("results.all_ties")
    text = texts(
        "results.preferred" if best.win_share.value >= 0.5 else "results.ahead",
        model=named(best.model),
        against=named(best.against),
        share=_percent(best.win_share.value, texts),
        between=_between(best.win_share, texts),
        votes=_count(texts, "vote", best.votes),
        raters=_count(texts, "rater", best.raters),
    )
    if best.win_share.low <= 0.5 <= best.win_share.high:
        text += texts("results.chance")
    return text


def _advice(board: Board, texts: Texts) -> str:
    if board.status is Status.DISCONNECTED:
        return texts("results.advice_disconnected")
    return "" if board.status is Status.RANKED else texts("results.advice_more")


def _plot(board: Board, texts: Texts, models: Models, text: str) -> str:
    named = titles(models)
    rows = [row.model_copy(update={"model": named(row.model)}) for row in board.models]
    if not rows:
        # The models that could be ranked, without scores.
        counts = dict.fromkeys(("votes", "raters", "wins", "losses", "ties", "neither"), 0)
        rows = [
            ModelRow(model=named(entry.name), win_share=None, unacceptable_share=None, **counts)
            for entry in models.entries("policy")
        ]
    words = PlotWords(
        title=texts("results.plot_title"),
        axis=texts("results.plot_axis"),
        not_ranked=texts("results.not_ranked"),
    )
    ranked = board.status is Status.RANKED
    # Without a ranking, the reason is already above the plot.
    below = text if ranked else texts("results.no_scores")
    return to_svg(board.model_copy(update={"models": tuple(rows)}), words, below)


def _model(row: ModelRow, texts: Texts, named: Named) -> dict[str, object]:
    score = row.score
    return {
        "name": explained(named(row.model), texts),
        "rank": "–" if row.rank is None else str(row.rank),
        "ranks": ""
        if row.rank is None
        else str(row.rank_low)
        if row.rank_low == row.rank_high
        else f"{row.rank_low}–{row.rank_high}",
        "score": "–" if score is None else f"{score.value:.0f}",
        "scores": ""
        if score is None
        else "–"
        if score.low == score.high
        else f"{score.low:.0f}–{score.high:.0f}",
        "votes": row.votes,
        "raters": row.raters,
        "wins": row.wins,
        "losses": row.losses,
        "ties": row.ties,
        "neither": row.neither,
        "share": _share(row.win_share, texts),
        "unacceptable": _share(row.unacceptable_share, texts),
        "unacceptable_bar": round(100 * row.unacceptable_share.value)
        if row.unacceptable_share
        else 0,
    }


def _matrix(board: Board, texts: Texts, named: Named) -> dict[str, object] | None:
    if not board.pairs:
        return None
    names = [row.model for row in board.models]
    cells: dict[tuple[str, str], dict[str, object]] = {}
    for pair in board.pairs:
        cells[pair.first, pair.second] = _cell(pair, texts, mirrored=False)
        cells[pair.second, pair.first] = _cell(pair, texts, mirrored=True)
    return {
        "names": [explained(named(name), texts) for name in names],
        "rows": [
            {
                "name": explained(named(first), texts),
                "cells": [
                    None if first == second else cells.get((first, second), {"votes": 0})
                    for second in names
                ],
            }
            for first in names
        ],
    }


def _cell(pair: Pair, texts: Texts, *, mirrored: bool) -> dict[str, object]:
    wins, losses = (pair.losses, pair.wins) if mirrored else (pair.wins, pair.losses)
    share = None
    if pair.win_share is not None:
        share = 1 - pair.win_share.value if mirrored else pair.win_share.value
    return {
        "votes": pair.votes,
        "share": "–" if share is None else _percent(share, texts),
        "shade": 50 if share is None else round(share * 100),
        "decided": f"{wins} : {losses}",
        "rest": texts("results.cell_rest", ties=pair.ties, neither=pair.neither),
    }


def _judge(board: Board, texts: Texts) -> dict[str, object] | None:
    judge = board.judge
    if not judge.votes and not judge.reward_votes:
        return None
    measures = [
        (texts("results.measure_raw"), _share(judge.raw, texts), ""),
        (texts("results.measure_kappa"), _number(judge.kappa, texts), texts("results.kappa_means")),
        (texts("results.measure_ac1"), _number(judge.ac1, texts), texts("results.ac1_means")),
        (
            texts("results.measure_reward"),
            _share(judge.reward_share, texts),
            texts("results.reward_means", votes=_count(texts, "vote", judge.reward_votes)),
        ),
    ]
    return {
        "told": texts(
            "results.judge_told",
            votes=_count(texts, "vote", judge.votes),
            raters=_count(texts, "rater", judge.raters),
        ),
        "columns": [texts(f"results.said_{said}") for said in Preference],
        "rows": [
            {
                "said": texts(f"results.said_{said}"),
                "cells": [
                    {"votes": judge.table[said][judged], "same": said is judged}
                    for judged in Preference
                ],
            }
            for said in Preference
        ]
        if judge.votes
        else [],
        "measures": [
            {"name": name, "value": value or texts("results.unknown"), "means": means}
            for name, value, means in measures
        ],
    }


def _effects(effects: Effects, influence: Influence | None, texts: Texts) -> list[dict[str, str]]:
    unknown = texts("results.effect_unknown")
    left, longer = effects.left_share, effects.longer_share
    cards = {
        "position": unknown
        if left is None
        else texts(
            "results.position_told",
            share=_percent(left.value, texts),
            between=_between(left, texts),
        ),
        "length": unknown
        if longer is None
        else texts(
            "results.length_told",
            share=_percent(longer.value, texts),
            between=_between(longer, texts),
            votes=_count(texts, "decided", effects.longer_votes),
        ),
        "person": unknown,
    }
    if influence is not None:
        text = "results.person_holds" if influence.order_holds else "results.person_changes"
        cards["person"] = texts(text, points=influence.largest_shift)
    return [
        {"title": texts(f"results.effect_{name}"), "told": text} for name, text in cards.items()
    ]


def _left_out(board: Board, texts: Texts) -> list[dict[str, object]]:
    counts = {name: getattr(board.left_out, name) for name in LeftOut.model_fields}
    other = "names_known" if board.filters.kind == "blind" else "names_hidden"
    return [
        {
            "reason": texts(f"results.left_{other if name == 'other_kind' else name}"),
            "votes": votes,
            "flags": [
                {"reason": _flag(flag, texts), "votes": number}
                for flag, number in board.flags.items()
            ]
            if name == "flagged"
            else [],
        }
        for name, votes in counts.items()
        if votes
    ]


# --- numbers -------------------------------------------------------------------------------------


def _language(code: str, texts: Texts) -> str:
    return texts("results.no_language") if code == "und" else texts.label("languages", code)


def _flag(flag: str, texts: Texts) -> str:
    return texts(f"results.flag_{flag}") if flag in set(Flag) else flag


def _moment(board: Board) -> str:
    assert board.as_of is not None
    return board.as_of.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _count(texts: Texts, what: str, number: int) -> str:
    return texts(f"results.one_{what}" if number == 1 else f"results.many_{what}", number=number)


def _percent(share: float, texts: Texts) -> str:
    return texts("results.percent", number=round(share * 100))


def _between(estimate: Estimate, texts: Texts) -> str:
    return texts("results.between", low=round(estimate.low * 100), high=round(estimate.high * 100))


def _share(estimate: Estimate | None, texts: Texts) -> str:
    if estimate is None:
        return ""
    return f"{_percent(estimate.value, texts)} ({_between(estimate, texts)})"


def _number(estimate: Estimate | None, texts: Texts) -> str:
    if estimate is None:
        return ""
    low, high = (f"{each:.2f}" for each in (estimate.low, estimate.high))
    return texts("results.number_between", value=f"{estimate.value:.2f}", low=low, high=high)
