"""Measured numbers, and the documents that show them.

Every number in README.md and in the model cards lives in `assets/results/<name>.json`. A document
shows a file's table between two markers:

```text
<!-- results:esconv_nano -->
<!-- /results:esconv_nano -->
```

`python -m training results` writes the tables between the markers, `--check` tells whether a
document differs from the files. Nothing between the markers is typed by hand.
"""

import csv
import datetime
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.stats import Estimate

_log = logging.getLogger(__name__)

FOLDER = Path("assets/results")
DOCUMENTS = (
    "README.md",
    "assets/checkpoints/*/README.md",
    "assets/encoder/README.md",
    "training/PAPER.md",
)
"""Documents that may hold tables, as patterns below the checkout."""

_MARKER = re.compile(r"^<!-- (?P<closing>/?)results:(?P<name>[\w-]+) -->$", re.MULTILINE)


class Metric(FrozenModel):
    """One measured number."""

    name: str
    """What was measured, in words that a reader knows."""
    value: float = Field(allow_inf_nan=False)
    low: float | None = Field(default=None, allow_inf_nan=False)
    """Lower end of the interval; None if there is none."""
    high: float | None = Field(default=None, allow_inf_nan=False)
    """Upper end of the interval."""
    n: int | None = Field(default=None, ge=1)
    """How many independent measurements or examples are behind it; None for a number that others
    have published without saying."""
    unit: str = ""
    """Such as "s", "%" or "tokens/s"; empty for a plain number."""
    note: str = ""
    """What a reader must know to read the number right."""
    of: str = ""
    """In a comparison: whose number it is. Empty where the file is about one model."""
    about: str = ""
    """In a comparison: the question that all who are compared were asked."""

    @model_validator(mode="after")
    def _interval_holds_value(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"{self.name}: an interval has two ends, or none")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"{self.name}: the interval begins above its end")
        return self


def measured(
    name: str, found: Estimate, *, unit: str = "", note: str = "", of: str = "", about: str = ""
) -> Metric:
    """Return a value with its interval as a row of a results file; shares as per cent for "%"."""
    scale = 100.0 if unit == "%" else 1.0
    return Metric(
        name=name,
        value=scale * found.value,
        low=scale * found.low,
        high=scale * found.high,
        n=found.n,
        unit=unit,
        note=note,
        of=of,
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
    """Where the right answers come from, such as "ESConv annotations"; "timed" for speed."""
    command: str
    """The command that makes the file again."""
    versions: Mapping[str, str]
    """Of Python and of the libraries that matter."""
    seed: int | None = None
    machine: str = ""
    """Where speed matters: the processor."""
    interval: str = "95 % interval"
    """What `low` and `high` of the metrics are."""
    compared: str = "Judge"
    """In a comparison: what kind of thing is compared."""
    metrics: tuple[Metric, ...] = Field(min_length=1)


def load(path: Path) -> Result:
    """Read one file.

    Raises:
        ConfigError: The file is missing, is no valid result, or names itself otherwise.
    """
    try:
        result = Result.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {key or 'file'}: {first['msg']}") from error
    if result.name != path.stem:
        raise ConfigError(f"{path}: its name says '{result.name}', the file says '{path.stem}'")
    return result


def save(result: Result, folder: Path = FOLDER) -> Path:
    """Write `<folder>/<name>.json` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def publish(result: Result, output: Path, folder: Path) -> None:
    """Save a comparison, put it beside what it was made of as `table.md` and `table.csv`, and log it.

    Args:
        result: What was found.
        output: Folder of the results files.
        folder: Of the run.
    """
    save(result, output)
    table = render(result)
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    write_csv(folder / "table.csv", result.metrics, result.compared)
    _log.info("%s", table)


def write_csv(path: Path, metrics: Sequence[Metric], compared: str = "Judge") -> None:
    """Write the metrics of a comparison, one row for each."""
    head = ["question", compared.lower(), "measure", "value", "low", "high", "n", "unit"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for one in metrics:
            low = "" if one.low is None else one.low
            high = "" if one.high is None else one.high
            writer.writerow([one.about, one.of, one.name, one.value, low, high, one.n, one.unit])


def render(result: Result) -> str:
    """Return the Markdown that stands between two markers, without them."""
    if any(metric.of for metric in result.metrics):
        return _comparison(result)
    has_interval = any(metric.low is not None for metric in result.metrics)
    has_note = any(metric.note for metric in result.metrics)
    head = ["Measure", "Value", *([result.interval] if has_interval else []), "n"]
    align = ["---", "---:", *(["---:"] if has_interval else []), "---:"]
    rows = []
    for metric in result.metrics:
        row = [metric.name, format_value(metric.value, metric.unit)]
        if has_interval:
            row.append(_interval(metric))
        row.append(_count(metric.n))
        rows.append([*row, metric.note] if has_note else row)
    if has_note:
        head, align = [*head, "Note"], [*align, "---"]
    lines = [f"**{result.title}**", "", *(_row(cells) for cells in (head, align, *rows)), ""]
    return "\n".join([*lines, _origin(result)])


def _comparison(result: Result) -> str:
    """Return a row for each question and who was asked, a column for each measure.

    Questions that have the same measures share a table.
    """
    rows: dict[tuple[str, str], dict[str, Metric]] = {}
    for metric in result.metrics:
        rows.setdefault((metric.about, metric.of), {})[metric.name] = metric
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    columns_of: dict[str, dict[str, None]] = {}
    for (about, _), measures in rows.items():
        columns_of.setdefault(about, {}).update(dict.fromkeys(measures))
    for (about, of), measures in rows.items():
        columns = tuple(columns_of[about])
        cells = [_cell(measures.get(column)) for column in columns]
        counts = sorted({metric.n or 0 for metric in measures.values()})
        n = " to ".join(_count(count or None) for count in dict.fromkeys((counts[0], counts[-1])))
        tables.setdefault(columns, []).append([about, of, *cells, n])
    lines = [f"**{result.title}**", "", f"In brackets: {result.interval}.", ""]
    for columns, body in tables.items():
        head = ["Question", result.compared, *columns, "n"]
        align = ["---", "---", *["---:"] * (len(columns) + 1)]
        lines += [*(_row(cells) for cells in (head, align, *body)), ""]
    return "\n".join([*lines, _origin(result)])


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return ""
    value = format_value(metric.value, metric.unit)
    return f"{value} ({_interval(metric)})" if metric.low is not None else value


def format_value(value: float, unit: str = "") -> str:
    """Return a number with about three telling digits, and its unit.

    Example:
        >>> format_value(0.0123), format_value(93.51, "%"), format_value(1234.5, "tokens/s")
        ('0.0123', '93.5 %', '1,234 tokens/s')
    """
    text = _number(value, _places(value))
    return f"{text} {unit}" if unit else text


def update_documents(root: Path, *, write: bool) -> list[Path]:
    """Bring the tables of all documents up to date, and return the documents that were not.

    Args:
        root: The checkout.
        write: Whether to change the documents; False only looks.

    Raises:
        ConfigError: A marker names no file, has no partner, or a file is not valid.
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
        table = render(load(folder / f"{name}.json"))
        pieces += [text[position : opening.end()], f"\n{table}\n"]
        position = closing.start()
    return "".join([*pieces, text[position:]])


def _documents(root: Path) -> Iterator[Path]:
    for pattern in DOCUMENTS:
        yield from sorted(root.glob(pattern))


def _origin(result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    parts = [
        f"Model: {result.model}",
        f"labels: {result.label_source}",
        *([f"machine: {result.machine}"] if result.machine else []),
        *([f"seed {result.seed}"] if result.seed is not None else []),
        result.date.isoformat(),
        versions,
    ]
    return f"{'; '.join(part for part in parts if part)}.\nAgain: `{result.command}`"


def _count(n: int | None) -> str:
    return "not said" if n is None else f"{n:,}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _interval(metric: Metric) -> str:
    if metric.low is None or metric.high is None:
        return ""
    places = _places(metric.value)
    return f"{_number(metric.low, places)} to {_number(metric.high, places)}"


def _places(value: float) -> int:
    """Return how many decimals leave three telling digits."""
    size = abs(value)
    if size >= 100 or size == 0:
        return 0
    return min(6, 2 - math.floor(math.log10(size)))


def _number(value: float, places: int) -> str:
    return f"{value:,.{places}f}"
