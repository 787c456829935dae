"""Renders the steering controls of the inspector's cards, and the contradiction badge."""

from dataclasses import replace

from compeer_core.consistency import Contradiction, Reason, contradictions
from compeer_core.reasoning import LABELS, STEPS, Part, Writer
from compeer_core.steering import MAX_STEP_CHARACTERS
from compeer_core.taxonomy import INTENSITIES, Emotion, Sentiment, Stage, StrategyVocabulary
from ui_components.chat.reply_words import readable
from ui_components.shared.progress import Progress
from ui_components.shared.session import Session
from ui_components.shared.texts import Texts


def card_controls(
    part: Part, session: Session, index: int, texts: Texts, vocabulary: StrategyVocabulary
) -> dict[str, object] | None:
    """Return the controls of a step, None during generation or if the step is missing."""
    turn = session.turns[index]
    progress = turn.progress
    if progress is None or progress.record is None or session.is_writing:
        return None
    steps = progress.record.reading.steps[: STEPS.index(part) + 1]
    if any(step is None for step in steps):
        return None
    can_choose = part is Part.STRATEGY
    return {
        "turn": index,
        "part": part.value,
        "key": f"{turn.key}-{progress.number}-{part}",
        "text": progress.parts[part].text,
        "limit": MAX_STEP_CHARACTERS,
        "fields": []
        if can_choose
        else [_field(name, part, progress, texts) for name in LABELS[part]],
        "strategies": [
            {
                "value": entry.name,
                "name": texts.label("strategies", entry.name),
                "definition": entry.definition(texts.language),
                "is_now": entry.name == progress.parts[part].labels.get("strategy"),
            }
            for entry in vocabulary.entries
        ]
        if can_choose
        else [],
        "behind": len(session.turns) - 1 - index,
    }


def _field(name: str, part: Part, progress: Progress, texts: Texts) -> dict[str, object]:
    now = readable(progress.parts[part].labels.get(name))
    values: dict[str, list[str]] = {
        "stage": list(Stage),
        "sentiment": list(Sentiment),
        "emotion": list(Emotion),
        "intensity": [str(value) for value in INTENSITIES],
    }
    return {
        "name": name,
        "title": texts.label_title(name),
        "is_known": now is not None,
        "options": [
            {
                "value": str(value),
                "name": texts.label_value(name, value),
                "is_now": str(value) == str(now),
            }
            for value in values[name]
        ],
    }


def signature(part: Part, progress: Progress | None, texts: Texts) -> str:
    """Say who wrote a step or chose its strategy, if it was not the model in this turn."""
    if progress is None:
        return ""
    if part is Part.STRATEGY and progress.origin.kind == "strategy":
        return texts("steering.chosen_by_you")
    match progress.parts[part].writer:
        case Writer.PERSON:
            return texts("steering.edited_by_you")
        case Writer.EARLIER:
            return texts("steering.kept")
        case _:
            return ""


def steering_notes(progress: Progress | None, texts: Texts) -> list[str]:
    """Say which part of a request the model did not or could not follow."""
    if progress is None:
        return []
    notes: list[str] = []
    if progress.only_asked:
        notes.append(texts("steering.only_asked"))
    wished = progress.origin.strategy
    named = readable(progress.parts[Part.STRATEGY].labels.get("strategy"))
    if wished and progress.outcome == "finished" and named != wished:
        strategy = texts.label("strategies", wished)
        notes.append(texts("steering.not_followed", strategy=strategy))
    return notes


def contradiction_words(session: Session, index: int, texts: Texts) -> list[str]:
    """Say where a reply contradicts its reasoning."""
    progress = session.turns[index].progress
    if progress is None or progress.record is None or progress.outcome != "finished":
        return []
    before = replace(session, turns=session.turns[: index + 1]).dialogue().merged()
    contradicted = contradictions(before, progress.record.reading, progress.record.judgement)
    return [_words(each, texts) for each in contradicted]


def _words(contradiction: Contradiction, texts: Texts) -> str:
    if contradiction.named is None:
        return texts(f"steering.{contradiction.reason}")
    strategy = texts.label("strategies", contradiction.named)
    if contradiction.reason is Reason.ASKS_INSTEAD:
        return texts("steering.asks_instead", strategy=strategy)
    sign = texts(f"steering.sign_{contradiction.named.name.lower()}")
    return texts("steering.no_sign", strategy=strategy, sign=sign)
