"""Metrics of a policy's answers to turns of a corpus: labels, replies, and the effect of photos.

Pure functions from answers to rows of a results file. 95 % intervals resample whole dialogues.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compeer_core.cer import CerRecord
from compeer_core.ngrams import loops
from compeer_core.reasoning import Reading, Reasoning
from compeer_core.stats import (
    Estimate,
    Floats,
    bootstrap_weights,
    estimate,
    jackknife,
    weighted_mean,
)
from training.common import results
from training.common.diversity import distinct_without
from training.evaluation.bleu_rouge import ORDERS, overlap
from training.evaluation.face_swap import Condition
from training.evaluation.metrics import Ints, accuracy, confusion, macro_f1, weighted_f1

MAJORITY = "majority class"


@dataclass(frozen=True)
class Answer:
    """A policy's answer, and the corpus's labels and reply."""

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
    """Return a readable label, or None."""
    return str(label) if isinstance(label, str) else None


LABELS = {"strategy": strategy_of, "emotion": emotion_of, "stage": stage_of}


def label_metrics(by_setting: Mapping[str, Sequence[Answer]]) -> Iterator[results.Metric]:
    """Yield the agreement of labels with the corpus, and that of the majority class."""
    for label, of in LABELS.items():
        for number, (way, answers) in enumerate(by_setting.items()):
            weights = _weights(answers)
            true = [of(answer.gold) or "" for answer in answers]
            if number == 0:
                majority = Counter(true).most_common(1)[0][0]
                yield from _agreement(weights, true, [majority] * len(true), label, MAJORITY)
            given = [of(answer.reading) or "unreadable" for answer in answers]
            yield from _agreement(weights, true, given, label, f"policy, {way}")


def _agreement(
    weights: Floats, true: Sequence[str], given: Sequence[str], about: str, of: str
) -> Iterator[results.Metric]:
    names = {name: number for number, name in enumerate(sorted({*true, *given}))}
    truth: Ints = np.array([names[name] for name in true])
    verdict: Ints = np.array([names[name] for name in given])
    table = confusion(weights, truth, verdict, len(names))
    measures = {
        "accuracy": accuracy(table),
        "macro F1": macro_f1(table),
        "weighted F1": weighted_f1(table),
    }
    for measure, values in measures.items():
        result = estimate(values, len(true))
        yield results.measured(measure, result, unit="%", of=of, about=about)


# --- replies -----------------------------------------------------------------------------------

_REPLIES = "replies"


def reply_metrics(by_setting: Mapping[str, Sequence[Answer]]) -> Iterator[results.Metric]:
    """Yield overlap with the corpus's replies, diversity, and shares of malformed turns."""
    for way, answers in by_setting.items():
        name = f"policy, {way}"
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
            "repetition rate (4-gram >= 3x)": [loops(text) for text in texts],
        }.items():
            values = weighted_mean(weights, flags)
            yield _turns(measure, estimate(values, len(answers)), name)


def _reply(measure: str, result: Estimate, of: str) -> results.Metric:
    return results.measured(measure, result, unit="%", of=of, about=_REPLIES)


def _turns(measure: str, result: Estimate, of: str) -> results.Metric:
    return results.measured(measure, result, unit="%", of=of, about="whole turns")


def _distinct(answers: Sequence[Answer], texts: Sequence[str], length: int) -> Estimate:
    """Return distinct-n of all replies, with a jackknife interval over dialogues."""
    sources = [answer.sample.case.dialogue_id for answer in answers]
    values = np.array(distinct_without(texts, sources, length))
    return jackknife(values, len(values) - 1).model_copy(update={"n": len(answers)})


# --- photos ------------------------------------------------------------------------------------


def picture_metrics(answers: Mapping[Condition, Sequence[Answer]]) -> Iterator[results.Metric]:
    """Yield the effect of a photo on the emotion step, paired by turn."""
    without, matching, contradicting = (
        answers[kind] for kind in (Condition.NONE, Condition.FITS, Condition.CONTRADICTS)
    )
    weights = _weights(without)
    alone, with_photo = (
        weighted_mean(weights, [emotion_of(a.reading) == emotion_of(a.gold) for a in of_condition])
        for of_condition in (without, matching)
    )
    for of, values in (
        ("without a photo", alone),
        ("with a matching photo", with_photo),
        ("difference", with_photo - alone),
    ):
        result = estimate(values, len(without))
        yield results.measured("accuracy", result, unit="%", of=of, about="emotion and photos")
    # After a mere greeting the text is neutral, so a sad face does not contradict it.
    for about, is_greeting in (
        ("sentiment label where photo and text contradict", False),
        ("sentiment label after a greeting", True),
    ):
        pairs = [
            (plain, other)
            for plain, other in zip(without, contradicting, strict=True)
            if (sentiment_of(other.gold) == "Neutral") is is_greeting
        ]
        if pairs:
            yield from _sentiment_changes(pairs, about)


def _sentiment_changes(
    pairs: Sequence[tuple[Answer, Answer]], about: str
) -> Iterator[results.Metric]:
    """Yield how often the sentiment is the photo's, without and with the photo, paired by turn."""
    weights = _weights([plain for plain, _ in pairs])
    of_turn = [
        (
            sentiment_of(plain.reading),
            sentiment_of(other.reading),
            "Positive" if sentiment_of(plain.gold) == "Negative" else "Negative",
        )
        for plain, other in pairs
    ]
    for of, flags in (
        ("without a photo", [before == face for before, _, face in of_turn]),
        ("with the photo", [after == face for _, after, face in of_turn]),
        (
            "label changes to the photo's",
            [after == face != before for before, after, face in of_turn],
        ),
    ):
        result = estimate(weighted_mean(weights, flags), len(pairs))
        yield results.measured("share", result, unit="%", of=of, about=about)


def _weights(answers: Sequence[Answer]) -> Floats:
    return bootstrap_weights([answer.sample.case.dialogue_id for answer in answers])
