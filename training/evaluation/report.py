"""A page about evaluations: `python -m training evaluate report <config.toml>`.

It shows results files and finished runs: tables with n and CI, published numbers below them (`published.toml`),
plots, how each run was made and what it cost, and every transcript. Output:

```text
<output>/report.html    one file without external requests, for screens, phones and print
<output>/report.md      the same without transcripts
<output>/plots/         the plots, as SVG
```

Transcripts, names and titles are untrusted: report.html escapes all of them, and a content security policy
forbids scripts and requests. report.md has no transcripts and escapes nothing: show it where HTML in Markdown is
cleaned. The conversations of corpora whose licence may forbid it are not shown.
"""

import base64
import datetime
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, Field, model_validator

from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import ConfigError
from compeer_core.row_files import read_rows, replacing
from compeer_core.stats import Estimate, bootstrap_weights, estimate, weighted_mean
from training.cer.requests import response_store
from training.common import results
from training.common.results import Table, format_value
from training.evaluation.esc_eval_scores import DIMENSIONS
from training.evaluation.plots import plot_dimensions, plot_preferences, plot_rounds
from training.evaluation.preferences import OUTCOMES
from training.evaluation.ratings import SOURCES
from training.evaluation.saved_runs import SavedRun, Transcript, read_run
from training.evaluation.simulated_dialogues import REQUESTS, titled
from training.stages import refuse_resume

PUBLISHED = Path(__file__).with_name("published.toml")
TEMPLATES = Path(__file__).with_name("templates")
PAGES = ("report.html", "report.md")


class Config(FrozenModel):
    """`[evaluate report]`: what to show, and where to write it."""

    title: str = "Evaluations of COMPEER"
    runs: tuple[Path, ...] = ()
    """Folders of runs of the stages in `saved_runs.READERS`; their results files are shown with them."""
    results: tuple[Path, ...] = ()
    """Results files of any stage, such as `evaluate reward` or `evaluate compare`."""
    output: Path = Path("runs/report")
    """Folder of the report."""

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if not (self.runs or self.results):
            raise ValueError("nothing to report: set runs or results")
        return self


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


class Published(FrozenModel):
    """`published.toml`."""

    tables: tuple[PublishedTable, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Plot:
    """A plot, and what it shows in words."""

    path: Path
    title: str

    @property
    def address(self) -> str:
        """The image itself, as a data URL."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.path.read_bytes()).decode()}"


@dataclass(frozen=True)
class Section:
    """A run with its results files, or a results file alone."""

    title: str
    results: Sequence[results.Result]
    run: SavedRun | None = None


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the report.

    Raises:
        ConfigError: A run or a results file is missing or truncated, or a run of another stage or empty.
    """
    refuse_resume(resume, "a report has nothing to resume")
    runs = [read_run(path) for path in config.runs]
    sections = [Section(_title_of(run), _results_of(run), run) for run in runs]
    sections += [Section(each.title, [each]) for each in map(results.load, config.results)]
    if dry_run:
        return
    folder = config.output / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        (section, list(_plots(section, folder, f"{number}_")))
        for number, section in enumerate(sections, start=1)
    ]
    today = datetime.datetime.now(datetime.UTC).date()
    for name in PAGES:
        template = _templates(escape=name.endswith(".html")).get_template(f"{name}.jinja")
        with replacing(config.output / name) as file:
            file.write(template.render(title=config.title, date=today, parts=parts))


def _title_of(run: SavedRun) -> str:
    return titled(f"{run.stage}: {run.path.name}", is_small=run.is_small_simulation)


def _results_of(run: SavedRun) -> list[results.Result]:
    """Return the results files of a run; a preference study has one for each source of answers."""
    name = run.config.name
    if run.stage != "evaluate human":
        return [results.load(run.path / f"{name}.json")]
    paths = [run.path / source / f"{name}_{source}.json" for source in SOURCES]
    found = [results.load(path) for path in paths if path.is_file()]
    if not found:
        raise ConfigError(
            f"{run.path}: no answers are analysed yet; run `evaluate human` on it with answers"
        )
    return found


def _plots(section: Section, folder: Path, prefix: str) -> Iterator[Plot]:
    for result in section.results:
        names = {metric.name for metric in result.metrics}
        if names.issuperset(DIMENSIONS.values()):
            path = folder / f"{prefix}{result.name}_dimensions.svg"
            plot_dimensions(result.metrics, tuple(DIMENSIONS.values()), path)
            yield Plot(path, "The seven dimensions of ESC-Eval, with 95 % CI")
        if names.issuperset(OUTCOMES):
            path = folder / f"{prefix}{result.name}_preferences.svg"
            plot_preferences(result.metrics, result.label_source, path)
            yield Plot(path, "Wins, ties and losses, with the 95 % CI of the wins")
    if section.run is not None and (curves := emotion_by_round(section.run.transcripts)):
        path = folder / f"{prefix}{section.run.config.name}_rounds.svg"
        plot_rounds(curves, "mean emotion of the seeker", path)
        yield Plot(path, "Mean emotion of the seeker by round, with 95 % CI")


def emotion_by_round(transcripts: Sequence[Transcript]) -> dict[str, list[Estimate]]:
    """Return the mean emotion of each model's seekers at each of their messages, with CIs over profiles.

    An ended dialogue keeps its last emotion, so that every round has all dialogues.
    """
    rated = [each for each in transcripts if each.emotions]
    rounds = max((len(each.emotions) for each in rated), default=0)
    curves = {}
    for model in dict.fromkeys(each.model for each in rated):
        own = [each for each in rated if each.model == model]
        padded = [
            each.emotions + each.emotions[-1:] * (rounds - len(each.emotions)) for each in own
        ]
        weights = bootstrap_weights([each.dialogue for each in own])
        curves[model] = [
            estimate(weighted_mean(weights, column), len(own)) for column in np.array(padded).T
        ]
    return curves


# --- what the templates call -------------------------------------------------------------------


def _templates(*, escape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "costs": _costs,
        "origin": results.origin,
        "published": _published,
        "rounds": _rounds,
        "settings": lambda run: run.config.model_dump_json(indent=2, exclude_defaults=True),
        "tables": results.tables_of,
        "tokens": _tokens,
        "values": _values,
    }
    return environment


def _published(ours: results.Result) -> Iterator[tuple[PublishedTable, Table]]:
    """Yield the published numbers of the stage that wrote a results file; none beside a small simulation."""
    if ours.is_small_simulation:
        return
    for table in load_toml(PUBLISHED, Published).tables:
        if f"-m training {table.stage} " in ours.command:
            metrics = tuple(
                results.Metric(name=name, value=value, unit=unit, of=model, about="published")
                for model, row in table.rows.items()
                for (name, unit), value in zip(table.measures.items(), row, strict=True)
            )
            theirs = ours.model_copy(update={"metrics": metrics, "compared": table.compared})
            yield table, results.tables_of(theirs)[0]


def _rounds(run: SavedRun) -> Table | None:
    """Return the numbers of the plot of emotions."""
    curves = emotion_by_round(run.transcripts)
    cells = [
        [f"{each.value:.1f} ({each.low:.1f} to {each.high:.1f})" for each in curve]
        for curve in curves.values()
    ]
    rows = [[str(number), *row] for number, row in enumerate(zip(*cells, strict=True))]
    return Table(["Rounds so far", *curves], rows) if curves else None


class _Requests(BaseModel):
    model: str
    requests: int
    faults: Mapping[str, int]


def _costs(run: SavedRun) -> Table | None:
    """Return the requests of each model over all starts; None where they are not recorded."""
    path, requests, faults = run.path / REQUESTS, Counter[str](), Counter[str]()
    for row in read_rows(path, _Requests) if path.is_file() else ():
        requests[row.model] += row.requests
        faults[row.model] += sum(row.faults.values())
    rows = [[model, f"{count:,}", f"{faults[model]:,}"] for model, count in requests.items()]
    return Table(["Model", "Requests", "Without a text"], rows) if rows else None


def _tokens(run: SavedRun) -> str:
    """Return the tokens of all texts that are stored."""
    total, stores = 0, sorted((run.path / "answers").rglob(response_store.FILE_NAME))
    for store in stores:
        uri = f"{store.resolve().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True)) as database:
                [[tokens]] = database.execute("SELECT COALESCE(SUM(tokens), 0) FROM responses")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{store}: cannot be read ({error})") from error
        total += tokens
    return f"{total:,}" if stores else "not recorded"


def _values(transcript: Transcript) -> str:
    return "; ".join(
        f"{name} {format_value(100 * value if unit else value, unit)}"
        for (name, unit), value in transcript.values.items()
    )
