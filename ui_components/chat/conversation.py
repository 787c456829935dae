"""Renders the conversation: messages, growing replies, and their controls.

`build_conversation` lays it out. `conversation_html` draws a `Session` alone, so that it can be
tested without a browser.
"""

import gradio as gr

from compeer_core.reasoning import Part
from compeer_core.safety import RiskState
from ui_components.chat.inspector import picture_address
from ui_components.chat.reply_words import status_line, steps_in_words, summary
from ui_components.chat.starters import CHAT_STARTERS
from ui_components.shared.help import RiskCard, hint_card, risk_card, standing_card
from ui_components.shared.models import Models
from ui_components.shared.progress import Progress
from ui_components.shared.session import Session, Turn
from ui_components.shared.templating import render
from ui_components.shared.texts import ASSETS, Texts


def build_conversation() -> gr.HTML:
    """Lay out the conversation. Its script lists the events that it triggers."""
    return gr.HTML(
        elem_id="conversation",
        js_on_load=(ASSETS / "style" / "conversation.js").read_text(encoding="utf-8"),
        apply_default_css=False,
    )


def conversation_html(
    session: Session,
    texts: Texts,
    models: Models,
    *,
    keep_seconds: float,
    now: float,
    risk: RiskState,
) -> str:
    """Draw the conversation.

    Args:
        session: The conversation.
        texts: The words.
        models: For models that do not support the message's language.
        keep_seconds: The lifetime of conversations, which the page states.
        now: The monotonic time, for how long a model has been loading.
        risk: What the visitor's messages mean, also those that were cleared.
    """
    last = len(session.turns) - 1
    turns = [
        _turn(index, turn, session, texts, models, is_last=index == last, now=now)
        for index, turn in enumerate(session.turns)
    ]
    running = session.is_writing
    announced_key, announced = "", ""
    if session.turns and not running:
        announced_key, announced = _announced(session.turns[-1], texts)
    return render(
        "conversation.html",
        t=texts,
        turns=turns,
        running=running,
        undo=_undo(session, texts),
        standing=None
        if turns and (turns[-1]["risk"] or turns[-1]["hint"])
        else standing_card(texts, risk),
        editing=None if running else session.editing,
        starters=CHAT_STARTERS,
        state=_state(session),
        hours=round(keep_seconds / 3600),
        announced_key=announced_key,
        announced=announced,
    )


def _turn(
    index: int,
    turn: Turn,
    session: Session,
    texts: Texts,
    models: Models,
    *,
    is_last: bool,
    now: float,
) -> dict[str, object]:
    progress = turn.progress
    outcome = progress.outcome if progress else "none"
    words = summary(progress, texts) if progress else []
    has_chip = bool(words) or (progress is not None and progress.record is not None)
    steps_right = steps_in_words(progress, texts)
    spoken = [steps_right] if steps_right else []
    seconds = now - progress.since if progress else 0.0
    return {
        "index": index,
        "key": turn.key,
        "pager": _pager(turn),
        "shown": session.shown == index,
        "last": is_last,
        "said": turn.message.text,
        "pictures": [
            {
                "address": picture_address(turn.key, position),
                "alt": image.alt or texts("chat.photo", number=position + 1),
                "width": image.width,
                "height": image.height,
            }
            for position, image in enumerate(turn.message.images)
        ],
        "risk": _risk_card(turn, texts),
        "hint": hint_card(texts, turn.hint, turn.key) if turn.hint else None,
        "notice": _language_notice(turn, texts, models),
        "outcome": outcome,
        "broken": progress is None
        or outcome in {"stopped", "failed"}
        or not progress.reply.strip(),
        "reply": progress.reply if progress else "",
        "writing": bool(progress and progress.writing is Part.REPLY),
        "steps": _steps(progress, texts),
        "status": status_line(progress, texts, seconds),
        "summary": " · ".join(words),
        "look": texts("chat.look", number=index + 1, summary=texts.listed([*words, *spoken]))
        if has_chip
        else "",
        "steps_right": steps_right,
    }


def _pager(turn: Turn) -> dict[str, int | None] | None:
    """The place of the current reply among all, and the numbers of its neighbours."""
    numbers = [reply.number for reply in turn.replies]
    if len(numbers) < 2 or turn.progress is None:
        return None
    place = numbers.index(turn.progress.number)
    return {
        "place": place + 1,
        "count": len(numbers),
        "before": numbers[place - 1] if place else None,
        "next": numbers[place + 1] if place + 1 < len(numbers) else None,
    }


def _state(session: Session) -> str:
    """A text that changes when a person changes the conversation, not while a reply grows."""
    last = session.turns[-1] if session.turns else None
    reply = last.progress if last else None
    numbers = [turn.progress.number if turn.progress else 0 for turn in session.turns]
    keys = (last.key if last else "", reply.key if reply else "", session.undo is not None)
    return f"{numbers} {keys} {session.is_writing} {session.editing}"


def _risk_card(turn: Turn, texts: Texts) -> RiskCard | None:
    if turn.risk is None:
        return None
    return risk_card(texts, turn.risk, turn.key, is_earlier=turn.risk_is_earlier)


def _steps(progress: Progress | None, texts: Texts) -> list[dict[str, str]]:
    if progress is None:
        return []
    return [
        {"part": part.value, "name": texts(f"inspector.part_{part}"), "state": now.state}
        for part, now in progress.parts.items()
    ]


def _language_notice(turn: Turn, texts: Texts, models: Models) -> str:
    if turn.progress is None:
        return ""
    entry = models.entry("policy", turn.progress.model)
    if entry is None or entry.speaks(turn.language):
        return ""
    names = [texts.label("languages", language) for language in entry.languages]
    return texts(
        "model.language_notice", model=entry.title or entry.name, languages=texts.listed(names)
    )


def _undo(session: Session, texts: Texts) -> str:
    if session.undo is None:
        return ""
    return texts(f"chat.{session.undo.kind}", number=session.undo.number)


def _announced(turn: Turn, texts: Texts) -> tuple[str, str]:
    """The screen reader's announcement of the newest turn, and a key that changes with it."""
    if card := _risk_card(turn, texts):
        return f"{turn.key}-risk", f"{card.spoken} {texts('help.no_reply')}"
    progress = turn.progress
    if progress is None:
        return "", ""
    words = f"{progress.reply} {status_line(progress, texts)}".strip()
    if turn.hint:
        words = f"{hint_card(texts, turn.hint, turn.key).spoken} {texts('help.behind')}"
    return f"{turn.key}-{progress.key}", words
