"""Synthetic dialogues and turns, so that benchmarks need no corpora: only lengths affect timings."""

import itertools
from collections.abc import Sequence

import numpy as np

from compeer_core.dialogue import Speaker, Utterance
from compeer_core.reasoning import EmotionStep, HistoryStep, Reasoning, StrategyStep, SupportTurn
from compeer_core.taxonomy import Emotion, Sentiment, Stage, Strategy

SEEKER = (
    "I lost my job last month and I do not know how to tell my family about it.",
    "I keep waking up at four and then I lie there and go over everything again.",
    "My friend stopped answering and I think that I said something wrong at her party.",
    "It feels as if everybody else has a plan and I am the only one who is late.",
    "I tried to talk to my brother but he told me to stop complaining and move on.",
)
SUPPORTER = (
    "That sounds like a lot to carry. What has been the hardest part of it so far?",
    "You sound worn out by this, and it makes sense after so many nights like that.",
    "It took courage to say it. Have you been able to speak with anybody about it?",
    "Maybe a short walk before bed could help, even if it is only ten minutes long.",
)


def synthetic_utterances(rng: np.random.Generator, length: int) -> list[Utterance]:
    """Return a dialogue that starts and ends with the seeker; an even length is increased by one."""
    speakers = itertools.cycle((Speaker.SEEKER, Speaker.SUPPORTER))
    return [
        Utterance(speaker, str(rng.choice(SEEKER if speaker is Speaker.SEEKER else SUPPORTER)))
        for speaker, _ in zip(speakers, range(length + (length + 1) % 2), strict=False)
    ]


def synthetic_turn(rng: np.random.Generator) -> SupportTurn:
    """Return a complete turn."""

    def any_of(values: Sequence[str]) -> str:
        return str(rng.choice(list(values)))

    issue, feeling = any_of(SEEKER), any_of(SEEKER)
    return SupportTurn(
        Reasoning(
            HistoryStep(f"The seeker says: {issue}", Stage(any_of(list(Stage)))),
            EmotionStep(
                f"They seem to be under strain. {feeling}",
                Sentiment.NEGATIVE,
                Emotion(any_of(list(Emotion))),
                int(rng.integers(1, 6)),
            ),
            StrategyStep("This may help them now.", Strategy(any_of(list(Strategy)))),
        ),
        " ".join([any_of(SUPPORTER), any_of(SUPPORTER)]),
    )


def synthetic_reference(rng: np.random.Generator) -> str:
    """Return a reference reply."""
    return str(rng.choice(SUPPORTER))
