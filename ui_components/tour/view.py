"""The values for the tour's templates: its contents in one language."""

from typing import Any

from compeer_core.judgement import StepVerdict
from compeer_core.reasoning import STEPS, Part, Unreadable
from compeer_core.safety import load_help_lines
from compeer_core.tour.contents import Tour
from compeer_core.tour.plan import Case, Opinion
from compeer_core.tour.recordings import Recording, StepJudged
from compeer_core.votes.leaderboard.board import Settings
from ui_components.chat.reply_words import signed
from ui_components.shared.help import lines_for
from ui_components.shared.session_store import KEEP_SECONDS
from ui_components.shared.texts import Texts

STEP_COUNT = 6
HELP_LINES = 6
"""As many as fit on the last step; the strip at the top of the page has all."""


def tour_view(tour: Tour, texts: Texts) -> dict[str, Any]:
    """Return all values of the tour's templates except the frame's texts."""
    numbers = range(1, STEP_COUNT + 1)
    settings = Settings()
    return {
        "slides": [{"number": n, "name": texts(f"tour.name_{n}")} for n in numbers],
        "opening": _opening(tour, texts),
        "failure": _failure(tour, texts),
        "cases": [_case(tour, case, texts) for case in tour.plan.cases],
        "tally": _tally(tour, texts),
        "judge": _judge(tour, texts),
        "measured": _measured(tour, texts),
        "paper": {name: figure.value for name, figure in tour.paper.items()},
        "paper_place": {name: figure.place for name, figure in tour.paper.items()},
        "paper_address": tour.paper_address,
        "read_by": tour.read_by.in_language(texts.language),
        "rules": {"votes": settings.min_votes, "raters": settings.min_raters},
        "limits": _limits(tour, texts),
        "hours": round(KEEP_SECONDS / 3600),
        "lines": lines_for(texts)[:HELP_LINES],
        "lines_checked": min(line.checked for line in load_help_lines().lines).isoformat(),
        "lines_confirmed": not any(
            line.confirmed.startswith("not yet") for line in load_help_lines().lines
        ),
    }


# --- recorded turns ------------------------------------------------------------------------------


def _opening(tour: Tour, texts: Texts) -> dict[str, Any]:
    """The first newest turn without a mistake, by the reader; the first of all if there is none."""
    good = tour.successes()
    recording = (good or tour.newest())[0]
    rule = "tour.rule_success" if good else "tour.rule_no_success"
    return _said(tour.plan.case(recording.case), texts) | {
        "turn": _turn(tour, recording, texts),
        "rule": texts(rule, good=len(good), count=len(tour.plan.cases)),
        "chosen": texts("tour.chosen", seed=tour.plan.seed),
    }


def _failure(tour: Tour, texts: Texts) -> dict[str, Any] | None:
    """The first newest step that the reader calls incorrect, else the first reply; None without one."""
    recording, part = next(iter(tour.failures()), (None, None))
    if recording is None or part is None:
        return None
    return _said(tour.plan.case(recording.case), texts) | {
        "part": _part(tour, recording, part, texts),
        "turn": _turn(tour, recording, texts),
    }


def _case(tour: Tour, case: Case, texts: Texts) -> dict[str, Any]:
    """A situation with the turns of the last two stages."""
    language = texts.language
    turns = [
        _turn(tour, tour.recordings[case.name, stage.name], texts)
        | {"title": stage.title.in_language(language), "what": stage.what.in_language(language)}
        for stage in tour.stages()[-2:]
    ]
    # Which reply comes first alternates, so that its place says nothing.
    swapped = tour.plan.cases.index(case) % 2 == 0
    return _said(case, texts) | {"turns": turns, "blind": turns[::-1] if swapped else turns}


def _said(case: Case, texts: Texts) -> dict[str, Any]:
    return {
        "name": case.name,
        "title": case.title.in_language(texts.language),
        "said": case.said.en,
        "translation": case.said.zh if texts.language == "zh" else "",
    }


def _turn(tour: Tour, recording: Recording, texts: Texts) -> dict[str, Any]:
    reading = recording.reading
    note = tour.notes.get((recording.case, recording.stage))
    return {
        "steps": [_part(tour, recording, part, texts) for part in STEPS]
        if reading.is_complete
        else [],
        "reply": reading.turn.reply if reading.is_complete else recording.raw,
        "summary": note.summary.in_language(texts.language) if note else "",
        "score": _score(recording, texts),
        "shipped": recording.model.shipped,
        "provenance": texts(
            "tour.recorded",
            date=recording.date.isoformat(),
            title=recording.model.title,
            hash=texts("tour.hash", hash=recording.model.short_hash),
            seed=recording.sampling.seed,
            temperature=recording.sampling.temperature,
        ),
        "file": f"tour/{recording.file_name}",
        "card": recording.model.card,
    }


def _part(tour: Tour, recording: Recording, part: Part, texts: Texts) -> dict[str, Any]:
    """A step, or the reply, of a complete turn."""
    turn = recording.reading.turn
    opinion = tour.opinion(recording, part)
    judged = recording.judged.step(part) if recording.judged else None
    is_step = part in STEPS
    step = getattr(turn.reasoning, part.value) if is_step else None
    return {
        "part": part.value,
        "number": [*Part].index(part) + 1,
        "title": texts(f"inspector.{part}") if is_step else texts("tour.supporter"),
        "text": step.text if step else turn.reply,
        "labels": _labels(step, part, texts) if step else [],
        "reader": _reader(opinion, texts),
        "judge": _verdict(judged, texts),
        "outcome": _outcome(opinion, judged, texts) if is_step else texts("tour.judge_reply"),
    }


def _labels(step: Any, part: Part, texts: Texts) -> list[dict[str, str]]:
    shown = {
        Part.HISTORY: ("stage",),
        Part.EMOTION: ("emotion", "intensity"),
        Part.STRATEGY: ("strategy",),
    }[part]
    labels = []
    for name in shown:
        value = getattr(step, name)
        if isinstance(value, Unreadable):
            words = value.text or texts("inspector.no_label")
        else:
            words = texts.label_words(name, value)
        labels.append({"name": texts.label_title(name), "value": words})
    return labels


def _reader(opinion: Opinion | None, texts: Texts) -> dict[str, str] | None:
    if opinion is None:
        return None
    kind = "right" if opinion.right else "wrong"
    words = texts("tour.reader_right") if opinion.right else texts("tour.reader_wrong")
    return {
        "kind": kind,
        "sign": _sign(opinion.right),
        "words": words,
        "why": opinion.why.in_language(texts.language),
    }


def _verdict(judged: StepJudged | None, texts: Texts) -> dict[str, str]:
    if judged is None or judged.correct is None:
        return {"kind": "none", "sign": "–", "words": texts("tour.judge_silent"), "sure": ""}
    likely = judged.probability_correct
    if likely is not None and StepVerdict(judged.correct, likely).is_unsure:
        likely_correct = texts("inspector.unsure_detail", percent=round(100 * likely))
        words = texts("inspector.unsure")
        return {"kind": "unsure", "sign": "?", "words": words, "sure": likely_correct}
    sure = ""
    if likely is not None:
        percent = round(100 * (likely if judged.correct else 1 - likely))
        sure = texts("tour.judge_sure", percent=percent)
    words = texts("tour.judge_right") if judged.correct else texts("tour.judge_wrong")
    kind = "right" if judged.correct else "wrong"
    return {"kind": kind, "sign": _sign(judged.correct), "words": words, "sure": sure}


def _outcome(opinion: Opinion | None, judged: StepJudged | None, texts: Texts) -> str:
    if opinion is None or judged is None or judged.correct is None:
        return texts("tour.judge_unknown")
    if opinion.right == judged.correct:
        return texts("tour.judge_agrees") if opinion.right else texts("tour.judge_found")
    return texts("tour.judge_alarm") if opinion.right else texts("tour.judge_missed")


def _score(recording: Recording, texts: Texts) -> str:
    judged = recording.judged
    if judged is None or judged.total is None:
        return texts("tour.score_none")
    return texts("tour.score_of", total=signed(judged.total), maximum=judged.maximum)


def _sign(right: bool) -> str:
    return "✓" if right else "✗"


# --- numbers -------------------------------------------------------------------------------------


def _tally(tour: Tour, texts: Texts) -> str:
    counted = tour.tally()
    return texts(
        "tour.tally_text",
        wrong=counted.wrong,
        steps=counted.steps,
        noticed=counted.noticed,
        alarms=counted.false_alarms,
    )


def _judge(tour: Tour, texts: Texts) -> dict[str, Any]:
    """The shipped judge's quality, and whether it differs from chance."""
    figures = tour.figures
    order = {part: figures[f"judge_order_{part}"] for part in STEPS}
    sensitivity = {part: figures[f"judge_found_{part}"] for part in STEPS}
    a_guess = all(figure.low is None or figure.low <= 50 for figure in order.values())
    first = order[Part.HISTORY]
    counts = [figure.n for figure in order.values()]
    turns = dict.fromkeys(
        f"{n:,}" for n in (min(counts), max(counts))
    )  # one number if they are equal
    judges = [
        recording.judged.judge
        for recording in tour.recordings.values()
        if recording.judged is not None
    ]
    return {
        "words": texts("tour.judge_guess") if a_guess else texts("tour.judge_better"),
        "caption": texts("tour.judge_table", model=first.model, n="–".join(turns)),
        "labels": first.labels,
        "file": first.file,
        "card": judges[0].card if judges else "",
        "rows": [
            {
                "title": texts(f"inspector.{part}"),
                "order": order[part].text,
                "interval": order[part].interval,
                "found": sensitivity[part].text,
            }
            for part in STEPS
        ],
    }


def _measured(tour: Tour, texts: Texts) -> dict[str, Any]:
    """What two policies score, blind."""
    figures = tour.figures
    before, after, preferred = (
        figures["answers_before"],
        figures["answers_after"],
        figures["preferred"],
    )
    return {
        "caption": texts("tour.measured_table", n=after.n),
        "labels": after.labels,
        "file": after.file,
        "models": (before.model, after.model),
        "rows": [
            {
                "title": texts(f"tour.measured_{name}"),
                "cells": (figures[f"{name}_before"], figures[f"{name}_after"]),
            }
            for name in ("answers", "hurt")
        ],
        "preferred": texts(
            "tour.preferred",
            before=before.model,
            after=preferred.model,
            value=preferred.text,
            interval=preferred.interval,
            n=preferred.n,
        ),
        "preferred_file": preferred.file,
    }


def _limits(tour: Tour, texts: Texts) -> list[dict[str, str]]:
    """Return each limit with its source file."""
    model = tour.newest()[0].model
    found = {part.value: tour.figures[f"judge_found_{part}"].text for part in STEPS}
    return [
        {"words": texts("tour.limit_1"), "file": model.card},
        {
            "words": texts("tour.limit_2", **found),
            "file": tour.figures["judge_found_history"].file,
        },
        {"words": texts("tour.limit_3"), "file": model.card},
        {"words": texts("tour.limit_4"), "file": ""},
        {"words": texts("tour.limit_5", licence=model.licence), "file": model.card},
    ]
