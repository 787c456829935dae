"""What benchmarks share: summaries of repeated measurements, the machine, and the results file."""

import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training.common import results

GIB = 2**30


def publish(output: Path, libraries: Sequence[str], **fields: Any) -> None:
    """Save the result of a benchmark, and print it; `fields` are those of `results.Result`."""
    timed = {"label_source": "timed", "machine": machine(), "interval": "Range"}
    result = results.made(libraries, **timed | fields)
    path = results.save(result, output)
    sys.stdout.write(f"{results.render(result)}\n\nwritten to {path}\n")


def summarise(
    name: str,
    values: Sequence[float],
    unit: str = "",
    note: str = "",
    *,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
) -> results.Metric:
    """Return the median of repeated measurements, or another statistic, with their range."""
    return results.Metric(
        name=name,
        value=statistic(values),
        low=min(values),
        high=max(values),
        n=len(values),
        unit=unit,
        note=note,
    )


def machine() -> str:
    """Return the processor's name and number of cores."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{os.cpu_count()} cores, {model}"
