"""Measured numbers, and the documents that show them.

Every number in README.md, `docs` and the model cards lives in `assets/results/<name>.json`. A
document shows a table between two markers:

```text
<!-- results:reading_small -->    all tables of a file
<!-- results:headline -->         the rows that `headline.toml` picks from all files
```

`python -m training results` writes the tables, `--check` reports documents that differ from the
files. Nobody types anything between the markers.
"""

import csv
import datetime
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import ConfigError
from compeer_core.row_files import read_json
from compeer_core.stats import Estimate
from training.common.run_directory import versions

_log = logging.getLogger(__name__)

FOLDER = Path("assets/results")
DOCUMENTS = (
    "README.md",
    "docs/*.md",
    "assets/checkpoints/*/README.md",
    "assets/encoder/README.md",
    "assets/risk/README.md",
)
"""Documents that may hold tables, as patterns below the checkout."""

SMALL_SIMULATION = "Small simulation"
"""Begins the title of results with the small seeker, which never stand beside published ones."""

HEADLINE = "headline"
"""The marker of the table that `HEADLINE_ROWS` describes."""
HEADLINE_ROWS = Path(__file__).with_name("headline.toml")

_MARKER = re.compile(r"^<!-- (?P<closing>/?)results:(?P<name>[\w-]+) -->$", re.MULTILINE)


class Metric(FrozenModel):
    """One measured number."""

    name: str
    """What was measured, in the field's words."""
    value: float = Field(allow_inf_nan=False)
    low: float | None = Field(default=None, allow_inf_nan=False)
    """Lower end of the interval; None if there is none."""
    high: float | None = Field(default=None, allow_inf_nan=False)
    """Upper end of the interval."""
    n: int | None = Field(default=None, ge=1)
    """Number of independent measurements or examples; None for a published number without one."""
    unit: str = ""
    """Such as "s", "%" or "tokens/s"; empty for a plain number."""
    note: str = ""
    """What a reader must know to read the number correctly."""
    of: str = ""
    """In a comparison: the system measured. Empty where the file is about one model."""
    baseline: str = ""
    """In a difference `of` - `baseline`: the system subtracted. Empty elsewhere."""
    about: str = ""
    """In a comparison: the question all systems were measured on."""

    @property
    def label(self) -> str:
        """The system's name, or the two of a difference."""
        return f"difference ({self.of} - {self.baseline})" if self.baseline else self.of

    @model_validator(mode="after")
    def _interval_holds_value(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"{self.name}: an interval needs both ends, or neither")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"{self.name}: the interval's low end is above its high end")
        return self


def measured(
    name: str,
    estimate: Estimate,
    *,
    unit: str = "",
    note: str = "",
    of: str = "",
    baseline: str = "",
    about: str = "",
) -> Metric:
    """Return an estimate as a row of a results file; the unit "%" scales shares to per cent."""
    scale = 100.0 if unit == "%" else 1.0
    return Metric(
        name=name,
        value=scale * estimate.value,
        low=scale * estimate.low,
        high=scale * estimate.high,
        n=estimate.n,
        unit=unit,
        note=note,
        of=of,
        baseline=baseline,
        about=about,
    )


class Result(FrozenModel):
    """One file of `assets/results`."""

    name: str = Field(pattern=r"^[\w-]+$")
    """The file's name without .json."""
    title: str
    date: datetime.date
    """When it was measured."""
    model: str
    """What was measured."""
    label_source: str
    """Who or what made the labels, such as "ESConv annotations"; "timed" for speed."""
    command: str
    """The command that reproduces the file."""
    versions: Mapping[str, str]
    """Of Python and of the libraries that matter."""
    seed: int | None = None
    machine: str = ""
    """Where speed matters: the processor."""
    interval: str = "95 % CI"
    """What `low` and `high` of the metrics are."""
    gate: str = ""
    """Whether generated replies passed `compeer_core.gate`: "off", "on", or for which policies it was on. Empty
    if none were generated, and in files from before the gate."""
    compared: str = "Judge"
    """In a comparison: the kind of system compared, as a column head."""
    metrics: tuple[Metric, ...] = Field(min_length=1)

    @property
    def is_small_simulation(self) -> bool:
        return self.title.startswith(SMALL_SIMULATION)


def made(libraries: Collection[str] = ("torch", "transformers"), **fields: Any) -> Result:
    """Return a result of today, with the versions of Python and of some libraries."""
    today = datetime.datetime.now(datetime.UTC).date()
    return Result(date=today, versions=versions(libraries), **fields)


@dataclass(frozen=True)
class Table:
    """A table of results, for Markdown and for pages."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Collection[int] = (0,)
    """Columns of texts; the others are numbers, which are aligned to the right."""

    @property
    def markdown(self) -> str:
        """The table in Markdown, with an empty line at its end."""
        align = ["---" if place in self.texts else "---:" for place in range(len(self.head))]
        return "\n".join([*map(_row, (self.head, align, *self.rows)), ""])


class Selection(FrozenModel):
    """The fields that pick one metric of a file."""

    metric: str
    of: str = ""
    baseline: str = ""
    about: str = ""

    def pick(self, result: Result) -> Metric:
        """Return the metric.

        Raises:
            ConfigError: No metric matches, or several do.
        """
        wanted = (self.metric, self.of, self.baseline, self.about)
        matches = [m for m in result.metrics if (m.name, m.of, m.baseline, m.about) == wanted]
        if len(matches) != 1:
            raise ConfigError(f"{result.name}.json: {len(matches)} metrics match {wanted}, not 1")
        return matches[0]


class HeadlineRow(FrozenModel):
    """One row of the README's table."""

    title: str
    file: str
    """Name of the results file, without .json."""
    value: Selection
    unit_of_n: str
    """What `n` counts, such as "turns"."""
    against: str
    """What the number is measured against, in words."""
    reference: Selection | None = None
    """The number of what it is measured against; None where `value` is a difference."""


class Headline(FrozenModel):
    """`headline.toml`: the rows of the README's table."""

    row: tuple[HeadlineRow, ...] = Field(min_length=1, max_length=8)


def load(path: Path) -> Result:
    """Read one file.

    Raises:
        ConfigError: The file is missing or invalid, or its `name` differs from its file name.
    """
    result = read_json(path, Result)
    if result.name != path.stem:
        raise ConfigError(f"{path}: `name` is '{result.name}', expected '{path.stem}'")
    return result


def save(result: Result, folder: Path = FOLDER) -> Path:
    """Write `<folder>/<name>.json` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def publish(result: Result, output: Path, folder: Path) -> None:
    """Save a comparison for all runs and in its own, write it there as `table.md` and `table.csv`, and log it.

    Args:
        result: The comparison.
        output: Folder of the results files.
        folder: Of the run.
    """
    save(result, output)
    save(result, folder)  # another run of the same name overwrites the first file
    table = render(result)
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    write_csv(folder / "table.csv", result.metrics, result.compared)
    _log.info("%s", table)


def write_csv(path: Path, metrics: Sequence[Metric], compared: str = "Judge") -> None:
    """Write the metrics of a comparison, one row for each."""
    head = ["question", compared.lower(), "baseline", "measure"]
    head += ["value", "low", "high", "n", "unit"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for metric in metrics:
            low = "" if metric.low is None else metric.low
            high = "" if metric.high is None else metric.high
            numbers = [metric.value, low, high, metric.n, metric.unit]
            writer.writerow([metric.about, metric.of, metric.baseline, metric.name, *numbers])


def render(result: Result) -> str:
    """Return the Markdown between two markers: the title, all tables and how they were measured."""
    is_comparison = any(metric.of for metric in result.metrics)
    brackets = [f"In brackets: {result.interval}.", ""] if is_comparison else []
    tables = [table.markdown for table in tables_of(result)]
    return "\n".join([f"**{result.title}**", "", *brackets, *tables, origin(result)])


def tables_of(result: Result) -> list[Table]:
    """Return the tables of a file."""
    if any(metric.of for metric in result.metrics):
        return _comparison(result)
    return [_list(result)]


def _list(result: Result) -> Table:
    """Return a row for each measure of one model."""
    has_interval = any(metric.low is not None for metric in result.metrics)
    has_note = any(metric.note for metric in result.metrics)
    head = ["Measure", "Value", *([result.interval] if has_interval else []), "n"]
    rows = []
    for metric in result.metrics:
        row = [metric.name, format_value(metric.value, metric.unit)]
        if has_interval:
            row.append(_interval(metric))
        row.append(_count(metric.n))
        rows.append([*row, metric.note] if has_note else row)
    if has_note:
        return Table([*head, "Note"], rows, texts=(0, len(head)))
    return Table(head, rows)


def _comparison(result: Result) -> list[Table]:
    """Return a row for each question and system, a column for each measure.

    Questions with the same measures share a table.
    """
    rows: dict[tuple[str, str], dict[str, Metric]] = {}
    for metric in result.metrics:
        rows.setdefault((metric.about, metric.label), {})[metric.name] = metric
    columns_of: dict[str, dict[str, None]] = {}
    for (about, _), measures in rows.items():
        columns_of.setdefault(about, {}).update(dict.fromkeys(measures))
    bodies: dict[tuple[str, ...], list[list[str]]] = {}
    for (about, label), measures in rows.items():
        columns = tuple(columns_of[about])
        cells = [_cell(measures.get(column)) for column in columns]
        counts = sorted({metric.n or 0 for metric in measures.values()})
        n = " to ".join(_count(count or None) for count in dict.fromkeys((counts[0], counts[-1])))
        bodies.setdefault(columns, []).append([about, label, *cells, n])
    return [
        Table(["Question", result.compared, *columns, "n"], body, texts=(0, 1))
        for columns, body in bodies.items()
    ]


def render_headline(folder: Path, rows: Path = HEADLINE_ROWS) -> str:
    """Return the README's table: a few numbers, each with n, interval and reference.

    Raises:
        ConfigError: `headline.toml` or a results file is invalid, or a row matches no metric.
    """
    head = ["Measure", "Result (95 % CI)", "Measured against"]
    rows_shown = []
    for row in load_toml(rows, Headline).row:
        result = load(folder / f"{row.file}.json")
        metric = row.value.pick(result)
        title = f"{row.title} (n = {_count(metric.n)} {row.unit_of_n})"
        reference = "" if row.reference is None else _cell(row.reference.pick(result))
        against = f"{row.against}: {reference}" if reference else row.against
        rows_shown.append([title, _cell(metric), against])
    table = Table(head, rows_shown, texts=(0, 1, 2)).markdown
    return "\n".join([table, "Render the table: `python -m training results`."])


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return ""
    value = format_value(metric.value, metric.unit)
    return f"{value} ({_interval(metric)})" if metric.low is not None else value


def format_value(value: float, unit: str = "") -> str:
    """Return a number with about three significant digits, and its unit.

    Example:
        >>> format_value(0.0123), format_value(93.51, "%"), format_value(1234.5, "tokens/s")
        ('0.0123', '93.5 %', '1,234 tokens/s')
    """
    text = _number(value, _places(value))
    return f"{text} {unit}" if unit else text


def update_documents(root: Path, *, write: bool) -> list[Path]:
    """Return the documents whose tables differ from the files, and rewrite them if asked.

    Args:
        root: The checkout.
        write: Whether to change the documents.

    Raises:
        ConfigError: A marker names no file or has no partner, or a file is invalid.
    """
    stale = []
    for document in _documents(root):
        old = document.read_text(encoding="utf-8")
        new = fill(old, root / FOLDER, document)
        if new != old:
            stale.append(document)
            if write:
                document.write_text(new, encoding="utf-8")
    return stale


def fill(text: str, folder: Path, document: Path) -> str:
    """Return a document's text with the tables of `folder` between its markers."""
    pieces, position = [], 0
    markers = iter(_MARKER.finditer(text))
    for opening in markers:
        name = opening["name"]
        closing = next(markers, None)
        if opening["closing"] or closing is None or not closing["closing"]:
            raise ConfigError(f"{document}: the marker results:{name} has no partner")
        if closing["name"] != name:
            raise ConfigError(f"{document}: results:{name} is closed by results:{closing['name']}")
        if name == HEADLINE:
            table = render_headline(folder)
        else:
            table = render(load(folder / f"{name}.json"))
        pieces += [text[position : opening.end()], f"\n\n{table}\n\n"]
        position = closing.start()
    return "".join([*pieces, text[position:]])


def _documents(root: Path) -> Iterator[Path]:
    for pattern in DOCUMENTS:
        yield from sorted(root.glob(pattern))


def origin(result: Result) -> str:
    """Return two lines: how the numbers were measured, and the command that reproduces them."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    parts = [
        f"Model: {result.model}",
        f"labels: {result.label_source}",
        *([f"machine: {result.machine}"] if result.machine else []),
        *([f"seed {result.seed}"] if result.seed is not None else []),
        *([f"gate: {result.gate}"] if result.gate else []),
        result.date.isoformat(),
        versions,
    ]
    return f"{'; '.join(part for part in parts if part)}.\nReproduce: `{result.command}`"


def _count(n: int | None) -> str:
    return "not reported" if n is None else f"{n:,}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _interval(metric: Metric) -> str:
    if metric.low is None or metric.high is None:
        return ""
    places = _places(metric.value)
    return f"{_number(metric.low, places)} to {_number(metric.high, places)}"


def _places(value: float) -> int:
    """Return the number of decimals that leave three significant digits."""
    size = abs(value)
    if size >= 100 or size == 0:
        return 0
    return min(6, 2 - math.floor(math.log10(size)))


def _number(value: float, places: int) -> str:
    return f"{value:,.{places}f}"
