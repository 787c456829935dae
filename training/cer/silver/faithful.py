"""Turns put together from what people labelled: right by construction, in the words of the first SFT.

The reply is the corpus's own. The sentences are those of ``training/cer/rule_wording.toml``, so that
such a turn does not differ in manner from a policy that learnt from them. The labels follow the silver rule's idea of what is right.
"""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from compeer_core.cer import Case
from compeer_core.phrases import words_of
from compeer_core.reasoning import (
    EmotionStep,
    HistoryStep,
    Reasoning,
    StrategyStep,
    SupportTurn,
)
from compeer_core.taxonomy import SENTIMENT_OF, Emotion, Stage
from training.cer.silver.steps import (
    StepSettings,
    expected_intensity,
    is_relieved,
    stage_at,
)
from training.cer.silver.words import Heard, Words

WORDING = Path(__file__).parents[1] / "rule_wording.toml"
_MARKUP = re.compile(r"[<>\[\]{}\"“”]")
_TAG_SIGNS = re.compile(r"[<>]")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_LONGEST_QUOTE = 12


def faithful_turn(
    case: Case, settings: StepSettings, lists: Words, rng: np.random.Generator
) -> SupportTurn | None:
    """Return a turn that says what people labelled, or None where they labelled too little.

    Args:
        case: Needs an original reply, a problem of the word lists, an emotion that the sentences
            know, a strategy and the rating before the talk.
        settings: Of the rule that the turn shall pass.
        lists: Word lists.
        rng: Draws the sentences.
    """
    wording = _wording()
    labels = case.labels
    reply = _TAG_SIGNS.sub("", case.original or "").strip()
    known = labels.emotion is not None and labels.emotion in wording["emotion"]["name"]
    if not (reply and known and labels.strategies and labels.problem in lists.problems):
        return None
    assert labels.emotion is not None  # `known` says so
    intensity = expected_intensity(case)
    if intensity is None:
        return None
    heard = Heard(case, lists)
    told = heard.told(settings.greeting_words)
    stage = stage_at(heard.place) if told else Stage.EXPLORATION
    emotion, strength = labels.emotion, min(5, max(1, round(intensity)))
    if labels.emotion_of != "utterance":
        if not told:
            emotion, strength = Emotion.NEUTRAL, 1
        elif is_relieved(case, heard, settings):
            emotion, strength = Emotion.JOY, 2
    strategy = labels.strategies[0]
    return SupportTurn(
        Reasoning(
            HistoryStep(_history(case, heard, told, stage, rng), stage),
            EmotionStep(
                _feeling(heard, emotion, strength, rng), SENTIMENT_OF[emotion], emotion, strength
            ),
            StrategyStep(_drawn(rng, wording["strategy"]["reason"][strategy.value]), strategy),
        ),
        reply,
    )


def _history(case: Case, heard: Heard, told: bool, stage: Stage, rng: np.random.Generator) -> str:
    words = _wording()
    ending = _drawn(rng, words["history"]["stage"][stage.value])
    if not told:
        return f"{_drawn(rng, words['history']['unknown'])} {ending}"
    problem = _drawn(rng, words["problem"][case.labels.problem or ""])
    issue = _drawn(rng, words["history"]["issue"]).format(problem=problem)
    quotation = quote(heard.last)
    said = [_drawn(rng, words["history"]["quote"]).format(quote=quotation)] if quotation else []
    return " ".join([issue, *said, ending])


def _feeling(heard: Heard, emotion: Emotion, strength: int, rng: np.random.Generator) -> str:
    words = _wording()["emotion"]
    if emotion is Emotion.NEUTRAL:
        return _drawn(rng, words["neutral"])
    if emotion is Emotion.JOY:
        return _drawn(rng, words["relief"])
    name = _drawn(rng, words["name"][emotion.value])
    cues = [word for word in words_of(heard.all) if word in words["words"][emotion.value]]
    pattern = _drawn(rng, words["cue"] if cues else words["plain"])
    sentence = pattern.format(cue=cues[-1] if cues else "", emotion=name)
    return f"{sentence} {_drawn(rng, words['intensity'][str(strength)])}"


def quote(text: str) -> str:
    """Return the longest sentence of a message without mark-up, cut to twelve words."""
    sentences = [each.strip() for each in _SENTENCE.findall(text)] or [text.strip()]
    found = _MARKUP.sub("", max(sentences, key=len)).split()
    return " ".join(found[:_LONGEST_QUOTE]) + (" ..." if len(found) > _LONGEST_QUOTE else "")


def _drawn(rng: np.random.Generator, variants: Sequence[str]) -> str:
    return variants[int(rng.integers(len(variants)))]


@cache
def _wording() -> dict[str, Any]:
    return tomllib.loads(WORDING.read_text(encoding="utf-8"))
