"""Renders the annotation desk from values alone, so that it can be tested without a browser."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from compeer_core.annotation.agreement import Agreement
from compeer_core.annotation.annotations import MAX_NOTE_CHARACTERS, QUESTIONS, Annotation
from compeer_core.annotation.desk import Annotator, Begun, Progress, Work
from compeer_core.annotation.items import SAMPLES
from compeer_core.annotation.readings import ReaderAgreement
from compeer_core.annotation.report import Report
from compeer_core.cer import CaseUtterance
from compeer_core.reasoning import LABELS, STEPS, Part
from compeer_core.stats import Estimate
from compeer_core.taxonomy import ESCONV_STRATEGIES, Preference, Stage
from ui_components.shared.templating import render
from ui_components.shared.texts import Texts

FAST_SECONDS = 5.0
"""An answer that took no longer is marked for whoever decides."""
LISTED = 30
"""The annotator's drafts and answers that are listed."""
_STEP_KEYS = ("Q", "W", "E")
_LABEL_LINE = re.compile(r"\s*([A-Za-z]+)\s*[:：]\s*(.*?)\s*")


@dataclass(frozen=True)
class Around:
    """The frame around an item: annotator, section, progress."""

    annotator: Annotator
    place: str
    progress: Progress
    begun: Sequence[Begun]
    opened: str = ""
    """The open item."""


def frame(around: Around, content: str, texts: Texts) -> str:
    """Draw the desk. The guideline is beside an item, otherwise below."""
    progress = around.progress
    own = progress.done + progress.to_do
    return render(
        "annotate.html",
        t=texts,
        person=around.annotator,
        place=around.place,
        progress=progress,
        share=round(100 * progress.done / own) if own else 0,
        own=own,
        begun=around.begun[:LISTED],
        more=max(0, len(around.begun) - LISTED),
        opened=around.opened,
        content=content,
        guideline="" if around.opened else _guideline(texts),
    )


def _guideline(texts: Texts) -> str:
    return render(
        "annotate_guideline.html",
        t=texts,
        strategies=[
            {
                "name": texts.label("strategies", entry.name),
                "definition": entry.definition(texts.language),
            }
            for entry in ESCONV_STRATEGIES.entries
        ],
        stages=[
            {"name": texts.label("stages", stage), "definition": texts(f"annotate.stage_{number}")}
            for number, stage in enumerate(Stage, start=1)
        ],
    )


def outside(texts: Texts, *, said: str = "") -> str:
    """Draw the sign-in page."""
    return render("annotate_outside.html", t=texts, said=said)


def nothing(around: Around, texts: Texts) -> str:
    """Draw that there is nothing to do, and why."""
    progress = around.progress
    if not progress.items:
        kind = "empty"
    elif around.place == "conflicts":
        kind = "no_conflicts"
    elif progress.is_over:
        kind = "over"
    else:
        kind = "waiting"
    return render("annotate_nothing.html", t=texts, kind=kind, progress=progress)


# --- an item -------------------------------------------------------------------------------------


def item(work: Work, conflict: tuple[Annotation, Annotation] | None, texts: Texts) -> str:
    """Draw an item: the conversation and the questions about it.

    Args:
        work: The item.
        conflict: The two answers, if this annotator decides a conflict.
        texts: The words.
    """
    form = _filled_in(work)
    preference = form.get("preference")
    steps = [
        {
            "part": part.value,
            "number": number + 1,
            "key": _STEP_KEYS[number],
            "text": text,
            **_step_words(part, text, texts),
            "chosen": _step_of(form, number),
            "answers": None
            if conflict is None
            else _conflicting_answers(conflict, part, work, texts),
        }
        for number, (part, text) in enumerate(zip(STEPS, work.item.steps or (), strict=False))
    ]
    replies = work.item.replies
    return render(
        "annotate_item.html",
        t=texts,
        work=work,
        history=_history(work, texts),
        steps=steps,
        replies=_in_order(replies, work) if replies else None,
        preferences=[
            {"value": value.value, "key": number, "words": texts(f"annotate.prefer_{value.value}")}
            for number, value in enumerate(Preference, start=1)
        ],
        preference=preference,
        reply_answers=None
        if conflict is None or replies is None
        else _conflicting_answers(conflict, Part.REPLY, work, texts),
        confidence=form.get("confidence"),
        note=form.get("note") or "",
        seconds=form.get("seconds") or 0,
        saved=work.saved_at.isoformat() if work.saved_at else "",
        conflict=None if conflict is None else [_answer(each, texts) for each in conflict],
        limit=MAX_NOTE_CHARACTERS,
        guideline=_guideline(texts),
        is_sample=work.batch == SAMPLES,
    )


def differs(first: Annotation, second: Annotation, question: Part) -> bool:
    """Whether two annotators answered a question differently."""
    return first.answer(question) != second.answer(question)


def _filled_in(work: Work) -> Mapping[str, Any]:
    if work.draft is not None:
        return work.draft
    if work.answered is not None:
        return work.answered.model_dump(mode="json")
    return {}


def _step_of(form: Mapping[str, Any], number: int) -> bool | None:
    steps = form.get("steps")
    answer = steps[number] if isinstance(steps, list) and len(steps) > number else None
    return answer if isinstance(answer, bool) else None


def _step_words(part: Part, text: str, texts: Texts) -> dict[str, object]:
    """Return a step's text, and its labels in the reader's language."""
    free: list[str] = []
    labels: dict[str, str] = {}
    for line in text.splitlines():
        match = _LABEL_LINE.fullmatch(line)
        name = match[1].lower() if match else ""
        if match and name in LABELS[part]:
            labels[name] = match[2]
        else:
            free.append(line)
    return {
        "free": "\n".join(free).strip(),
        "labels": [
            {"name": texts.label_title(name), "value": texts.label_words(name, value)}
            for name, value in labels.items()
        ],
    }


def _history(work: Work, texts: Texts) -> list[dict[str, object]]:
    count = 0
    turns: list[dict[str, object]] = []
    for utterance in work.item.history:
        turns.append(
            {
                "speaker": utterance.speaker.value,
                "who": texts(f"annotate.{utterance.speaker.value}"),
                "text": utterance.text,
                "pictures": _pictures(utterance, count, work, texts),
            }
        )
        count += len(utterance.images)
    return turns


def _pictures(
    utterance: CaseUtterance, before: int, work: Work, texts: Texts
) -> list[dict[str, str]]:
    return [
        {
            "address": f"desk/picture?{urlencode({'item': work.item.id, 'number': number})}"
            if name in work.pictures
            else "",
            "alt": texts("annotate.picture", number=number + 1),
        }
        for number, name in enumerate(utterance.images, start=before)
    ]


def _in_order(replies: tuple[str, str], work: Work) -> tuple[str, str]:
    return replies if work.shown_first == "first" else (replies[1], replies[0])


def _conflicting_answers(
    conflict: tuple[Annotation, Annotation], part: Part, work: Work, texts: Texts
) -> dict[str, object]:
    """Return the first two answers to a question, ordered as the third annotator sees the replies."""
    return {
        "differs": differs(*conflict, part),
        "answers": [_answer_words(each, part, work, texts) for each in conflict],
    }


def _answer_words(annotation: Annotation, part: Part, work: Work, texts: Texts) -> dict[str, str]:
    answer = annotation.answer(part)
    if answer is None:
        return {"kind": "open", "words": texts("annotate.left_open")}
    if isinstance(answer, bool):
        kind = "right" if answer else "wrong"
        return {"kind": kind, "words": texts(f"annotate.{kind}")}
    shown = answer if work.shown_first == "first" else answer.swapped()
    return {"kind": "preference", "words": texts(f"annotate.prefer_{shown.value}")}


def _answer(annotation: Annotation, texts: Texts) -> dict[str, object]:
    seconds = annotation.seconds
    return {
        "confidence": annotation.confidence,
        "note": annotation.note,
        "seconds": "" if seconds is None else texts("annotate.took", seconds=round(seconds)),
        "fast": seconds is not None and seconds <= FAST_SECONDS,
    }


# --- agreement ------------------------------------------------------------------------------------


def agreement(report: Report | None, around: Around, texts: Texts) -> str:
    """Draw the agreement report; None means that the annotator may not see it yet."""
    if report is None:
        return render("annotate_agreement.html", t=texts, report=None)
    may_adjudicate = around.annotator.may_adjudicate
    return render(
        "annotate_agreement.html",
        t=texts,
        report=report,
        person=around.annotator,
        questions=[
            {
                "title": question_title(part, texts),
                "question": question,
                **measures(question.agreement, texts),
            }
            for part, question in report.questions.items()
        ],
        skewed=_skewed(report, texts),
        pairs=[
            {
                "names": pair.names,
                "cells": [measures(pair.questions[part], texts) for part in QUESTIONS],
            }
            for pair in (report.pairs if may_adjudicate else ())
        ],
        titles=[question_title(part, texts) for part in QUESTIONS],
        dropped=[
            {
                "number": each.number,
                "question": question_title(each.question, texts),
                "answers": texts.listed([_label(answer, texts) for answer in each.answers]),
            }
            for each in report.dropped
        ],
    )


def question_title(part: Part, texts: Texts) -> str:
    return texts("annotate.replies") if part is Part.REPLY else texts(f"inspector.{part}")


def _label(answer: str, texts: Texts) -> str:
    kinds = {"True": "right", "False": "wrong"}
    return texts(f"annotate.{kinds.get(answer, f'item_{answer}')}")


def measures(measured: Agreement, texts: Texts) -> dict[str, object]:
    return {
        "items": measured.n_items,
        "raw": _coefficient(measured.raw, texts, percent=True),
        "alpha": _coefficient(measured.alpha, texts),
        "ac1": _coefficient(measured.ac1, texts),
    }


def _coefficient(
    estimate: Estimate | None, texts: Texts, *, percent: bool = False
) -> dict[str, str]:
    if estimate is None:
        return {"value": "–", "interval": texts("annotate.undefined")}
    value, low, high = (
        _number(each, percent) for each in (estimate.value, estimate.low, estimate.high)
    )
    return {"value": value, "interval": texts("annotate.interval", low=low, high=high)}


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.0f} %" if percent else f"{value:.2f}".replace("-", "−")


def _skewed(report: Report, texts: Texts) -> list[str]:
    return [
        texts(
            "annotate.skewed",
            question=question_title(part, texts),
            answer=_label(question.skewed, texts),
            percent=round(100 * question.agreement.shares[question.skewed]),
        )
        for part, question in report.questions.items()
        if question.skewed is not None
    ]


def as_json(report: Report | ReaderAgreement) -> str:
    """Serialise a report deterministically for programs."""
    return json.dumps(report.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
