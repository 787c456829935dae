"""Whether two runs differ: `python -m training evaluate compare RUN_A RUN_B`.

Both are runs of `evaluate esc-eval`, `evaluate sage` or `evaluate reading` with the same settings, so that they
share dialogues. Each measure is tested on the dialogues that both have: a paired bootstrap over their sources
(`compeer_core.stats.expanded_interval` and its p-value), corrected for the number of measures by Holm's method.
In SAGE the seeds of a profile are averaged.

Runs with other settings are refused: a difference could come from the seeker, the judges or the sampling. What
names the models, and what changes no text, may differ.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.stats import (
    FEW_CLUSTERS,
    bootstrap_p,
    bootstrap_weights,
    expanded_interval,
    holm,
    weighted_mean,
)
from training.common import results
from training.evaluation import esc_eval, sage
from training.evaluation.saved_runs import Measure, SavedRun, read_run
from training.evaluation.simulated_dialogues import titled
from training.stages import refuse_resume

RESAMPLES = 10_000
_OF_A_RUN = {"command", "count", "name", "output", "policies", "results", "transcripts"}
_WITHOUT_EFFECT = {
    *("backoff_seconds", "device", "in_flight", "price_per_million_input"),
    *("price_per_million_output", "requests_per_minute", "retries", "scores", "timeout_seconds"),
}
_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[evaluate compare]`: two runs."""

    first: Path
    """Folder of run A."""
    second: Path
    """Folder of run B; may be the same for two models of one run."""
    models: tuple[str, str] | None = None
    """The model of A and that of B; None takes the first policy of each."""
    output: Path = Path("runs/compare")
    """Folder of the comparison: `<name>.json`, `table.md` and `table.csv`."""
    name: str = Field(default="compare", pattern=r"^[\w-]+$")
    """Name of the results file."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Test the differences of A and B, and publish the table.

    Raises:
        ConfigError: A run cannot be read, they differ in stage or settings, or they share too few dialogues.
    """
    refuse_resume(resume, "a comparison has nothing to resume")
    first, second = read_run(config.first), read_run(config.second)
    _check_same_settings(first, second)
    models = config.models or (first.transcripts[0].model, second.transcripts[0].model)
    if first.path.resolve() == second.path.resolve() and models[0] == models[1]:
        raise ConfigError(f"{first.path}: {models[0]} would be compared with itself; set `models`")
    sources = {each.dialogue: each.source or each.dialogue for each in first.transcripts}
    labels = (f"A: {models[0]}", f"B: {models[1]}")
    sides = values_of(first, models[0]), values_of(second, models[1])
    metrics = tuple(comparison(*sides, sources, labels))
    if not metrics:
        raise ConfigError(
            f"{first.path} and {second.path}: {models[0]} and {models[1]} share too few dialogues; a test "
            f"needs {FEW_CLUSTERS} with the same measure"
        )
    if dry_run:
        return
    result = results.made(
        ("numpy", "scipy"),
        name=config.name,
        title=titled(
            f"{first.stage}: A ({first.path}) and B ({second.path}) on their shared dialogues",
            is_small=first.is_small_simulation,
        ),
        model=", ".join(labels),
        label_source=_label_source(first.config),
        command=f"python -m training evaluate compare {first.path} {second.path} "
        f"--set 'models={json.dumps(models)}'",
        seed=0,
        interval="95 % CI, paired bootstrap over dialogues; p is two-sided",
        compared="Model",
        metrics=metrics,
    )
    results.publish(result, config.output, config.output)


def values_of(run: SavedRun, model: str) -> dict[Measure, dict[str, float]]:
    """Return the values of a model's dialogues by measure and dialogue, seeds averaged.

    Raises:
        ConfigError: The run has no such model, or none of its dialogues has a measure.
    """
    found: dict[Measure, dict[str, list[float]]] = {}
    for each in run.transcripts:
        for measure, value in each.values.items() if each.model == model else ():
            found.setdefault(measure, {}).setdefault(each.dialogue, []).append(value)
    if not found:
        names = ", ".join(sorted({each.model for each in run.transcripts}))
        raise ConfigError(
            f"{run.path}: {model} has no dialogue with a measure in this run of {run.stage}; its models "
            f"are {names}"
        )
    return {
        measure: {dialogue: fmean(values) for dialogue, values in by_dialogue.items()}
        for measure, by_dialogue in found.items()
    }


def comparison(
    first: Mapping[Measure, Mapping[str, float]],
    second: Mapping[Measure, Mapping[str, float]],
    sources: Mapping[str, str],
    labels: tuple[str, str],
) -> Iterator[results.Metric]:
    """Yield both means on the shared dialogues, their difference, its p-value and the corrected one.

    Args:
        first: Values of A by measure and dialogue.
        second: Those of B.
        sources: The unit of resampling of each dialogue.
        labels: Names of A and B. Measures with fewer than `FEW_CLUSTERS` shared sources are left out.
    """
    p_values: dict[Measure, tuple[float, int]] = {}
    skipped = []
    for measure in first:
        others = second.get(measure, {})
        shared = sorted(first[measure].keys() & others.keys())
        clusters = [sources[dialogue] for dialogue in shared]
        count = len({*clusters})
        if count < FEW_CLUSTERS:
            skipped.append(measure.name)
            continue
        weights = bootstrap_weights(clusters, RESAMPLES)
        one, other = (
            np.array([side[each] for each in shared]) for side in (first[measure], others)
        )
        difference = weighted_mean(weights, one - other)
        p_values[measure] = bootstrap_p(difference[1:], count), len(shared)
        sides = [weighted_mean(weights, side) for side in (one, other)]
        rows = ((labels[0], "", sides[0]), (labels[1], "", sides[1]), (*labels, difference))
        for of, baseline, draws in rows:
            interval = expanded_interval(float(draws[0]), draws[1:], count)
            yield results.measured(
                "mean",
                interval.model_copy(update={"n": len(shared)}),
                unit=measure.unit,
                of=of,
                baseline=baseline,
                about=measure.name,
            )
    if skipped and p_values:
        _log.warning("too few shared dialogues, not tested: %s", ", ".join(skipped))
    corrected = holm([p for p, _ in p_values.values()])
    for (measure, (p, n)), after in zip(p_values.items(), corrected, strict=True):
        for name, value in (("p", p), (f"p, Holm ({len(p_values)} tests)", after)):
            yield results.Metric(
                name=name, value=value, n=n, of=labels[0], baseline=labels[1], about=measure.name
            )


def _label_source(config: Any) -> str:
    if isinstance(config, esc_eval.Config):
        return f"judges {', '.join(judge.name for judge in config.judges)}"
    if isinstance(config, sage.Config):
        return f"simulator {config.simulator.author}"
    return f"{config.label_source} ({config.reader}), and rule where it says so"


def _check_same_settings(first: SavedRun, second: SavedRun) -> None:
    if first.stage != second.stage:
        raise ConfigError(
            f"{first.path} is a run of {first.stage!r} and {second.path} of {second.stage!r}; only runs "
            "of one stage can be compared"
        )
    one, other = (
        {
            key: value
            for key, value in run.config.model_dump(mode="json").items()
            if key not in _OF_A_RUN
        }
        for run in (first, second)
    )
    for difference in differences(one, other):
        raise ConfigError(
            f"{first.path} and {second.path} have other settings, first {difference}; run one of them again "
            "with the settings of the other"
        )


def differences(one: Any, other: Any, key: str = "") -> Iterator[str]:
    """Yield the settings that differ, with both values. The address of an endpoint is no setting.

    Example:
        >>> [*differences({"judges": [{"top_p": 0.9, "retries": 1}]}, {"judges": [{"top_p": 1.0}]})]
        ['judges.0.top_p (0.9 and 1.0)']
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted((one.keys() | other.keys()) - _WITHOUT_EFFECT):
            yield from differences(one.get(name), other.get(name), f"{key}.{name}".strip("."))
    elif isinstance(one, list) and isinstance(other, list):
        for number, (left, right) in enumerate(zip_longest(one, other)):
            yield from differences(left, right, f"{key}.{number}")
    elif _named(one, key) != _named(other, key):
        yield f"{key} ({json.dumps(one)} and {json.dumps(other)})"


def _named(value: Any, key: str) -> Any:
    is_source = key.endswith("source") and isinstance(value, str)
    return value.rpartition("#")[2] if is_source else value
