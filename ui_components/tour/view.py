"""The values for the tour's templates: its contents in one language."""

from collections.abc import Mapping
from typing import Any

from compeer_core.reasoning import STEPS, Part, Reading, Unreadable
from compeer_core.safety import load_help_lines
from compeer_core.tour.contents import Tour
from compeer_core.tour.figures import Figure
from compeer_core.tour.plan import Case, Opinion
from compeer_core.tour.recordings import Recording, StepJudged
from compeer_core.votes.leaderboard.board import Settings
from ui_components.chat.reply_words import signed
from ui_components.shared.help import lines_for
from ui_components.shared.session_store import KEEP_SECONDS
from ui_components.shared.terms import explained, terms_line
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
        "cases": [_case(tour, case, texts) for case in tour.plan.cases],
        "missing": texts.listed(
            [f"“{stage.title.in_language(texts.language)}”" for stage in tour.missing_stages()]
        ),
        "close_up": _close_up(tour, texts),
        "tally": _tally(tour, texts),
        "judge": _judge(tour, texts),
        "learnt": _learnt(tour, texts),
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


def _case(tour: Tour, case: Case, texts: Texts) -> dict[str, Any]:
    turns = [
        _turn(tour, tour.recording(case, stage.name), texts)
        | {
            "title": stage.title.in_language(texts.language),
            "what": stage.what.in_language(texts.language),
        }
        for stage in tour.stages()
    ]
    return {
        "name": case.name,
        "title": case.title.in_language(texts.language),
        "said": case.said.en,
        "translation": case.said.zh if texts.language == "zh" else "",
        "turns": turns,
        "shown": next(turn for turn in turns if turn["stage"] == tour.plan.shown),
    }


# --- a recorded turn -----------------------------------------------------------------------------


def _turn(tour: Tour, recording: Recording, texts: Texts) -> dict[str, Any]:
    reading = recording.reading
    note = tour.notes.get((recording.case, recording.stage))
    return {
        "stage": recording.stage,
        "complete": reading.is_complete,
        "steps": [_step(tour, recording, reading, part, texts) for part in STEPS]
        if reading.is_complete
        else [],
        "reply": reading.turn.reply if reading.is_complete else recording.raw,
        "raw": recording.raw,
        "summary": note.summary.in_language(texts.language) if note else "",
        "reply_note": note.reply.in_language(texts.language) if note and note.reply else "",
        "score": _score(recording, texts),
        "model": recording.model.title,
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


def _step(
    tour: Tour, recording: Recording, reading: Reading, part: Part, texts: Texts
) -> dict[str, Any]:
    step = getattr(reading.turn.reasoning, part.value)
    opinion = tour.opinion(recording, part)
    judged = recording.judged.step(part) if recording.judged else None
    return {
        "part": part.value,
        "number": STEPS.index(part) + 1,
        "title": texts(f"inspector.{part}"),
        "text": step.text,
        "labels": _labels(step, part, texts),
        "reader": _reader(opinion, texts),
        "judge": _verdict(judged, texts),
        "outcome": _outcome(opinion, judged, texts),
    }


def _labels(step: Any, part: Part, texts: Texts) -> list[dict[str, str]]:
    shown = {
        Part.HISTORY: (("stage", "stage", "stages"),),
        Part.EMOTION: (("emotion", "feeling", "emotions"), ("intensity", "intensity", "")),
        Part.STRATEGY: (("strategy", "chosen", "strategies"),),
    }[part]
    labels = []
    for name, title, vocabulary in shown:
        value = getattr(step, name)
        if isinstance(value, Unreadable):
            words = value.text or texts("inspector.no_label")
        elif name == "intensity":
            words = texts("inspector.intensity_of", value=value)
        else:
            words = texts.label(vocabulary, str(value))
        labels.append({"name": texts(f"inspector.{title}"), "value": words})
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


def _score(recording: Recording, texts: Texts) -> dict[str, str]:
    judged = recording.judged
    if judged is None or judged.total is None:
        return {"value": texts("tour.score_none"), "why": ""}
    total = signed(judged.total)
    return {
        "value": texts("tour.score_of", total=total, maximum=judged.maximum),
        "why": "" if judged.asked else texts("tour.score_rule"),
    }


def _sign(right: bool) -> str:
    return "✓" if right else "✗"


# --- close up ------------------------------------------------------------------------------------


def _close_up(tour: Tour, texts: Texts) -> dict[str, Any] | None:
    """The incorrect step that is explained; None if the reader has not marked it incorrect."""
    chosen = tour.plan.close_up
    case = tour.plan.case(chosen.case)
    recording = tour.recordings.get((chosen.case, chosen.stage))
    if recording is None or not recording.reading.is_complete:
        return None
    opinion = tour.opinion(recording, chosen.part)
    if opinion is None or opinion.right:
        return None
    return {
        "said": case.said.en,
        "translation": case.said.zh if texts.language == "zh" else "",
        "title": case.title.in_language(texts.language),
        "step": _step(tour, recording, recording.reading, chosen.part, texts),
        "turn": _turn(tour, recording, texts),
    }


def _tally(tour: Tour, texts: Texts) -> dict[str, Any]:
    shown = tour.plan.shown
    counted = tour.tally(shown)
    rows = []
    for case in tour.plan.cases:
        recording = tour.recording(case, shown)
        if recording.reading.is_complete:
            steps = [_step(tour, recording, recording.reading, part, texts) for part in STEPS]
            rows.append({"title": case.title.in_language(texts.language), "steps": steps})
    return {
        "words": texts(
            "tour.tally_text",
            wrong=counted.wrong,
            steps=counted.steps,
            noticed=counted.noticed,
            alarms=counted.false_alarms,
        ),
        "steps": counted.steps,
        "rows": rows,
    }


# --- numbers -------------------------------------------------------------------------------------


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
        "a_guess": a_guess,
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
                "low": order[part].low,
                "high": order[part].high,
                "value": order[part].value,
                "found": sensitivity[part].text,
            }
            for part in STEPS
        ],
    }


def _learnt(tour: Tour, texts: Texts) -> dict[str, Any]:
    figures = tour.figures
    complete, stage = figures["complete"], figures["stage"]
    return {
        "form": texts(
            "tour.learnt_form",
            value=complete.text,
            interval=complete.interval,
            n=f"{complete.n:,}",
        ),
        "caption": texts("tour.learnt_table", model=stage.model, n=f"{stage.n:,}"),
        "file": complete.file,
        "reward": explained(
            texts(
                "tour.learnt_reward",
                sft=_tenths(figures["reward_sft"].value),
                urp=_tenths(figures["reward_urp"].value),
                strategy=_tenths(figures["strategy_urp"].value),
                strategy_interval=_between(figures["strategy_urp"]),
                emotion=_tenths(figures["emotion_urp"].value),
                emotion_interval=_between(figures["emotion_urp"]),
            ),
            texts,
        ),
        "terms": terms_line(["URP"], texts),
        "reward_file": figures["reward_urp"].file,
        "rows": [
            {
                "title": texts(f"tour.learnt_{name}"),
                "right": figures[name],
                "guess": figures[f"{name}_guess"],
            }
            for name in ("stage", "emotion", "strategy")
        ],
    }


def _between(figure: Figure) -> str:
    """Return the CI of a difference, with signs and without an en dash."""
    if figure.low is None or figure.high is None:
        return ""
    return f"[{_tenths(figure.low)}, {_tenths(figure.high)}]"


def _tenths(value: float) -> str:
    """Return a number with its sign and one decimal.

    Example:
        >>> _tenths(2.97), _tenths(-0.46), _tenths(-0.04)
        ('+3.0', '−0.5', '0.0')
    """
    tenths = round(value, 1)
    return f"{tenths:+.1f}".replace("-", "−") if tenths else "0.0"


def _limits(tour: Tour, texts: Texts) -> list[dict[str, str]]:
    """Return each limit with its source file."""
    shown = tour.recording(tour.plan.cases[0], tour.plan.shown)
    sensitivity: Mapping[str, str] = {
        part.value: tour.figures[f"judge_found_{part}"].text for part in STEPS
    }
    each_misread = all(
        any(
            (opinion := tour.opinion(tour.recording(case, tour.plan.shown), part)) is not None
            and not opinion.right
            for part in STEPS
        )
        for case in tour.plan.cases
    )
    first = texts("tour.limit_1") if each_misread else texts("tour.limit_1_plain")
    return [
        {"words": first, "file": "tour/notes.toml" if each_misread else shown.model.card},
        {
            "words": texts("tour.limit_2", **sensitivity),
            "file": tour.figures["judge_found_history"].file,
        },
        {"words": texts("tour.limit_3"), "file": shown.model.card},
        {"words": texts("tour.limit_4"), "file": ""},
        {"words": texts("tour.limit_5", licence=shown.model.licence), "file": shown.model.card},
    ]
