"""Accuracy of the strategy signs of `compeer_core.consistency`, on ESConv's strategy labels.

Reported by `evaluate consistency` with `esconv` set. Only turns with a single strategy are used: ESConv
labels utterances, and a turn may consist of several.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compeer_core.cer import CerRecord
from compeer_core.consistency import Followed, carries_out
from compeer_core.stats import Estimate, bootstrap_weights, estimate
from compeer_core.taxonomy import Strategy
from training.common import results
from training.data.records import read_records


@dataclass(frozen=True)
class SignRates:
    """How often signs of a strategy are detected, with intervals over dialogues."""

    found: Estimate
    """In turns with this strategy (recall)."""
    false_alarms: Estimate
    """In turns with another strategy."""


def measure_signs(path: Path) -> Mapping[Strategy | None, SignRates]:
    """Return the rates of each strategy, and of all strategies together under None.

    For all together, the false-alarm rate is the mean over the other seven strategies.

    Args:
        path: CER rows of ESConv (`cer rules`); the train split is measured.

    Raises:
        ConfigError: The file is missing, or holds anything but CER rows.
    """
    groups: list[str] = []
    labels: list[int] = []
    detected: list[list[bool]] = []
    strategies = tuple(Strategy)
    for record in read_records(path, CerRecord):
        case = record.case
        if case.split != "train" or len(case.labels.strategies) != 1:
            continue
        history, reply = case.dialogue().utterances, case.original or ""
        groups.append(case.source_id)
        labels.append(strategies.index(case.labels.strategies[0]))
        detected.append(
            [carries_out(history, reply, each, "en") is Followed.YES for each in strategies]
        )
    signs, label = np.array(detected), np.array(labels)
    is_label = label[:, None] == np.arange(len(strategies))
    weights = bootstrap_weights(groups)

    def rate(where: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], turns: int) -> Estimate:
        values = weights @ (signs & where).sum(axis=1) / (weights @ where.sum(axis=1))
        return estimate(values, turns)

    rates: dict[Strategy | None, SignRates] = {
        None: SignRates(rate(is_label, len(label)), rate(~is_label, len(label)))
    }
    for place, strategy in enumerate(strategies):
        column = np.arange(len(strategies)) == place
        right, wrong = is_label & column, ~is_label & column
        rates[strategy] = SignRates(rate(right, int(right.sum())), rate(wrong, int(wrong.sum())))
    return rates


def sign_metrics(rates: Mapping[Strategy | None, SignRates]) -> list[results.Metric]:
    """Return the rates as rows of a results file."""
    return [
        results.measured(name, rate, unit="%", of="signs", about=strategy or "all strategies")
        for strategy, both in rates.items()
        for name, rate in (("recall", both.found), ("false positive rate", both.false_alarms))
    ]
