"""Reasoning by rule for the supporter turns of ESConv.

Labels come from the corpus: the strategy of the turn, the emotion and problem of the dialogue, the
intensity between the seeker's ratings before and after (by the place of the turn), and the stage
from the place of the turn. The sentences around them are filled from `rule_wording.toml`, the
seeker's own words and the labels. No model wrote them and no person checked them.

Two rules depart from the dialogue-level labels where a turn plainly contradicts them: a seeker who
has only greeted is Neutral, and thanks near the end of a helpful dialogue are Joy.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from compeer_core.cer import CaseUtterance
from compeer_core.dialogue import Speaker
from compeer_core.reasoning import EmotionStep, HistoryStep, Reasoning, StrategyStep
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Stage, Strategy

GREETING_WORDS = 6
"""A seeker who has written at most this many words in all has only greeted."""

QUOTED_WORDS = 12
"""Longest quotation in the history step, in words."""
FEWEST_QUOTED_WORDS = 3
"""Shortest sentence or clause to quote, unless the message is shorter: "Yes." identifies nothing."""

_THANKS = re.compile(
    r"\b(thank\w*|helpful|helped|feel(?:ing)? (?:much |a (?:lot|little|bit) )?better|great idea)\b",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_BETWEEN_CLAUSES = re.compile(r"[.!?,;:()\n\u2013\u2014]|\s-\s")
_OPENING = re.compile(rf"\s*(\S+(?:[^\S\n]+\S+){{0,{QUOTED_WORDS - 1}}})")
_MARKUP = re.compile(r"[<>\[\]{}\"]")


@dataclass(frozen=True)
class TurnLabels:
    """Labels of one supporter turn."""

    stage: Stage
    emotion: Emotion
    intensity: int


def stage_at(place: float) -> Stage:
    """Return the stage at `place`, the share of the supporter's turns that came before, in [0, 1]."""
    return (Stage.EXPLORATION, Stage.COMFORTING, Stage.ACTION)[min(2, int(place * 3))]


def label_turn(
    emotion: Emotion, before: int, after: int, seeker_texts: Sequence[str], place: float
) -> TurnLabels:
    """Return the labels of a supporter turn, by the rules of this module.

    Args:
        emotion: Of the dialogue.
        before: The seeker's rating of its intensity before the dialogue, 1 to 5.
        after: The rating after it.
        seeker_texts: The seeker's turns so far; at least one.
        place: Share of the supporter's turns that came before, in [0, 1].
    """
    drop = before - after
    if sum(len(text.split()) for text in seeker_texts) <= GREETING_WORDS:
        return TurnLabels(Stage.EXPLORATION, Emotion.NEUTRAL, 1)
    if place >= 0.6 and drop > 0 and _THANKS.search(seeker_texts[-1]):
        return TurnLabels(stage_at(place), Emotion.JOY, 2)
    return TurnLabels(stage_at(place), emotion, min(5, max(1, round(before - drop * place))))


def reasoning_by_rule(
    history: Sequence[CaseUtterance],
    labels: TurnLabels,
    strategy: Strategy,
    problem: str,
    face_class: str | None,
    rng: np.random.Generator,
) -> Reasoning:
    """Return the three steps before a reply.

    Args:
        history: Ends with the seeker's message.
        labels: Of the turn.
        strategy: Of the reply.
        problem: ESConv's problem type, lower case.
        face_class: What the photo beside the last message shows; None without a photo.
        rng: Draws the wording.
    """
    reasons = _wording()["strategy"]["reason"][strategy.value]
    return Reasoning(
        _history_step(history, labels, problem, rng),
        _emotion_step(history, labels, face_class, rng),
        StrategyStep(_draw(rng, reasons), strategy),
    )


def _history_step(
    history: Sequence[CaseUtterance], labels: TurnLabels, problem: str, rng: np.random.Generator
) -> HistoryStep:
    words = _wording()
    if labels.emotion is Emotion.NEUTRAL:
        sentences = [_draw(rng, words["history"]["unknown"])]
    else:
        phrase = _draw(rng, words["problem"].get(problem, words["problem"]["other"]))
        sentences = [_draw(rng, words["history"]["issue"]).format(problem=phrase)]
        if quote := exact_quote(history[-1].text):
            sentences.append(_draw(rng, words["history"]["quote"]).format(quote=quote))
    sentences.append(_draw(rng, words["history"]["stage"][labels.stage.value]))
    return HistoryStep(" ".join(sentences), labels.stage)


def _emotion_step(
    history: Sequence[CaseUtterance],
    labels: TurnLabels,
    face_class: str | None,
    rng: np.random.Generator,
) -> EmotionStep:
    words = _wording()["emotion"]
    sentences: list[str] = []
    if labels.emotion is Emotion.NEUTRAL:
        sentences.append(_draw(rng, words["neutral"]))
    elif labels.emotion is Emotion.JOY:
        sentences.append(_draw(rng, words["relief"]))
    else:
        name = _draw(rng, words["name"][labels.emotion.value])
        cue = _cue(history, words["words"][labels.emotion.value])
        pattern = _draw(rng, words["cue"] if cue else words["plain"])
        sentences.append(pattern.format(cue=cue, emotion=name))
        sentences.append(_draw(rng, words["intensity"][str(labels.intensity)]))
    if face_class is not None:
        sentences.insert(int(rng.integers(0, 2)), _draw(rng, words["face"][face_class]))
    return EmotionStep(
        " ".join(sentences), SENTIMENT_OF[labels.emotion], labels.emotion, labels.intensity
    )


def exact_quote(text: str) -> str | None:
    """Return a verbatim quotation of a message, at most `QUOTED_WORDS` long.

    It is the longest sentence of a fitting length, else the longest such clause, else the opening.
    Text that could be read as mark-up is not quoted; None if nothing is left.

    Example:
        >>> exact_quote("Hi. My boss shouted at me, again! Then he left.")
        'My boss shouted at me, again!'
    """
    fewest = min(FEWEST_QUOTED_WORDS, len(text.split()))
    for parts in (_SENTENCE.findall(text), _BETWEEN_CLAUSES.split(text)):
        fitting = [
            part.strip()
            for part in parts
            if fewest <= len(part.split()) <= QUOTED_WORDS and not _MARKUP.search(part)
        ]
        if fitting:
            return max(fitting, key=len)
    opening = _OPENING.match(text)
    return opening[1] if opening and not _MARKUP.search(opening[1]) else None


def _cue(history: Sequence[CaseUtterance], cues: Sequence[str]) -> str | None:
    """Return the seeker's latest word that is in `cues`, as they spelled it."""
    for utterance in reversed(history):
        if utterance.speaker is Speaker.SEEKER:
            for word in reversed(re.findall(r"[A-Za-z']+", utterance.text)):
                if word.lower() in cues:
                    return str(word)
    return None


def _draw(rng: np.random.Generator, variants: Sequence[str]) -> str:
    return variants[int(rng.integers(len(variants)))]


@cache
def _wording() -> dict[str, Any]:
    path = Path(__file__).with_name("rule_wording.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
