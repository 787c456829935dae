"""Renders the replies to one message: their list, and the difference between two of them."""

from compeer_core.reasoning import LABELS, STEPS, Part
from compeer_core.unifireward import StepVerdict
from ui_components.chat.diff import words_diff
from ui_components.chat.reply_words import (
    VERDICT_SIGNS,
    readable,
    reward_of,
    signed,
    status_line,
    total_in_words,
    verdict_kind,
)
from ui_components.shared.progress import Progress
from ui_components.shared.session import Session, Turn
from ui_components.shared.texts import Texts

SNIPPET = 90
"""Characters of a reply shown in the list."""


def reply_name(progress: Progress, texts: Texts) -> str:
    """Name a reply: its number and how it was requested."""
    origin = progress.origin
    name = texts("steering.reply", number=progress.number)
    match origin.kind:
        case "strategy":
            strategy = texts.label("strategies", origin.strategy)
            how = texts("steering.by_strategy", strategy=strategy)
        case "edited" | "kept":
            step = texts(f"inspector.part_{origin.part}")
            how = texts(f"steering.by_{origin.kind}", step=step)
        case "first":
            return name
        case kind:
            how = texts(f"steering.by_{kind}")
    return texts("steering.reply_how", reply=name, how=how)


def branches_view(session: Session, index: int, texts: Texts) -> dict[str, object] | None:
    """Return the list of replies to a message, None if there is only one."""
    turn = session.turns[index]
    if len(turn.replies) < 2:
        return None
    shown = turn.progress
    compared = turn.reply(session.compared)
    is_over = not session.is_writing
    group = turn.best_of
    below = set(group.numbers if group else ())
    title = "steering.all_strategies" if group and group.by_strategy else "steering.best_of"
    listed = [
        reply
        for reply in turn.replies
        if reply is shown or reply is compared or reply.number not in below
    ]
    return {
        "rows": [_row(reply, turn, compared, index, texts) for reply in listed],
        "below": texts("steering.below", title=texts(title))
        if len(listed) < len(turn.replies)
        else "",
        "can_switch": is_over,
        "comparison": _comparison(compared, shown, texts)
        if is_over and shown and compared and compared is not shown
        else None,
    }


def _row(
    reply: Progress, turn: Turn, compared: Progress | None, index: int, texts: Texts
) -> dict[str, object]:
    is_shown = reply is turn.progress
    behind = next((len(first.after) for first in turn.aside if first.progress is reply), 0)
    words = reply.reply.strip()
    reward = reward_of(reply)
    return {
        "turn": index,
        "number": reply.number,
        "name": reply_name(reply, texts),
        "is_shown": is_shown,
        "is_compared": reply is compared,
        "words": words if len(words) <= SNIPPET else f"{words[:SNIPPET].rstrip()}…",
        "status": status_line(reply, texts),
        "total": total_in_words(reply, texts) if reward and reward.total is not None else "",
        "behind": texts("steering.behind", count=behind) if behind else "",
    }


def _comparison(first: Progress, second: Progress, texts: Texts) -> dict[str, object]:
    """Compare two replies: verdicts on the steps, rewards, and the words that differ."""
    pieces = words_diff(first.reply.strip(), second.reply.strip())
    sides = [
        [piece for piece in pieces if piece.kind in {"same", mine}] for mine in ("removed", "added")
    ]
    return {
        "names": [texts("steering.reply", number=reply.number) for reply in (first, second)],
        "titles": [reply_name(reply, texts) for reply in (first, second)],
        "rows": [
            *(_step_row(part, first, second, texts) for part in STEPS),
            {
                "name": texts("inspector.total"),
                "cells": [
                    {"words": total_in_words(reply, texts), "verdict": ""}
                    for reply in (first, second)
                ],
                "differs": total_in_words(first, texts) != total_in_words(second, texts),
            },
        ],
        "notes": [
            texts("steering.incomplete", reply=texts("steering.reply", number=reply.number))
            for reply in (first, second)
            if (record := reply.record) and record.judgement and not record.judgement.is_complete
        ],
        "sides": sides,
        "is_same": all(piece.kind == "same" for piece in pieces),
    }


def _step_row(part: Part, first: Progress, second: Progress, texts: Texts) -> dict[str, object]:
    cells = [_step_cell(part, reply, texts) for reply in (first, second)]
    return {
        "name": texts(f"inspector.part_{part}"),
        "cells": cells,
        "differs": cells[0]["words"] != cells[1]["words"],
    }


def _step_cell(part: Part, reply: Progress, texts: Texts) -> dict[str, str]:
    now = reply.parts[part]
    labels = [_label(name, readable(now.labels.get(name)), texts) for name in LABELS[part]]
    verdict = now.verdict
    cell = {"words": texts.listed([label for label in labels if label]) or "–", "verdict": ""}
    if isinstance(verdict, StepVerdict):
        kind = verdict_kind(verdict)
        cell |= {
            "verdict": texts(f"inspector.{kind}"),
            "kind": kind,
            "sign": VERDICT_SIGNS[kind],
            "value": signed(1.0 if verdict.correct else -1.0),
        }
    return cell


def _label(name: str, value: str | int | None, texts: Texts) -> str:
    return "" if value is None else texts.label_words(name, value)
