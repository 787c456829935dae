"""Published numbers that may stand beside ours (`published.toml`), by the stage that measures the same."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from pydantic import Field

from compeer_core.config import FrozenModel, load_toml
from training.common import results


class PublishedTable(FrozenModel):
    """Published numbers of one evaluation."""

    stage: str
    """The stage that measures the same, such as "evaluate sage"."""
    title: str
    compared: str
    measures: Mapping[str, str]
    """Units of the columns, by name."""
    footnote: str
    """The source, and how its protocol differs from ours."""
    rows: Mapping[str, tuple[float, ...]]

    def metrics(self, about: str) -> Iterator[results.Metric]:
        """Yield the numbers; none has an interval or a count."""
        for model, row in self.rows.items():
            for (name, unit), value in zip(self.measures.items(), row, strict=True):
                yield results.Metric(name=name, value=value, unit=unit, of=model, about=about)


class _Published(FrozenModel):
    tables: tuple[PublishedTable, ...] = Field(min_length=1)


@cache
def published_tables() -> tuple[PublishedTable, ...]:
    """Return all tables."""
    return load_toml(Path(__file__).with_name("published.toml"), _Published).tables
