"""Renders several replies to one message: ranked (best of n), or one for each strategy."""

import math
from dataclasses import replace

from compeer_core.best_of import (
    LARGEST,
    SMALLEST,
    USUAL,
    Ranking,
    gate_formula,
    weight_formula,
)
from compeer_core.consistency import Followed, carries_out
from compeer_core.dialogue import Dialogue
from compeer_core.reasoning import Part
from compeer_core.redundancy import Reweighted
from compeer_core.taxonomy import StrategyVocabulary
from ui_components.chat.reply_words import (
    VERDICT_SIGNS,
    readable,
    reasons,
    reward_of,
    signed,
    status_line,
    verdict_kind,
)
from ui_components.shared.progress import Progress
from ui_components.shared.session import BestOf, Session, Turn
from ui_components.shared.texts import Texts

FOLLOWED_KINDS = {Followed.YES: "right", Followed.NO: "wrong", Followed.UNKNOWN: "unscored"}


def best_of_view(
    session: Session, index: int, texts: Texts, vocabulary: StrategyVocabulary
) -> dict[str, object] | None:
    """Return the form and the latest group; None for a turn that has neither."""
    turn = session.turns[index]
    is_last = index == len(session.turns) - 1
    can_ask = is_last and turn.progress is not None and not session.is_writing
    group = (
        None if turn.best_of is None else _group(turn.best_of, session, index, texts, vocabulary)
    )
    if not can_ask and group is None:
        return None
    return {
        "can_ask": can_ask,
        "sizes": range(SMALLEST, LARGEST + 1),
        "usual": USUAL,
        "turn": index,
        "group": group,
    }


def _group(
    best_of: BestOf, session: Session, index: int, texts: Texts, vocabulary: StrategyVocabulary
) -> dict[str, object] | None:
    turn = session.turns[index]
    replies = [reply for number in best_of.numbers if (reply := turn.reply(number))]
    if not replies:
        return None
    ranking = best_of.ranking
    order = ranking.order if ranking else range(len(replies))
    done = sum(reply.outcome != "running" for reply in replies)
    rows = [_row(place, replies, turn, session.compared, texts) for place in order]
    missing: list[str] = []
    if best_of.by_strategy:
        history = replace(session, turns=session.turns[: index + 1]).dialogue().merged()
        for row, reply in zip(rows, replies, strict=True):
            row |= _strategy_card(reply, history, texts, vocabulary)
        wished = {reply.origin.strategy for reply in replies}
        missing = [
            texts.label("strategies", name) for name in vocabulary.names if name not in wished
        ]
    return {
        "rows": rows,
        "by_strategy": best_of.by_strategy,
        "missing": texts("steering.not_generated", list=texts.listed(missing)) if missing else "",
        "progress": ""
        if ranking or (best_of.by_strategy and done == len(replies))
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
        "title": "" if position is None else texts("steering.place", place=position),
        "is_first": position == 1,
        "is_shown": reply is turn.progress,
        "is_compared": reply.number == compared,
        "definition": "",
        "words": reply.reply.strip(),
        "strategy": "" if strategy is None else texts.label("strategies", str(strategy)),
        "status": _status(reply, texts),
        "steps": _steps(reply, texts),
        "numbers": _numbers(member, ranking, texts) if member and ranking else [],
        "formula": weight_formula(member, ranking.settings)
        if member and ranking and position is not None
        else "",
    }


def _strategy_card(
    reply: Progress, history: Dialogue, texts: Texts, vocabulary: StrategyVocabulary
) -> dict[str, object]:
    """Return what the card of a forced strategy adds: whether the reply shows it, and the judge's verdict."""
    wished = reply.origin.strategy
    named = readable(reply.parts[Part.STRATEGY].labels.get("strategy"))
    numbers: list[dict[str, str]] = []
    if reply.outcome == "finished" and not reply.is_withheld:
        followed = carries_out(history, reply.reply, wished)
        words = texts(f"steering.followed_{followed.name.lower()}")
        numbers.append(_verdict("steering.followed", FOLLOWED_KINDS[followed], words, texts))
    verdict = reply.parts[Part.STRATEGY].verdict
    if verdict is not None:
        kind = verdict_kind(verdict)
        words = texts("inspector.not_scored" if kind == "unscored" else f"inspector.{kind}")
        numbers.append(_verdict("steering.strategy_verdict", kind, words, texts))
    return {
        "title": texts.label("strategies", wished),
        "definition": next(
            entry.definition(texts.language) for entry in vocabulary.entries if entry.name == wished
        ),
        "strategy": texts.label("strategies", str(named)) if named not in {None, wished} else "",
        "steps": "",
        "numbers": numbers,
    }


def _verdict(name: str, kind: str, words: str, texts: Texts) -> dict[str, str]:
    return {"name": texts(name), "value": words, "kind": kind, "sign": VERDICT_SIGNS.get(kind, "–")}


def _status(reply: Progress, texts: Texts) -> str:
    if reply.outcome == "running" and reply.phase == "waiting":
        return texts("steering.best_waiting")
    record = reply.record
    if record and record.rejected and record.status == "finished" and not record.withheld:
        why = reasons(record.rejected, texts)
        return texts("steering.drawn", draws=record.draws, reasons=why)
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
        {"name": texts(f"steering.number_{name}"), "value": value, "kind": "", "sign": ""}
        for name, value in values.items()
    ]


def _note(ranking: Ranking | None, texts: Texts) -> str:
    if ranking is None:
        return ""
    if not ranking.is_ranked:
        return texts("steering.best_unranked")
    if not ranking.is_reweighted:
        return texts("steering.best_unreadable")
    return texts("steering.best_partly") if None in ranking.places else ""
