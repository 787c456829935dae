"""Turns made from the human labels: right by construction, in the wording of the first SFT set.

The reply is the corpus's own. The sentences come from ``training/cer/rule_wording.toml``, so that the style does
not differ from a policy trained on them. The labels follow the silver rule.
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
from training.cer.silver.words import Context, Words

WORDING = Path(__file__).parents[1] / "rule_wording.toml"
_MARKUP = re.compile(r"[<>\[\]{}\"“”]")
_TAG_SIGNS = re.compile(r"[<>]")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_LONGEST_QUOTE = 12


def faithful_turn(
    case: Case, settings: StepSettings, lists: Words, rng: np.random.Generator
) -> SupportTurn | None:
    """Return a turn that states the human labels, or None if there are too few.

    Args:
        case: Needs an original reply, a problem of the word lists, an emotion that the wording
            knows, a strategy and the rating before the dialogue.
        settings: Settings of the rule that the turn has to pass.
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
    context = Context(case, lists)
    disclosed = context.has_disclosed(settings.greeting_words)
    stage = stage_at(context.position) if disclosed else Stage.EXPLORATION
    emotion, strength = labels.emotion, min(5, max(1, round(intensity)))
    if labels.emotion_of != "utterance":
        if not disclosed:
            emotion, strength = Emotion.NEUTRAL, 1
        elif is_relieved(case, context, settings):
            emotion, strength = Emotion.JOY, 2
    strategy = labels.strategies[0]
    return SupportTurn(
        Reasoning(
            HistoryStep(_history(case, context, disclosed, stage, rng), stage),
            EmotionStep(
                _feeling(context, emotion, strength, rng), SENTIMENT_OF[emotion], emotion, strength
            ),
            StrategyStep(_drawn(rng, wording["strategy"]["reason"][strategy.value]), strategy),
        ),
        reply,
    )


def _history(
    case: Case, context: Context, disclosed: bool, stage: Stage, rng: np.random.Generator
) -> str:
    words = _wording()
    ending = _drawn(rng, words["history"]["stage"][stage.value])
    if not disclosed:
        return f"{_drawn(rng, words['history']['unknown'])} {ending}"
    problem = _drawn(rng, words["problem"][case.labels.problem or ""])
    issue = _drawn(rng, words["history"]["issue"]).format(problem=problem)
    quotation = quote(context.last_message)
    cited = [_drawn(rng, words["history"]["quote"]).format(quote=quotation)] if quotation else []
    return " ".join([issue, *cited, ending])


def _feeling(context: Context, emotion: Emotion, strength: int, rng: np.random.Generator) -> str:
    words = _wording()["emotion"]
    if emotion is Emotion.NEUTRAL:
        return _drawn(rng, words["neutral"])
    if emotion is Emotion.JOY:
        return _drawn(rng, words["relief"])
    name = _drawn(rng, words["name"][emotion.value])
    cues = [word for word in words_of(context.seeker_text) if word in words["words"][emotion.value]]
    pattern = _drawn(rng, words["cue"] if cues else words["plain"])
    sentence = pattern.format(cue=cues[-1] if cues else "", emotion=name)
    return f"{sentence} {_drawn(rng, words['intensity'][str(strength)])}"


def quote(text: str) -> str:
    """Return the longest sentence of a message without markup, at most twelve words of it."""
    sentences = [each.strip() for each in _SENTENCE.findall(text)] or [text.strip()]
    words = _MARKUP.sub("", max(sentences, key=len)).split()
    return " ".join(words[:_LONGEST_QUOTE]) + (" ..." if len(words) > _LONGEST_QUOTE else "")


def _drawn(rng: np.random.Generator, variants: Sequence[str]) -> str:
    return variants[int(rng.integers(len(variants)))]


@cache
def _wording() -> dict[str, Any]:
    return tomllib.loads(WORDING.read_text(encoding="utf-8"))
