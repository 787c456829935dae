"""Renders best of n: several ranked replies, with the numbers behind the ranking."""

import math

from compeer_core.best_of import (
    LARGEST,
    SMALLEST,
    USUAL,
    Ranking,
    gate_formula,
    weight_formula,
)
from compeer_core.reasoning import Part
from compeer_core.redundancy import Reweighted
from ui_components.chat.reply_words import readable, reasons, reward_of, signed, status_line
from ui_components.shared.progress import Progress
from ui_components.shared.session import BestOf, Session, Turn
from ui_components.shared.texts import Texts


def best_of_view(session: Session, index: int, texts: Texts) -> dict[str, object] | None:
    """Return the form and the ranking; None for a turn that has neither."""
    turn = session.turns[index]
    is_last = index == len(session.turns) - 1
    can_ask = is_last and turn.progress is not None and not session.is_writing
    group = None if turn.best_of is None else _group(turn, turn.best_of, session, texts)
    if not can_ask and group is None:
        return None
    return {
        "can_ask": can_ask,
        "sizes": range(SMALLEST, LARGEST + 1),
        "usual": USUAL,
        "turn": index,
        "group": group,
    }


def _group(turn: Turn, best_of: BestOf, session: Session, texts: Texts) -> dict[str, object] | None:
    replies = [reply for number in best_of.numbers if (reply := turn.reply(number))]
    if not replies:
        return None
    ranking = best_of.ranking
    order = ranking.order if ranking else range(len(replies))
    done = sum(reply.outcome != "running" for reply in replies)
    return {
        "rows": [_row(place, replies, turn, session.compared, texts) for place in order],
        "progress": ""
        if ranking
        else texts("steering.best_writing", done=done, count=len(replies)),
        "is_ranked": ranking is not None and ranking.is_ranked,
        "note": _note(ranking, texts),
        "gate": gate_formula(ranking) if ranking and ranking.is_reweighted else "",
        "form": texts(f"steering.form_{ranking.settings.form}") if ranking else "",
        "reference": texts("steering.best_reference", number=best_of.reference)
        if best_of.reference and any(reply.judge for reply in replies)
        else "",
        "can_choose": not session.is_writing,
    }


def _row(
    place: int, replies: list[Progress], turn: Turn, compared: int, texts: Texts
) -> dict[str, object]:
    reply = replies[place]
    ranking = turn.best_of.ranking if turn.best_of else None
    position = ranking.places[place] if ranking else None
    member = ranking.members[place] if ranking else None
    strategy = readable(reply.parts[Part.STRATEGY].labels.get("strategy"))
    return {
        "number": reply.number,
        "name": texts("steering.reply", number=reply.number),
        "place": "" if position is None else texts("steering.place", place=position),
        "is_first": position == 1,
        "is_shown": reply is turn.progress,
        "is_compared": reply.number == compared,
        "words": reply.reply.strip(),
        "strategy": "" if strategy is None else texts.label("strategies", str(strategy)),
        "status": _status(reply, texts),
        "steps": _steps(reply, texts),
        "numbers": _numbers(member, ranking, texts) if member and ranking else [],
        "formula": weight_formula(member, ranking.settings)
        if member and ranking and position is not None
        else "",
    }


def _status(reply: Progress, texts: Texts) -> str:
    if reply.outcome == "running" and reply.phase == "waiting":
        return texts("steering.best_waiting")
    if reply.rejected and reply.outcome == "finished" and not reply.is_withheld:
        return texts("gate.regenerated", reasons=reasons(reply.rejected, texts))
    return status_line(reply, texts)


def _steps(reply: Progress, texts: Texts) -> str:
    """The step rewards in order, and the reply's if it has one."""
    reward = reward_of(reply)
    if reward is None or reward.steps is None:
        return ""
    unknown = texts("inspector.not_scored")
    values = [unknown if value is None else signed(value) for value in reward.steps]
    parts = [f"{texts('inspector.steps')} {' '.join(values)}"]
    if reward.response is not None:
        parts.append(f"{texts('inspector.reply')} {signed(reward.response)}")
    if reward.format is not None:
        parts.append(f"{texts('inspector.format')} {signed(reward.format)}")
    return " · ".join(parts)


def _numbers(member: Reweighted, ranking: Ranking, texts: Texts) -> list[dict[str, str]]:
    unknown = "–"
    is_known = ranking.is_reweighted
    values = {
        "r": signed(member.reward) if math.isfinite(member.reward) else unknown,
        "s_in": f"{member.s_in:.3f}" if is_known else unknown,
        "s_hi": f"{member.s_hi:.3f}" if is_known else unknown,
        "tau": f"{member.tau:.3f}" if is_known else unknown,
        "after": signed(member.weighted) if math.isfinite(member.weighted) else unknown,
    }
    return [
        {"name": texts(f"steering.number_{name}"), "value": value} for name, value in values.items()
    ]


def _note(ranking: Ranking | None, texts: Texts) -> str:
    if ranking is None:
        return ""
    if not ranking.is_ranked:
        return texts("steering.best_unranked")
    if not ranking.is_reweighted:
        return texts("steering.best_unreadable")
    return texts("steering.best_partly") if None in ranking.places else ""
