"""The numbers of the tour: ours from `assets/results`, the paper's as quotations.

`figures.toml` lists both kinds. They have different types, so that no table can mix them.
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
    """The location of one of our numbers."""

    name: str
    file: str
    """Path in `assets/results`."""
    metric: str
    of: str = ""
    about: str = ""


class PaperFigure(FrozenModel):
    """A number from the paper."""

    name: str
    value: str
    """As printed."""
    place: str
    """Its table or section."""


class FigureList(FrozenModel):
    """`figures.toml`."""

    figures: tuple[FigureSource, ...] = Field(min_length=1)
    paper_address: str
    paper: tuple[PaperFigure, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A measured number for display."""

    value: float
    low: float | None
    high: float | None
    n: int
    unit: str
    file: str
    """Path in `assets`."""
    model: str
    labels: str
    """The source of the labels."""

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
        """Its 95 % CI, empty if there is none.

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
        ConfigError: A file cannot be read, or does not contain the number exactly once.
    """
    return {source.name: _figure(source, assets) for source in sources.figures}


def _figure(source: FigureSource, assets: Path) -> Figure:
    path = assets / "results" / source.file
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        matches = [
            metric
            for metric in result["metrics"]
            if metric["name"] == source.metric
            and metric.get("of", "") == source.of
            and metric.get("about", "") == source.about
        ]
        if len(matches) != 1:
            raise ConfigError(
                f"figure {source.name!r}: {path} contains {source.metric!r} {len(matches)} times"
            )
        metric = matches[0]
        compared = str(result["model"]).split(
            ", "
        )  # the number may belong to one of several models
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
