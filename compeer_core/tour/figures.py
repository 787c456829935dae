"""The numbers that the tour shows: ours come out of `assets/results`, the paper's are quoted.

Both kinds are named in `figures.toml`, and are of two types, so that no table can mix them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError


class FigureSource(FrozenModel):
    """Where a number of ours stands."""

    name: str
    file: str
    """Below `assets/results`."""
    metric: str
    of: str = ""
    baseline: str = ""
    """What `of` is compared with, where the number is a difference."""
    about: str = ""


class PaperFigure(FrozenModel):
    """A number that the paper prints."""

    name: str
    value: str
    """As it is printed."""
    place: str
    """Where it is printed."""


class FigureList(FrozenModel):
    """`figures.toml`."""

    figures: tuple[FigureSource, ...] = Field(min_length=1)
    paper_address: str
    paper: tuple[PaperFigure, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A measured number, ready to be shown."""

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str
    file: str
    """Below `assets`."""
    model: str
    labels: str
    """Where the right answers come from."""

    @property
    def text(self) -> str:
        """The number with its unit.

        Example:
            >>> Figure(53.377, 46.87, 59.66, 400, "%", "", "", "").text
            '53.4 %'
        """
        return f"{_rounded(self.value)} {self.unit}".strip()

    @property
    def interval(self) -> str:
        """Its 95 % interval, empty where there is none.

        Example:
            >>> Figure(53.377, 46.87, 59.66, 400, "%", "", "", "").interval
            '46.9–59.7'
        """
        if self.low is None or self.high is None:
            return ""
        return f"{_rounded(self.low)}–{_rounded(self.high)}"


def load_figures(sources: FigureList, assets: Path) -> Mapping[str, Figure]:
    """Read the numbers.

    Raises:
        ConfigError: A file cannot be read, or does not hold the number just once.
    """
    return {source.name: _figure(source, assets) for source in sources.figures}


def _figure(source: FigureSource, assets: Path) -> Figure:
    path = assets / "results" / source.file
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = [
            metric
            for metric in result["metrics"]
            if metric["name"] == source.metric
            and metric.get("of", "") == source.of
            and metric.get("baseline", "") == source.baseline
            and metric.get("about", "") == source.about
        ]
        if len(found) != 1:
            raise ConfigError(
                f"figure {source.name!r}: {path} holds {source.metric!r} {len(found)} times"
            )
        metric = found[0]
        compared = str(result["model"]).split(", ")  # of several models, whose number it is
        return Figure(
            value=float(metric["value"]),
            low=metric.get("low"),
            high=metric.get("high"),
            n=int(metric["n"]),
            unit=metric.get("unit", ""),
            file=f"results/{source.file}",
            model=source.of if source.of in compared else result["model"],
            labels=result["label_source"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"figure {source.name!r}: {path} cannot be used: {error!r}") from error


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value in {0, 100} else f"{value:.1f}"
