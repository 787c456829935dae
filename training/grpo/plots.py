"""Plots of a run as PNG: rewards, and the diversity of the completions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_DPI = 150
_STYLES = ("-", "--", "-.", ":", (0, (1, 4)), (0, (6, 4)))

PLOTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "reward": (
        "reward",
        {
            "reward/total": "total",
            "reward/weighted": "total, reweighted",
            "eval_reward/total": "total, held-out prompts",
        },
    ),
    "reward_parts": (
        "mean, from -1 to 1",
        {
            "reward/history": "history step",
            "reward/emotion": "emotion step",
            "reward/strategy": "strategy step",
            "reward/reply": "reply",
            "reward/format": "format",
        },
    ),
    "entropy": ("entropy of a token, nats", {"entropy": "training"}),
    "distinct": (
        "share of different words, pairs",
        {"text/distinct_1": "distinct-1", "text/distinct_2": "distinct-2"},
    ),
    "redundancy": (
        "mean cosine",
        {
            "redundancy/s_in": "with the group's other replies",
            "redundancy/s_hi": "with the history",
            "redundancy/tau": "tau of Eq. 7",
        },
    ),
    "groups": (
        "share",
        {
            "groups/zero_std": "groups of equal rewards",
            "groups/zero_std_weighted": "after reweighting",
            "judge/unscorable": "completions without a reward",
            "text/complete": "complete turns",
        },
    ),
}
"""Per plot: the label of its y axis, and the metrics it shows with their names."""

_SMOOTHED_OVER = 0.05


def plot_run(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw the plots that a run has metrics for, and return their paths.

    Args:
        rows: The rows of metrics.jsonl.
        folder: Receives `<name>.png`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [
        path
        for name, (axis, lines) in PLOTS.items()
        if _plot(rows, axis, lines, path := folder / f"{name}.png")
    ]


def _plot(
    rows: Sequence[Mapping[str, Any]], axis: str, lines: Mapping[str, str], path: Path
) -> bool:
    """Draw one plot; False if none of its metrics was logged."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    is_empty = True
    for number, (metric, label) in enumerate(lines.items()):
        points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
        if not points:
            continue
        is_empty = False
        steps, values = zip(*points, strict=True)
        width = max(1, round(_SMOOTHED_OVER * len(values)))
        (line,) = axes.plot(
            steps, smoothed(values, width), linestyle=_STYLES[number % len(_STYLES)], label=label
        )
        if width > 1:
            axes.plot(steps, values, color=line.get_color(), alpha=0.2, linewidth=0.8)
    if is_empty:
        return False
    axes.set_xlabel("step")
    axes.set_ylabel(axis)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=_DPI)
    return True


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return the moving average over each value and the `width - 1` before it.

    Example:
        >>> smoothed([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    windows = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]
