"""What is measured on a policy's answers to turns of a corpus: labels, replies, and what photos change.

Pure functions from answers to rows of a results file. Intervals are at 95 % and draw whole dialogues.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from compeer_core.cer import CerRecord
from compeer_core.config import FrozenModel
from compeer_core.reasoning import Reading, Reasoning
from training.common import results
from training.common.diversity import distinct_without, loops
from training.evaluation.metrics import (
    Estimate,
    Floats,
    Ints,
    accuracy,
    confusion,
    drawn_weights,
    estimate,
    jackknife,
    weighted_f1,
    weighted_mean,
)
from training.evaluation.overlap import ORDERS, overlap
from training.evaluation.shown_faces import Condition

PUBLISHED = Path(__file__).with_name("published_esconv.toml")
COMMONEST = "always the commonest"


@dataclass(frozen=True)
class Answer:
    """What a policy wrote, and what the corpus says."""

    sample: CerRecord
    reading: Reading
    gold: Reasoning
    reference: str


# --- labels ------------------------------------------------------------------------------------


def strategy_of(steps: Reading | Reasoning) -> str | None:
    return None if steps.strategy is None else _text(steps.strategy.strategy)


def emotion_of(steps: Reading | Reasoning) -> str | None:
    return None if steps.emotion is None else _text(steps.emotion.emotion)


def sentiment_of(steps: Reading | Reasoning) -> str | None:
    return None if steps.emotion is None else _text(steps.emotion.sentiment)


def stage_of(steps: Reading | Reasoning) -> str | None:
    return None if steps.history is None else _text(steps.history.stage)


def _text(label: object) -> str | None:
    """Return a label that could be read; an unreadable one is none."""
    return str(label) if isinstance(label, str) else None


LABELS = {"strategy": strategy_of, "emotion": emotion_of, "stage": stage_of}


def label_metrics(found: Mapping[str, Sequence[Answer]]) -> Iterator[results.Metric]:
    """Yield how often the labels are the corpus's, beside the commonest label's."""
    for label, of in LABELS.items():
        for number, (way, answers) in enumerate(found.items()):
            weights = _weights(answers)
            true = [of(answer.gold) or "" for answer in answers]
            if number == 0:
                commonest = Counter(true).most_common(1)[0][0]
                yield from _agreement(weights, true, [commonest] * len(true), label, COMMONEST)
            given = [of(answer.reading) or "unreadable" for answer in answers]
            yield from _agreement(weights, true, given, label, f"the policy, {way}")


def _agreement(
    weights: Floats, true: Sequence[str], given: Sequence[str], about: str, of: str
) -> Iterator[results.Metric]:
    names = {name: number for number, name in enumerate(sorted({*true, *given}))}
    truth: Ints = np.array([names[name] for name in true])
    verdict: Ints = np.array([names[name] for name in given])
    table = confusion(weights, truth, verdict, len(names))
    for measure, values in (("accuracy", accuracy(table)), ("weighted F1", weighted_f1(table))):
        found = estimate(values, len(true))
        yield results.measured(measure, found, unit="%", of=of, about=about)


# --- replies -----------------------------------------------------------------------------------

_REPLIES = "replies"


def reply_metrics(found: Mapping[str, Sequence[Answer]]) -> Iterator[results.Metric]:
    """Yield what replies have in common with people's, how different they are, and what is broken."""
    for way, answers in found.items():
        name = f"the policy, {way}"
        weights = _weights(answers)
        texts = [answer.reading.reply or "" for answer in answers]
        common = overlap(texts, [answer.reference for answer in answers])
        of_sample: dict[str, Floats] = {
            **{f"BLEU-{order}": common.bleu(weights, order) for order in ORDERS},
            "ROUGE-L": weighted_mean(weights, common.rouge_l),
        }
        for measure, values in of_sample.items():
            yield _reply(measure, estimate(values, len(answers)), name)
        for length in (1, 2):
            yield _reply(f"distinct-{length}", _distinct(answers, texts, length), name)
        for measure, flags in {
            "complete": [answer.reading.is_complete for answer in answers],
            "loops (a 4-gram three times)": [loops(text) for text in texts],
        }.items():
            values = weighted_mean(weights, flags)
            yield _turns(measure, estimate(values, len(answers)), name)


def _reply(measure: str, found: Estimate, of: str) -> results.Metric:
    return results.measured(measure, found, unit="%", of=of, about=_REPLIES)


def _turns(measure: str, found: Estimate, of: str) -> results.Metric:
    return results.measured(measure, found, unit="%", of=of, about="whole turns")


def _distinct(answers: Sequence[Answer], texts: Sequence[str], length: int) -> Estimate:
    """Return distinct-n of all replies; the interval leaves each dialogue out in turn."""
    sources = [answer.sample.case.dialogue_id for answer in answers]
    values = np.array(distinct_without(texts, sources, length))
    return replace(jackknife(values, len(values) - 1), n=len(answers))


class _Published(FrozenModel):
    """One model of others, in per cent."""

    name: str
    strategy_accuracy: float | None = None
    bleu_2: float | None = None
    bleu_4: float | None = None
    rouge_l: float | None = None
    distinct_1: float | None = None
    distinct_2: float | None = None


_MEASURES = {
    "strategy_accuracy": ("strategy", "accuracy"),
    "bleu_2": (_REPLIES, "BLEU-2"),
    "bleu_4": (_REPLIES, "BLEU-4"),
    "rouge_l": (_REPLIES, "ROUGE-L"),
    "distinct_1": (_REPLIES, "distinct-1"),
    "distinct_2": (_REPLIES, "distinct-2"),
}


def published(path: Path) -> Iterator[results.Metric]:
    """Yield what others have published, as far as they say."""
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["rows"]:
        row = _Published.model_validate(entry)
        for key, (about, measure) in _MEASURES.items():
            value = getattr(row, key)
            if value is not None:
                yield results.Metric(name=measure, value=value, unit="%", of=row.name, about=about)


# --- pictures ----------------------------------------------------------------------------------


def picture_metrics(written: Mapping[Condition, Sequence[Answer]]) -> Iterator[results.Metric]:
    """Yield what a photo changes in the emotion step, in pairs of the same turns."""
    without, right, wrong = (
        written[kind] for kind in (Condition.NONE, Condition.FITS, Condition.CONTRADICTS)
    )
    weights = _weights(without)
    alone, with_photo = (
        weighted_mean(weights, [emotion_of(one.reading) == emotion_of(one.gold) for one in answers])
        for answers in (without, right)
    )
    for of, values in (
        ("without a photo", alone),
        ("with a photo that fits", with_photo),
        ("difference", with_photo - alone),
    ):
        found = estimate(values, len(without))
        yield results.measured("accuracy", found, unit="%", of=of, about="emotion and photos")
    # A photo contradicts where the text is sad and the face is happy, or the other way round. After a
    # mere greeting the words say nothing, and a sad face says something.
    greeted = [sentiment_of(one.gold) == "Neutral" for one in wrong]
    for about, told in (
        ("sentiment of the photo, against the text's", False),
        ("sentiment of the photo, after a mere greeting", True),
    ):
        numbers = [number for number, one in enumerate(greeted) if one is told]
        if numbers:
            pairs = [(without[number], wrong[number]) for number in numbers]
            yield from _turned(pairs, about)


def _turned(pairs: Sequence[tuple[Answer, Answer]], about: str) -> Iterator[results.Metric]:
    """Yield how often the sentiment is the photo's, without it and with it, in the same turns."""
    before = [sentiment_of(one.reading) for one, _ in pairs]
    after = [sentiment_of(other.reading) for _, other in pairs]
    of_face = [
        "Positive" if sentiment_of(one.gold) == "Negative" else "Negative" for one, _ in pairs
    ]
    weights = _weights([one for one, _ in pairs])
    of_turn = list(zip(before, after, of_face, strict=True))
    for of, flags in (
        ("without a photo", [one == face for one, _, face in of_turn]),
        ("with that photo", [other == face for _, other, face in of_turn]),
        ("changes to the photo's", [other == face != one for one, other, face in of_turn]),
    ):
        found = estimate(weighted_mean(weights, flags), len(pairs))
        yield results.measured("share", found, unit="%", of=of, about=about)


def _weights(answers: Sequence[Answer]) -> Floats:
    return drawn_weights([answer.sample.case.dialogue_id for answer in answers])
