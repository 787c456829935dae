"""The inspector: the reasoning behind the reply of the selected turn, and the judge's verdicts.

`build_inspector` lays it out. `inspector_html` draws it from a `Session` alone, so that it can be
tested without a browser.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import gradio as gr

from compeer_core.reasoning import STEPS, LabelValue, Part, Unreadable
from compeer_core.safety import forbids_reply
from compeer_core.taxonomy import ESCONV_STRATEGIES, INTENSITIES, Stage, StrategyVocabulary
from compeer_core.unifireward import (
    NotApplicable,
    ResponseVerdict,
    Reward,
    StepVerdict,
    Unscorable,
)
from ui_components.chat.best_of import best_of_view
from ui_components.chat.branches import branches_view
from ui_components.chat.grounding_view import grounding_line, marked_pieces
from ui_components.chat.reply_words import (
    VERDICT_SIGNS,
    readable,
    reasons,
    reward_of,
    signed,
    status_line,
    steps_in_words,
    total_in_words,
    verdict_kind,
)
from ui_components.chat.steering_view import (
    card_controls,
    contradiction_words,
    signature,
    steering_notes,
)
from ui_components.shared.progress import PartProgress, Progress
from ui_components.shared.session import Session, Turn
from ui_components.shared.templating import render
from ui_components.shared.terms import explained, terms_line
from ui_components.shared.texts import ASSETS, Texts

SPARKLINE_WIDTH = 240
SPARKLINE_HEIGHT = 44
MARGIN = 6


def build_inspector() -> gr.HTML:
    """Lay out the inspector. It triggers ``pick_turn`` with ``{turn}``."""
    return gr.HTML(
        elem_id="inspector",
        js_on_load=(ASSETS / "style" / "inspector.js").read_text(encoding="utf-8"),
        apply_default_css=False,
    )


def inspector_html(
    session: Session,
    texts: Texts,
    vocabulary: StrategyVocabulary = ESCONV_STRATEGIES,
    *,
    sentence: str = "",
    place: str = "",
    small_judges: Collection[str] = (),
) -> str:
    """Draw the inspector for the selected turn.

    Args:
        session: The conversation.
        texts: The words.
        vocabulary: The strategies to choose from.
        sentence: The error to show.
        place: The card that it belongs to.
        small_judges: The names of the judges that the page must warn of.
    """
    shown = session.shown
    if shown is None:
        return render("inspector_empty.html", t=texts)
    turn = session.turns[shown]
    progress = turn.progress
    pictures = [
        {
            "address": picture_address(turn.key, index),
            "alt": image.alt or texts("chat.photo_of", number=index + 1, turn=shown + 1),
        }
        for index, image in enumerate(turn.message.images)
    ]
    is_left_to_people = forbids_reply(turn.risk)
    cards = [
        _card(part, progress, texts, vocabulary, pictures)
        | {
            "pieces": marked_pieces(part, progress.parts[part], session, texts) if progress else [],
            "controls": card_controls(part, session, shown, texts, vocabulary),
            "signature": signature(part, progress, texts),
            "sentence": sentence if place == part.value else "",
        }
        for part in (() if is_left_to_people else STEPS)
    ]
    return render(
        "inspector.html",
        t=texts,
        number=shown + 1,
        count=len(session.turns),
        cards=cards,
        status=texts("status.left_to_people")
        if is_left_to_people
        else status_line(progress, texts),
        problems=_problems(progress, texts),
        reply=progress.number if progress else 0,
        branches=branches_view(session, shown, texts),
        best_of=best_of_view(session, shown, texts, vocabulary),
        best_of_sentence=sentence if place == "best_of" else "",
        conflicts=contradiction_words(session, shown, texts),
        grounding=grounding_line(progress, texts),
        steering_notes=steering_notes(progress, texts),
        error=progress.record.error if progress and progress.record else None,
        gate=_gate(progress, texts),
        tally=_tally(progress, texts),
        reply_verdict=_reply_verdict(turn, texts),
        score=_score(progress, texts),
        sparkline=_sparkline(session, texts, shown),
        raw=_raw(progress),
        facts=_facts(progress, texts),
        terms=terms_line([progress.model] if progress else [], texts),
        note=texts(
            "inspector.note" if _judge_is_small(progress, small_judges) else "inspector.note_plain"
        ),
    )


def picture_address(turn_key: str, index: int) -> str:
    """The URL of a turn's image, relative to the page."""
    return f"pictures/{turn_key}/{index}"


# --- the cards -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Verdict:
    """A card's verdict: an icon, words, and the judge's confidence."""

    kind: str
    sign: str
    words: str
    detail: str = ""


def _card(
    part: Part,
    progress: Progress | None,
    texts: Texts,
    vocabulary: StrategyVocabulary,
    pictures: Sequence[Mapping[str, str]],
) -> dict[str, object]:
    now = progress.parts[part] if progress else PartProgress()
    finished = progress is not None and progress.outcome == "finished"
    state = now.state
    if state in {"ahead", "missing"} and progress is not None and progress.phase == "over":
        state = "missing" if finished else "ahead"  # no fault of the model if it was interrupted
    known = state in {"writing", "done"}
    card: dict[str, object] = {
        "part": part.value,
        "title": texts(f"inspector.{part}"),
        "number": STEPS.index(part) + 1,
        "state": state,
        "verdict": _verdict(now, progress, texts),
        "ahead": texts("inspector.not_written" if _is_running(progress) else "inspector.left_out"),
        "labels": _labels(now, texts) if known else [],
        "notes": _label_notes(now, texts) if finished and state == "done" else [],
    }
    if part is Part.HISTORY:
        card["stages"] = _stages(now.labels.get("stage"), texts)
    if part is Part.EMOTION:
        card["pictures"] = pictures
        card["intensity"] = _intensity(now.labels.get("intensity"), texts)
    if part is Part.STRATEGY:
        card |= _strategies(now.labels.get("strategy"), texts, vocabulary)
    return card


def _judge_is_small(progress: Progress | None, small_judges: Collection[str]) -> bool:
    return progress is None or progress.judge is None or progress.judge in small_judges


def _is_running(progress: Progress | None) -> bool:
    return progress is not None and progress.outcome == "running"


def _verdict(now: PartProgress, progress: Progress | None, texts: Texts) -> _Verdict | None:
    if progress is None or now.state in {"ahead", "writing"}:
        return None
    if now.state == "missing" and progress.outcome != "finished":
        return None
    match now.verdict:
        case StepVerdict():
            kind = verdict_kind(now.verdict)
            detail = texts(
                "inspector.unsure_detail" if kind == "unsure" else "inspector.sure",
                percent=_percent(now.verdict.probability_correct, kind),
            )
            return _Verdict(kind, VERDICT_SIGNS[kind], texts(f"inspector.{kind}"), detail)
        case Unscorable():
            cut_off = progress.outcome in {"stopped", "failed"}
            reason = "inspector.cut_off" if cut_off else "inspector.judge_broke"
            return _Verdict("unscored", "–", texts("inspector.not_scored"), texts(reason))
        case None:
            return _no_verdict(progress, texts)


def _no_verdict(progress: Progress, texts: Texts) -> _Verdict | None:
    words = texts("inspector.not_scored")
    if progress.judge is None:
        reason = "model.judge_failed" if progress.judge_failed else "inspector.no_judge"
        return _Verdict("unscored", "–", words, texts(reason))
    if progress.outcome == "running":
        return _Verdict("pending", "…", texts("inspector.pending"))
    if progress.record is not None and progress.record.judgement is not None:
        return _Verdict("unscored", "–", words, texts("inspector.not_judged"))
    return _Verdict("unscored", "–", words, texts("inspector.cut_off"))


def _labels(now: PartProgress, texts: Texts) -> list[dict[str, str]]:
    return [
        {
            "name": texts.label_title(name),
            "value": texts.label_value(name, str(value)),
            "kind": name,
        }
        for name in ("sentiment", "emotion")
        if (value := readable(now.labels.get(name))) is not None
    ]


def _label_notes(now: PartProgress, texts: Texts) -> list[str]:
    """List unreadable labels and what the model wrote instead."""
    notes: list[str] = []
    for name, value in now.labels.items():
        if isinstance(value, Unreadable):
            title = texts.label_title(name)
            reason = (
                texts("inspector.unreadable", text=value.text)
                if value.text
                else texts("inspector.no_label")
            )
            notes.append(f"{title}{texts.colon}{reason}")
    return notes


def _stages(value: LabelValue | None, texts: Texts) -> list[dict[str, object]]:
    order = list(Stage)
    now = order.index(value) if isinstance(value, Stage) else None
    return [
        {
            "name": texts.label("stages", stage),
            "state": "ahead" if now is None or index > now else "now" if index == now else "past",
        }
        for index, stage in enumerate(order)
    ]


def _intensity(value: LabelValue | None, texts: Texts) -> dict[str, object] | None:
    if not isinstance(value, int):
        return None
    return {
        "value": value,
        "steps": [step <= value for step in INTENSITIES],
        "words": texts("inspector.intensity_of", value=value),
    }


def _strategies(
    value: LabelValue | None, texts: Texts, vocabulary: StrategyVocabulary
) -> dict[str, object]:
    entries = [
        {
            "name": texts.label("strategies", entry.name),
            "definition": entry.definition(texts.language),
            "chosen": entry.name == value,
        }
        for entry in vocabulary.entries
    ]
    chosen = next((entry for entry in entries if entry["chosen"]), None)
    return {"strategies": entries, "chosen": chosen}


# --- the score at the top ------------------------------------------------------------------------


def _tally(progress: Progress | None, texts: Texts) -> str:
    """Say how many steps are judged right, or why none is."""
    if progress is None or progress.outcome == "running":
        return ""
    if progress.judge is None:
        return texts("model.judge_failed" if progress.judge_failed else "inspector.no_judge")
    if progress.record is not None and progress.record.judgement is not None:
        return steps_in_words(progress, texts) or texts("inspector.not_judged")
    return ""


def _reply_verdict(turn: Turn, texts: Texts) -> _Verdict | None:
    """Say how the reply compares with its baseline, or that it has none."""
    progress = turn.progress
    if progress is None or progress.is_withheld:
        return None
    baseline = turn.reply(progress.compared_with)
    match progress.reply_verdict:
        case ResponseVerdict() as verdict if baseline is not None:
            kind = verdict_kind(verdict)
            named = texts("inspector.baseline", number=baseline.number, model=baseline.model)
            detail = texts(
                "inspector.reply_unsure_detail" if kind == "unsure" else "inspector.sure",
                percent=_percent(verdict.probability_at_least_as_good, kind),
            )
            words = texts(f"inspector.reply_{kind}", baseline=named)
            return _Verdict(kind, VERDICT_SIGNS[kind], words, detail)
        case NotApplicable() if progress.outcome == "finished" and progress.reply:
            return _Verdict("unscored", "–", texts("inspector.reply_no_baseline"))
        case Unscorable():
            return _Verdict("unscored", "–", texts("inspector.reply_not_scored"))
        case _:
            return None


def _percent(probability: float, kind: str) -> int:
    """Return the probability of the verdict, in percent; of an unsure one that it is "right"."""
    return round(100 * (1 - probability if kind == "wrong" else probability))


# --- the reward -----------------------------------------------------------------------------------


def _score(progress: Progress | None, texts: Texts) -> dict[str, object] | None:
    """The reward of each part, and the total."""
    reward = reward_of(progress)
    if progress is None or (reward is None and progress.outcome == "running"):
        return None
    if reward is None:
        reason = "inspector.not_scored" if progress.judge else "inspector.no_total_judge"
        return {"parts": [], "total": texts(reason), "kind": "none"}
    steps = [
        texts("inspector.not_scored") if value is None else signed(value)
        for value in reward.steps or ()
    ]
    parts = [
        {"name": texts("inspector.steps"), "value": " ".join(steps)},
        {"name": texts("inspector.reply"), "value": _reply_value(progress, reward, texts)},
    ]
    if reward.format is not None:
        parts.append({"name": texts("inspector.format"), "value": signed(reward.format)})
    if reward.total is None:
        return {"parts": parts, "total": texts("inspector.no_total"), "kind": "none"}
    total = texts("inspector.of_maximum", total=signed(reward.total), maximum=reward.maximum)
    return {"parts": parts, "total": total, "kind": "low" if reward.total < 0 else "high"}


def _reply_value(progress: Progress, reward: Reward, texts: Texts) -> str:
    match progress.reply_verdict:
        case ResponseVerdict() if reward.response is not None:
            return signed(reward.response)
        case Unscorable():
            return texts("inspector.not_scored")
        case NotApplicable() if reward.response is None:
            return texts("inspector.no_reference")
        case _:
            return (
                texts("inspector.not_scored")
                if reward.response is None
                else signed(reward.response)
            )


def _sparkline(session: Session, texts: Texts, shown: int) -> dict[str, object] | None:
    """Totals over the turns as SVG points, each relative to its maximum, and as a sentence."""
    rewards = [reward_of(turn.progress) for turn in session.turns]
    if sum(reward is not None and reward.total is not None for reward in rewards) < 2:
        return None
    width = SPARKLINE_WIDTH - 2 * MARGIN
    height = SPARKLINE_HEIGHT - 2 * MARGIN
    points = []
    for index, reward in enumerate(rewards):
        if reward is None or reward.total is None:
            continue
        share = (reward.total / reward.maximum + 1) / 2
        x = MARGIN + width * (index / (len(rewards) - 1))
        y = MARGIN + height * (1 - share)
        points.append({"x": f"{x:.1f}", "y": f"{y:.1f}", "now": index == shown})
    listed = [
        texts(
            "inspector.sparkline_turn", number=index + 1, total=total_in_words(turn.progress, texts)
        )
        for index, turn in enumerate(session.turns)
    ]
    return {
        "points": points,
        "line": " ".join(f"{point['x']},{point['y']}" for point in points),
        "width": SPARKLINE_WIDTH,
        "height": SPARKLINE_HEIGHT,
        "middle": SPARKLINE_HEIGHT / 2,
        "words": texts("inspector.over_turns_text", list=texts.listed(listed)),
    }


# --- small print ---------------------------------------------------------------------------------


def _problems(progress: Progress | None, texts: Texts) -> str:
    """Say what a finished reply lacks; an interrupted one is not faulted."""
    record = progress.record if progress else None
    if record is None or record.status != "finished" or record.reading.is_complete:
        return ""
    sentences = [
        texts(
            f"inspector.problem_{problem.kind}",
            part=texts(f"inspector.part_{problem.part}") if problem.part else "",
        )
        for problem in record.reading.problems
    ]
    return texts("inspector.incomplete", problems=texts.listed(sentences))


def _gate(progress: Progress | None, texts: Texts) -> dict[str, object] | None:
    """Say why a reply was drawn again or is not shown, with the rejected draws."""
    if progress is None or not progress.rejected:
        return None
    count = len(progress.rejected)
    why = reasons(progress.rejected, texts)
    if not progress.is_withheld:
        words = texts("gate.regenerated", reasons=why)
    elif count == 1:
        words = texts("gate.withheld_once", reasons=why)
    else:
        words = texts("gate.withheld_why", draws=count, reasons=why)
    return {
        "words": words,
        "title": texts("gate.draws", count=count),
        "draws": [
            {
                "title": texts(
                    "gate.draw", number=number, seed=draw.seed, reasons=reasons([draw], texts)
                ),
                "label": texts("gate.draw_text", number=number),
                "raw": draw.raw,
            }
            for number, draw in enumerate(progress.rejected, start=1)
        ],
    }


def _raw(progress: Progress | None) -> str | None:
    return progress.record.raw if progress and progress.record else None


def _facts(progress: Progress | None, texts: Texts) -> list[dict[str, str]]:
    record = progress.record if progress else None
    if record is None:
        return []
    unknown = texts("inspector.unknown")
    first = record.first_token_seconds
    writing = record.seconds - (first or 0.0)
    speed = (
        texts(
            "inspector.tokens_per_second",
            value=f"{record.tokens / writing:.0f}",
            tokens=record.tokens,
        )
        if record.tokens and writing > 0
        else unknown
    )
    facts: dict[str, str] = {
        "model": explained(record.model, texts),
        "judge": record.judge or texts("inspector.no_judge"),
        "seed": str(record.seed),
        "first_token": unknown
        if first is None
        else texts("inspector.seconds", value=f"{first:.2f}"),
        "speed": speed,
    }
    if record.judgement is not None and record.judge:
        facts["scoring"] = texts("inspector.seconds", value=f"{record.scoring_seconds:.2f}")
    return [{"name": texts(f"inspector.{key}"), "value": value} for key, value in facts.items()]
