"""Plots of evaluation results, as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compeer_core.stats import Estimate
from training.common import results
from training.common.calibration import reliability
from training.evaluation.preferences import OUTCOMES

_INK = "#1f2937"
_DOTS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DPI = 150
_LINES = ("-", "--", ":", "-.")
_COLOURS = ("#1d4ed8", "#b45309", "#047857", "#7c3aed")
_OUTCOME_COLOURS = ("#93c5fd", "#e5e7eb", "#9ca3af", "#fdba74")
_OUTCOME_HATCHES = ("", "..", "xx", "//")
_STEPS_PER_POINT = 5

TRAINING: Mapping[str, str] = {
    "reward/total": "reward, before reweighting",
    "text/distinct_2": "distinct-2 of a step's replies",
    "redundancy/s_in": "similarity of a group's replies (s_in)",
    "entropy": "entropy of a token, nats",
}
"""The metrics of a run that `plot_training` shows, with their titles."""


def plot_table(metrics: Sequence[results.Metric], path: Path) -> None:
    """Plot the balanced accuracy of each judge on each question, with its interval."""
    shown = [
        metric
        for metric in metrics
        if metric.name == "balanced accuracy" and metric.low is not None and not metric.baseline
    ]
    questions = list(dict.fromkeys(metric.about for metric in shown))
    judges = list(dict.fromkeys(metric.of for metric in shown))
    shown.sort(key=lambda metric: (questions.index(metric.about), judges.index(metric.of)))
    gaps = [-0.6 * questions.index(metric.about) - row for row, metric in enumerate(shown)]
    figure = Figure(figsize=(8, 1.2 + 0.28 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    _intervals(axes, shown, gaps)
    for number, judge in enumerate(judges):
        own = [place for place, metric in zip(gaps, shown, strict=True) if metric.of == judge]
        values = [metric.value for metric in shown if metric.of == judge]
        marker = _DOTS[number % len(_DOTS)]
        axes.plot(values, own, marker=marker, color=_INK, linestyle="none")
    axes.set_yticks(gaps, [f"{metric.about}: {metric.of}" for metric in shown])
    axes.set_xlabel("balanced accuracy, %, with 95 % CI")
    figure.savefig(path, dpi=_DPI)


def _intervals(axes: Axes, metrics: Sequence[results.Metric], places: Sequence[float]) -> None:
    """Draw the intervals of metrics as horizontal lines, on a grid."""
    rows = [pair for pair in zip(places, metrics, strict=True) if pair[1].low is not None]
    lows, highs = ([getattr(each, end) for _, each in rows] for end in ("low", "high"))
    axes.hlines([place for place, _ in rows], lows, highs, color=_INK, linewidth=1)
    axes.grid(axis="x", alpha=0.3)


def plot_reliability(
    probability: Sequence[float], label: Sequence[bool], name: str, path: Path
) -> None:
    """Plot the share of correct steps against the judge's probability (reliability diagram)."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle="--", label="calibrated")
    if probability:
        bins = reliability(probability, label)
        most = max(group.count for group in bins)
        points = (
            [group.mean_probability for group in bins],
            [group.share_true for group in bins],
        )
        areas = [20 + 180 * group.count / most for group in bins]
        axes.plot(*points, color=_INK, linewidth=1)
        axes.scatter(*points, s=areas, color=_INK, label="verdicts (area: number)")
    axes.set_xlabel("probability of True")
    axes.set_ylabel("share of correct steps")
    axes.set_title(name)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=_DPI)


def plot_rates(metrics: Sequence[results.Metric], measure: str, control: str, path: Path) -> None:
    """Plot a rate of each judge with its interval, and the chance rate as an open circle."""
    by_chance = {
        (metric.about, metric.of): metric.value
        for metric in metrics
        if metric.name == control and not metric.baseline
    }
    figure, axes, shown = _one_measure(metrics, measure, width=9)
    chances = [by_chance[metric.about, metric.of] for metric in shown]
    places = [-place for place in range(len(shown))]
    axes.scatter(chances, places, s=121, facecolors="none", edgecolors=_INK)
    axes.set_yticks(places, [f"{metric.about}:\n{metric.of}" for metric in shown])
    axes.set_xlabel(f"{measure}, %, 95 % CI\nring: {control}")
    axes.set_xlim(left=0)
    figure.savefig(path, dpi=_DPI)


def plot_means(metrics: Sequence[results.Metric], measure: str, path: Path) -> None:
    """Plot a measure of each policy, with its interval."""
    figure, axes, shown = _one_measure(metrics, measure, width=7)
    axes.set_yticks([-place for place in range(len(shown))], [metric.of for metric in shown])
    axes.set_xlabel(f"{measure}, with 95 % CI")
    figure.savefig(path, dpi=_DPI)


def _one_measure(
    metrics: Sequence[results.Metric], measure: str, width: float
) -> tuple[Figure, Axes, list[results.Metric]]:
    """Draw the metrics of a name from top to bottom, and return them."""
    shown = [metric for metric in metrics if metric.name == measure and not metric.baseline]
    places = [-place for place in range(len(shown))]
    figure = Figure(figsize=(width, 1.4 + 0.4 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    _intervals(axes, shown, places)
    axes.plot([each.value for each in shown], places, marker="o", color=_INK, linestyle="none")
    return figure, axes, shown


def plot_preferences(metrics: Sequence[results.Metric], raters: str, path: Path) -> None:
    """Plot the outcomes of each pair of models as a bar (the paper's Fig. 6), with the interval of the wins.

    Args:
        metrics: As `training.evaluation.preferences.pair_metrics` yields them.
        raters: Who answered, for the title.
        path: Output file.
    """
    shares = {
        (metric.about, metric.name): metric
        for metric in metrics
        if metric.name in OUTCOMES and not metric.baseline
    }
    pairs = list(dict.fromkeys(about for about, _ in shares))
    figure = Figure(figsize=(6.4, 1.6 + 0.6 * max(1, len(pairs))), layout="constrained")
    axes = figure.subplots()
    places = [-place for place in range(len(pairs))]
    begin = np.zeros(len(pairs))
    styles = zip(OUTCOMES, _OUTCOME_COLOURS, _OUTCOME_HATCHES, strict=True)
    for name, colour, hatch in styles:
        widths = np.array([shares[pair, name].value for pair in pairs])
        bars = axes.barh(places, widths, left=begin, height=0.55, color=colour, label=name)
        for bar in bars:
            bar.set(hatch=hatch, edgecolor=_INK)
        begin += widths
    for place, pair in zip(places, pairs, strict=True):
        wins = shares[pair, OUTCOMES[0]]
        assert wins.low is not None
        assert wins.high is not None
        axes.plot([wins.low, wins.high], [place, place], color=_INK, linewidth=2)
    axes.set_yticks(places, [f"{pair}\n(n = {shares[pair, OUTCOMES[0]].n})" for pair in pairs])
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of answers, %; line: 95 % CI of the wins")
    axes.set_title(f"answers: {raters}", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(OUTCOMES), fontsize="small")
    figure.savefig(path, dpi=_DPI)


def plot_dimensions(
    metrics: Sequence[results.Metric], dimensions: Sequence[str], path: Path
) -> None:
    """Plot measures of each model with their intervals, a panel for each question.

    Args:
        metrics: Of one results file.
        dimensions: Names of the measures, from top to bottom.
        path: Output file; its suffix decides the format.
    """
    shown = [metric for metric in metrics if metric.name in dimensions and not metric.baseline]
    questions = list(dict.fromkeys(metric.about for metric in shown))
    models = list(dict.fromkeys(metric.of for metric in shown))
    height = 0.9 + len(questions) * (0.5 + len(dimensions) * (0.16 + 0.12 * len(models)))
    figure = Figure(figsize=(5.6, height), layout="constrained")
    panels = figure.subplots(len(questions), sharex=True, squeeze=False)[:, 0]
    for axes, question in zip(panels, questions, strict=True):
        for number, model in enumerate(models):
            own = [metric for metric in shown if (metric.about, metric.of) == (question, model)]
            shift = 0.7 * ((number + 0.5) / len(models) - 0.5)
            places = [-dimensions.index(metric.name) - shift for metric in own]
            style = {"color": _COLOURS[number % len(_COLOURS)]}
            lows, highs = ([getattr(each, end) for each in own] for end in ("low", "high"))
            axes.hlines(places, lows, highs, linewidth=1, **style)
            marker = _DOTS[number % len(_DOTS)]
            values = [metric.value for metric in own]
            axes.plot(values, places, marker=marker, linestyle="none", label=model, **style)
        axes.set_yticks([-place for place in range(len(dimensions))], dimensions)
        axes.set_title(question, fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("% of the highest score, with 95 % CI")
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=_DPI)


def plot_rounds(curves: Mapping[str, Sequence[Estimate]], measure: str, path: Path) -> None:
    """Plot a measure by round of a dialogue, a line with its 95 % CI for each model.

    Args:
        curves: By model, an estimate before the first round and after each.
        measure: Label of the axis.
        path: Output file; its suffix decides the format.
    """
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (model, curve) in enumerate(curves.items()):
        rounds = range(len(curve))
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(
            rounds,
            [each.value for each in curve],
            color=colour,
            linestyle=_LINES[number % len(_LINES)],
            marker=_DOTS[number % len(_DOTS)],
            markersize=4,
            label=model,
        )
        ends = ([each.low for each in curve], [each.high for each in curve])
        axes.fill_between(rounds, *ends, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rounds so far")
    axes.set_ylabel(measure)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=_DPI)


def plot_training(runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: Path) -> None:
    """Plot training curves: thin lines for runs, thick ones for the mean of a policy's runs.

    Args:
        runs: For each policy, the metrics rows of its runs; averaged over a few steps per point.
        path: Output file.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, (metric, label) in zip(panels.flat, TRAINING.items(), strict=True):
        for number, (policy, of_policy) in enumerate(runs.items()):
            style = {
                "linestyle": _LINES[number % len(_LINES)],
                "color": _COLOURS[number % len(_COLOURS)],
            }
            curves = [smoothed_curve(rows, metric) for rows in of_policy]
            for curve in curves:
                axes.plot(*zip(*curve.items(), strict=True), linewidth=0.7, alpha=0.4, **style)
            shared = [step for step in curves[0] if all(step in curve for curve in curves)]
            means = [float(np.mean([curve[step] for curve in curves])) for step in shared]
            name = f"{policy} ({len(curves)} runs)" if len(curves) > 1 else policy
            axes.plot(shared, means, linewidth=2, label=name, **style)
        axes.set_title(label, fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels.flat[0].legend(fontsize="small")
    figure.savefig(path, dpi=_DPI)


def smoothed_curve(
    rows: Sequence[Mapping[str, Any]], metric: str, window: int = _STEPS_PER_POINT
) -> dict[int, float]:
    """Return the mean of a metric over windows of steps, by the last step of the window.

    Example:
        >>> rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": 3.0}, {"step": 3, "a": 7.0}]
        >>> smoothed_curve(rows, "a", 2)
        {2: 2.0, 4: 7.0}
    """
    values: dict[int, list[float]] = {}
    for row in rows:
        if row.get(metric) is not None:
            values.setdefault(-(-int(row["step"]) // window) * window, []).append(row[metric])
    return {step: float(np.mean(window_values)) for step, window_values in values.items()}
