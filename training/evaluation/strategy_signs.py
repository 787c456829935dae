"""How good the signs of strategies are: on people's turns, of which people said what they do.

The tables of `compeer_core.consistency` come from here, by `evaluate consistency` with `esconv` set.
Only turns count to which one strategy was given: ESConv's labels are those of utterances, and a turn
may have several.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compeer_core.cer import CerRecord
from compeer_core.consistency import Followed, carries_out
from compeer_core.taxonomy import Strategy
from training.common import results
from training.data.samples import read_records
from training.evaluation.metrics import Estimate, drawn_weights, estimate


@dataclass(frozen=True)
class Found:
    """How often signs are there, with intervals over dialogues."""

    found: Estimate
    """In turns that carry out the strategy."""
    false_alarms: Estimate
    """In turns that carry out another one."""


def measure_signs(path: Path) -> Mapping[Strategy | None, Found]:
    """Return the measure of each strategy, and of all together under None.

    For all together, a false alarm is a sign of one of the other seven strategies, averaged over them:
    the expectation of drawing one at random.

    Args:
        path: CER rows of ESConv (`cer rules`); the train split is measured.

    Raises:
        ConfigError: The file is missing, or holds anything but CER rows.
    """
    groups: list[str] = []
    labels: list[int] = []
    shown: list[list[bool]] = []
    strategies = tuple(Strategy)
    for record in read_records(path, CerRecord):
        case = record.case
        if case.split != "train" or len(case.labels.strategies) != 1:
            continue
        history, reply = case.dialogue().utterances, case.original or ""
        groups.append(case.dialogue_id)
        labels.append(strategies.index(case.labels.strategies[0]))
        shown.append(
            [carries_out(history, reply, each, "en") is Followed.YES for each in strategies]
        )
    signs, label = np.array(shown), np.array(labels)
    is_label = label[:, None] == np.arange(len(strategies))
    weights = drawn_weights(groups)

    def rate(where: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], turns: int) -> Estimate:
        values = weights @ (signs & where).sum(axis=1) / (weights @ where.sum(axis=1))
        return estimate(values, turns)

    measured: dict[Strategy | None, Found] = {
        None: Found(rate(is_label, len(label)), rate(~is_label, len(label)))
    }
    for place, strategy in enumerate(strategies):
        column = np.arange(len(strategies)) == place
        right, wrong = is_label & column, ~is_label & column
        measured[strategy] = Found(rate(right, int(right.sum())), rate(wrong, int(wrong.sum())))
    return measured


def sign_lines(measured: Mapping[Strategy | None, Found]) -> list[results.Metric]:
    """Return the lines of a results file."""
    return [
        results.measured(name, found, unit="%", of="signs", about=strategy or "all strategies")
        for strategy, both in measured.items()
        for name, found in (("found", both.found), ("false alarms", both.false_alarms))
    ]
