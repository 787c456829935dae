"""Cases and rows of CER as tests need them."""

from typing import Any

from compeer_core.cer import Case, CaseUtterance
from compeer_core.dialogue import Speaker
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
    Unreadable,
    render,
)
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Sentiment, Stage, Strategy


def case_of(
    dialogue_id: str, /, text: str = "I failed.", images: tuple[str, ...] = (), **changes: Any
) -> Case:
    """A case of one seeker message, in the train split of a made-up corpus.

    Args:
        dialogue_id: Names the dialogue and its source.
        text: The message.
        images: Names of its pictures.
        changes: Other values of fields; `history` replaces the message.
    """
    values: dict[str, Any] = {
        "id": f"{dialogue_id}#0",
        "dialogue_id": dialogue_id,
        "source_id": dialogue_id,
        "corpus": "made_up",
        "language": "en",
        "split": "train",
        "licence": "none",
        "round": 0,
        "rounds": 1,
        "history": (CaseUtterance(speaker=Speaker.SEEKER, text=text, images=images),),
        "original": "Oh no.",
    }
    return Case(**(values | changes))


def said(*texts: str, ends: Speaker = Speaker.SEEKER) -> tuple[CaseUtterance, ...]:
    """Utterances of seeker and supporter in turn, the last one by `ends`."""
    speakers = [ends, *(speaker for speaker in Speaker if speaker is not ends)]
    return tuple(
        CaseUtterance(speaker=speakers[(len(texts) - 1 - place) % 2], text=text)
        for place, text in enumerate(texts)
    )


def turn_text(
    reply: str = "What happened?",
    *,
    history: str = "They lost their job.",
    stage: Stage = Stage.EXPLORATION,
    feeling: str = "It shows.",
    emotion: Emotion | Unreadable = Emotion.ANXIETY,
    intensity: int = 3,
    reason: str = "It fits.",
    strategy: str = Strategy.QUESTION,
) -> str:
    """A supporter's turn as a policy writes it."""
    sentiment = Sentiment.NEGATIVE if isinstance(emotion, Unreadable) else SENTIMENT_OF[emotion]
    reasoning = Reasoning(
        HistoryStep(history, stage),
        EmotionStep(feeling, sentiment, emotion, intensity),
        StrategyStep(reason, strategy),
    )
    return render(SupportTurn(reasoning, reply))
