"""Stage `cer`: from raw corpora to rows that are ready for training, step by step.

    python -m training cer training/configs/silver.toml --set data_dir=PATH
    python -m training cer training/configs/cer_full.toml --dry-run

Three routes share their first steps. ``annotation.mode = "people"`` is the paper's route: generators
write turns, two annotators judge them, and a third adjudicates. ``"reader"`` asks a language model
instead, outside this program, through the same files. ``"silver"`` needs no annotators: a published rule
compares the turns with the human labels of the corpus (`training.cer.silver.dataset`).

```text
collect     steps/dialogues.jsonl                     every corpus in one format, with splits
leaks       steps/clean.jsonl                         train without what repeats valid and test
filter      steps/kept.jsonl                          rules, then a generator
cases       steps/cases.jsonl                         rounds sampled by Eq. 1
generate    steps/turns.jsonl                         turns with reasoning, by one or more models
items       annotation/items.jsonl                    people, reader: what annotators see; the run waits here
settle      steps/labelled.jsonl                      people, reader: labels on which annotators agree
silver      steps/labelled.jsonl                      silver: labels by the rule
split       train.jsonl, valid.jsonl, test.jsonl
human       human.<split>.jsonl                       judgements that are part of a corpus
personality variants/duplicate.jsonl, rewrite.jsonl, persona.jsonl
card        README.md, card.json
```

Each step runs once (`training.cer.step_files`). After an interruption the same command continues,
and repeats only the steps that a changed setting affects; the files are byte for byte those of an
uninterrupted run. `--resume RUN` does the same but insists on the settings of the run, except for
those that change no row (`_RESUMABLE`). The answers of generators are stored in `answers/` and not
requested again.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import compeer_core.prompts
from compeer_core.cer import SPLITS, CerRecord, Split
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.registry import SourceKind
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import VOCABULARIES
from training.cer import card
from training.cer.corpora.hub import is_hub_name
from training.cer.personality import clusters, rewriting, traits
from training.cer.records import StepReport
from training.cer.requests import costs
from training.cer.requests.asking import Asker, Budget, BudgetSpentError, Counts
from training.cer.requests.engines import Engine, LocalEngine, RayEngine
from training.cer.requests.generators import GeneratorSettings
from training.cer.settings import Config, check
from training.cer.silver import dataset as silver
from training.cer.step_files import Json, Steps
from training.cer.steps import (
    annotation,
    cases,
    decontamination,
    filtering,
    generation,
    human_labels,
    ingest,
    subset,
)
from training.common.fingerprints import fingerprint
from training.common.interrupts import StopRequest
from training.common.run_directory import CONFIG_FILE, RunDirectory
from training.data.pictures import Pictures
from training.data.records import read_records
from training.stages import StoppedEarly, WaitingForPeople

_log = logging.getLogger(__name__)
_ENDPOINT_LOG = logging.getLogger("openai")

_RESUMABLE = ("engine", "workers", "max_requests", "annotation.files", "annotation.wait")
"""Keys that may differ when a run is resumed with `--resume`."""
_OF_NO_ROW = {
    *("requests_per_minute", "timeout_seconds", "retries", "backoff_seconds"),
    *("price_per_million_input", "price_per_million_output"),
}
"""Generator settings about connection and price, which change no row."""
_LOCK = ".lock"


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Run the steps that are not done; with `dry_run`, check the files and estimate the requests.

    Raises:
        StoppedEarly: The request budget is spent, or Ctrl-C was pressed.
        WaitingForPeople: Annotations are missing.
    """
    if resume is not None and resume.resolve() != config.output.resolve():
        config = config.model_copy(update={"output": resume})
    check(config)
    if dry_run:
        estimate(config)
        return
    directory = _open(config, resume)
    with _locked(directory.path):
        try:
            _Pipeline(config, directory).run()
        except KeyboardInterrupt:
            raise StoppedEarly(
                f"stopped; {directory.path} holds what is done, and the same command continues"
            ) from None
        except BudgetSpentError as error:
            raise StoppedEarly(str(error)) from error


def estimate(config: Config) -> None:
    """Log the requests that a run would send, and their price. Nothing is sent or stored.

    The earlier steps run in a temporary folder, with the rules of the filter only: dialogues that its
    model would drop are counted.
    """
    without_models = config.roles.model_copy(update={"filter": None})
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        scratch_config = config.model_copy(update={"output": folder, "roles": without_models})
        pipeline = _Pipeline(scratch_config, RunDirectory(folder))
        pipeline.prepare()
        total = 0.0
        priced = False
        for batch in costs.all_questions(config, pipeline.path, pipeline.pictures):
            cost = costs.estimate(batch.questions, config.generators[batch.generator])
            _log.info("%s, %s: %s", batch.step, batch.generator, cost)
            total += cost.price or 0.0
            priced = priced or cost.price is not None
    if priced:
        _log.info("together at most %.2f, without retries", total)


class _Pipeline:
    """One start of a run: the state that its steps share."""

    def __init__(self, config: Config, directory: RunDirectory) -> None:
        self.config = config
        self.directory = directory
        self.folder = directory.path
        self.steps = Steps(directory.path, lambda sentence: directory.log("%s", sentence))
        self.budget = Budget(config.max_requests)
        self.engine = _engine(config)
        self.pictures = Pictures(
            config.data_dir,
            None if config.faces is None else config.data_dir / config.faces,
            skip_unreadable=True,
        )

    def run(self) -> None:
        """Run all steps in order."""
        self.prepare()
        self.generate()
        if self.config.annotation.mode != "silver":
            self.ask_people()
        else:
            self.apply_rule()
        self.split()
        self.read_judged()
        self.rewrite()
        self.describe()

    def path(self, name: str) -> Path:
        """Return the path of a file between two steps."""
        return self.folder / "steps" / f"{name}.jsonl"

    # --- From corpora to cases -----------------------------------------------------------------

    def prepare(self) -> None:
        """Ingest, decontaminate, filter, and sample rounds."""
        config, path = self.config, self.path
        self.steps.run(
            "collect",
            lambda: ingest.collect(
                config.corpora, config.data_dir, path("dialogues"), seed=config.seed
            ),
            settings={
                "corpora": _values(config)["corpora"],
                "seed": config.seed,
                "files": [
                    fingerprint(config.data_dir / file.path)
                    for file in config.corpora
                    if not is_hub_name(file.path)
                ],
            },
            outputs=[path("dialogues")],
        )
        if config.sources_per_split is not None:
            self._draw_sources(config.sources_per_split)
        dialogues = path("dialogues" if config.sources_per_split is None else "trial")
        cards = [config.data_dir / name for name in config.role_cards]
        self.steps.run(
            "leaks",
            lambda: decontamination.decontaminate(
                dialogues,
                path("clean"),
                path("leaks"),
                config.leaks,
                decontamination.read_cards(cards),
            ),
            settings=_values(config.leaks),
            inputs=[dialogues, *cards],
            outputs=[path("clean"), path("leaks")],
        )
        self._filter()
        self.steps.run(
            "cases",
            lambda: cases.draw_cases(
                path("kept"),
                path("cases"),
                config.cases,
                self.pictures,
                config.seed,
                lenders=path("clean"),
                engine=self.engine,
            ),
            settings={
                **_values(config.cases),
                "seed": config.seed,
                "faces": self._faces() if config.cases.face_share else None,
            },
            inputs=[path("kept"), path("clean")],
            outputs=[path("cases")],
        )

    def _draw_sources(self, count: int | Mapping[Split, int]) -> None:
        config, path = self.config, self.path
        per_split = count if isinstance(count, int) else {str(k): n for k, n in count.items()}
        self.steps.run(
            "trial",
            lambda: subset.draw_sources(path("dialogues"), path("trial"), per_split, config.seed),
            settings={"sources_per_split": per_split, "seed": config.seed},
            inputs=[path("dialogues")],
            outputs=[path("trial")],
        )

    def _filter(self) -> None:
        config, path = self.config, self.path
        reader = config.roles.filter

        def work() -> StepReport:
            with self.asker("filter", reader, path("clean")) as asker:
                return filtering.filter_dialogues(
                    path("clean"),
                    path("kept"),
                    path("filtered_out"),
                    config.filter,
                    asker,
                    engine=self.engine,
                )

        self.steps.run(
            "filter",
            work,
            settings={
                **_values(config.filter),
                **self._asked(("filter",), _some(reader)),
                "words": _texts([filtering.LLM_ARTIFACTS]),
            },
            inputs=[path("clean")],
            outputs=[path("kept"), path("filtered_out")],
        )

    # --- Turns and labels ----------------------------------------------------------------------

    def generate(self) -> None:
        config, path = self.config, self.path

        stored = config.generation.stored

        def work() -> StepReport:
            if stored is not None:
                return generation.join_stored(path("cases"), stored, path("turns"))
            with self.askers("turns", config.writers, path("cases")) as askers:
                return generation.generate(
                    path("cases"),
                    path("turns"),
                    config.generation,
                    {asker.name: asker for asker in askers.values()},
                    self.pictures,
                    config.seed,
                )

        self.steps.run(
            "generate",
            work,
            settings={
                **_values(config.generation),
                **(self._asked(("policy",), config.writers) if stored is None else {}),
                "seed": config.seed,
                "faces": self._faces(),
            },
            inputs=[path("cases"), *filter(None, [stored])],
            outputs=[path("turns")],
        )

    def ask_people(self) -> None:
        """Write the annotation items, and settle the answers.

        Raises:
            WaitingForPeople: There are no answers, or some items need another annotator.
        """
        config, path = self.config, self.path
        desk = self.folder / "annotation"
        self.steps.run(
            "items",
            lambda: annotation.items(
                (
                    (turn.case, turn.author, turn.text)
                    for turn in read_records(path("turns"), generation.GeneratedTurn)
                ),
                desk / "items.jsonl",
                path("items_key"),
                seed=config.seed,
            ),
            settings={"seed": config.seed},
            inputs=[path("turns")],
            outputs=[desk / "items.jsonl", path("items_key")],
        )
        answers = desk / "answers"
        answers.mkdir(exist_ok=True)
        files = [
            *config.annotation.files,
            *sorted(file for file in answers.iterdir() if file.suffix in {".csv", ".jsonl"}),
        ]
        if not files:
            raise WaitingForPeople(_invitation(self.folder, self.steps.reports["items"].written))
        report = self.steps.run(
            "settle",
            lambda: annotation.settle(
                path("items_key"),
                files,
                path("labelled"),
                desk / "needs.jsonl",
                path("unsettled"),
                seed=config.seed,
                by_models=config.annotation.mode == "reader",
            ),
            settings={"seed": config.seed, "mode": config.annotation.mode},
            inputs=[path("items_key"), *files],
            outputs=[path("labelled"), desk / "needs.jsonl", path("unsettled")],
        )
        with (desk / "needs.jsonl").open("rb") as file:
            needed = sum(1 for _ in file)
        if needed and config.annotation.wait:
            raise WaitingForPeople(
                f"{report.written} items are labelled; {needed} still need another annotator and are "
                f"listed in {desk / 'needs.jsonl'}. Add the answers to {answers} and run the command again, "
                "or continue with the labelled items: --set annotation.wait=false"
            )

    def apply_rule(self) -> None:
        config, path = self.config, self.path
        words = [
            *Path(silver.__file__).parent.glob("*.toml"),
            *VOCABULARIES.glob("strategy_signs.*.toml"),
        ]
        self.steps.run(
            "silver",
            lambda: silver.label(
                path("cases"),
                path("turns"),
                path("labelled"),
                path("judged"),
                config.silver,
                config.seed,
                engine=self.engine,
            ),
            settings={
                **_values(config.silver),
                "rule": silver.VERSION,
                "seed": config.seed,
                "words": _texts(words),
            },
            inputs=[path("cases"), path("turns")],
            outputs=[path("labelled"), path("judged")],
        )

    # --- Output --------------------------------------------------------------------------------

    def split(self) -> None:
        """Write the rows by split."""
        outputs = {name: self.folder / f"{name}.jsonl" for name in SPLITS}
        self.steps.run(
            "split",
            lambda: _split("split", self.path("labelled"), outputs),
            settings=None,
            inputs=[self.path("labelled")],
            outputs=list(outputs.values()),
        )

    def read_judged(self) -> None:
        """Write the rows with judgements of other corpora, by split."""
        config, path = self.config, self.path
        if not config.judged:
            return
        names = [name for corpus in config.judged for name in corpus.paths]
        self.steps.run(
            "human",
            lambda: human_labels.judgements(
                config.judged, config.data_dir, path("human"), seed=config.seed
            ),
            settings={
                "corpora": _values(config)["judged"],
                "seed": config.seed,
                "files": [fingerprint(config.data_dir / name) for name in names],
            },
            outputs=[path("human")],
        )
        outputs = {name: self.folder / f"human.{name}.jsonl" for name in SPLITS}
        self.steps.run(
            "human_split",
            lambda: _split("human_split", path("human"), outputs),
            settings=None,
            inputs=[path("human")],
            outputs=list(outputs.values()),
        )

    # --- Personality ---------------------------------------------------------------------------

    def rewrite(self) -> None:
        """Write the three variants of the train split."""
        config, path = self.config, self.path
        settings = config.personality
        if settings is None:
            return
        source, cast = self.folder / "train.jsonl", self.folder / "personas"
        rules = _texts(Path(traits.__file__).parent.glob("*.toml"))

        def describe() -> StepReport:
            with self.asker("traits", config.roles.traits, source) as asker:
                return traits.describe(
                    source,
                    path("personas"),
                    asker,
                    seed=config.seed,
                    engine=self.engine,
                )

        self.steps.run(
            "traits",
            describe,
            settings={
                **self._asked(("disc",), _some(config.roles.traits)),
                "rules": rules,
                "seed": config.seed,
            },
            inputs=[source],
            outputs=[path("personas")],
        )
        self.steps.run(
            "clusters",
            lambda: clusters.cluster(path("personas"), cast, settings.clusters, seed=config.seed),
            settings={**_values(settings.clusters), "seed": config.seed},
            inputs=[path("personas")],
            outputs=[cast / "personas.jsonl", cast / "clusters.json"],
        )

        def rewrite() -> StepReport:
            roles = config.roles
            with (
                self.asker("rewriting", roles.rewriting, source) as asker,
                self.asker("checking", roles.checking, source) as checker,
            ):
                return rewriting.rewrite(
                    source,
                    cast / "personas.jsonl",
                    self.folder / "variants",
                    asker,
                    checker,
                    seed=config.seed,
                    engine=self.engine,
                )

        names = [*_some(config.roles.rewriting), *_some(config.roles.checking)]
        self.steps.run(
            "rewriting",
            rewrite,
            settings={
                "by": config.roles.rewriting,
                "checked_by": config.roles.checking,
                **self._asked(("rewrite", "manner", "drift"), names),
                "rules": rules,
                "seed": config.seed,
            },
            inputs=[source, cast / "personas.jsonl"],
            outputs=[
                self.folder / "variants" / f"{name}.jsonl"
                for name in (*rewriting.VARIANTS, "dropped")
            ],
        )

    # --- The card ------------------------------------------------------------------------------

    def describe(self) -> None:
        """Write the card of all rows."""
        config = self.config
        files = {f"{name}.jsonl": self.folder / f"{name}.jsonl" for name in SPLITS}
        if config.judged:
            names = [f"human.{name}.jsonl" for name in SPLITS]
            files |= {name: self.folder / name for name in names}
        if config.personality is not None:
            names = [f"variants/{name}.jsonl" for name in rewriting.VARIANTS]
            files |= {name: self.folder / name for name in names}
        reports = list(self.steps.reports.values())
        self.steps.run(
            "card",
            lambda: card.write(files, self.folder, reports, config.card, config.seed),
            settings={
                **_values(config.card),
                "seed": config.seed,
                "reports": [_values(report) for report in reports],
            },
            inputs=list(files.values()),
            outputs=[self.folder / card.README, self.folder / card.JSON],
        )

    # --- Generators ----------------------------------------------------------------------------

    @contextmanager
    def askers(
        self, step: str, names: Sequence[str], source: Path
    ) -> Iterator[Mapping[str, Asker]]:
        """Open the generators of a step that reads `source`, and close them afterwards."""
        with ExitStack() as stack:
            # Other work needs no orderly stop: Ctrl-C interrupts it at once.
            stopping = stack.enter_context(StopRequest()) if names else None
            stack.enter_context(_quiet_requests())
            askers = {}
            for name in names:
                settings = self.config.generators[name]
                # The output of an in-process model can depend on the batch.
                content = self.steps.content(source) if settings.in_process else ""
                version = f"{name}-{_version(settings, content)}"
                folder = self.folder / "answers" / step / version
                asker = Asker(settings, folder, self.budget, self.engine, stopping=stopping)
                stack.callback(asker.close)
                askers[name] = asker
                stack.callback(self._log_counts, step, asker)
            yield askers

    @contextmanager
    def asker(self, step: str, name: str | None, source: Path) -> Iterator[Asker | None]:
        """Open the generator of a role, if it has one."""
        with self.askers(step, _some(name), source) as askers:
            yield askers[name] if name else None

    def _log_counts(self, step: str, asker: Asker) -> None:
        counts = asker.counts
        self.steps.unfinished += sum(counts.unanswered.values())
        if counts.requests:
            self.directory.log("%s, %s: %s", step, asker.name, _requests(counts))

    def _asked(self, prompts: Sequence[str], names: Sequence[str]) -> dict[str, Json]:
        """Return what the rows of a step depend on through its generators."""
        folders = [Path(compeer_core.prompts.__file__).parent, Path(__file__).parent / "prompts"]
        files = [
            file
            for folder in folders
            for prompt in prompts
            for file in folder.glob(f"{prompt}*.md")
        ]
        return {
            "generators": {name: _asked_under(self.config.generators[name]) for name in names},
            "prompts": _texts(files) if names else None,
        }

    def _faces(self) -> Json:
        faces = self.config.faces
        return None if faces is None else fingerprint(self.config.data_dir / faces)


def _open(config: Config, resume: Path | None) -> RunDirectory:
    """Start or continue the run; only `--resume` insists on the settings of its start."""
    begun = (config.output / CONFIG_FILE).exists()
    changes = tuple(Config.model_fields)
    if resume is not None:
        keys = [(name, key) for name in config.generators for key in _OF_NO_ROW]
        changes = (*_RESUMABLE, *(f"generators.{name}.{key}" for name, key in keys))
    return RunDirectory.open(
        config.output, config, resume=begun or resume is not None, may_change=changes
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the run."""
    with (folder / _LOCK).open("w", encoding="utf-8") as file:
        with suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"{folder} is in use by another process; wait for it, or name another output"
                ) from error
        yield


@contextmanager
def _quiet_requests() -> Iterator[None]:
    """Do not log failed requests one by one: there can be thousands, and they are counted."""
    before = _ENDPOINT_LOG.level
    _ENDPOINT_LOG.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _ENDPOINT_LOG.setLevel(before)


def _requests(counts: Counts) -> str:
    parts = [f"{counts.requests} requests sent for {counts.asked} questions"]
    for name, reasons in (
        ("failed requests", counts.faults),
        ("repeated", counts.retried),
        ("without a usable answer", {**counts.failed, **counts.unanswered}),
    ):
        if reasons:
            listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            parts.append(f"{name}: {listed}")
    return "; ".join(parts)


def _engine(config: Config) -> Engine:
    return LocalEngine() if config.engine == "local" else RayEngine(config.workers)


def _some(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _values(settings: FrozenModel) -> dict[str, Any]:
    return settings.model_dump(mode="json")


def _asked_under(settings: GeneratorSettings) -> dict[str, Any]:
    """Return what a generator's answers depend on, apart from the questions."""
    values = {key: value for key, value in _values(settings).items() if key not in _OF_NO_ROW}
    where = settings.where
    if where.kind is SourceKind.ENDPOINT:
        values["source"] = where.model  # the address does not matter
        values.pop("in_flight")
    elif where.kind is not SourceKind.HUB:
        values["files"] = fingerprint(Path(where.location))
    return values


def _version(settings: GeneratorSettings, content: str) -> str:
    """Return a key of the settings under which stored answers can be reused."""
    values: dict[str, Any] = dict(settings.made_under)
    if settings.in_process:
        values |= {**_asked_under(settings), "content": content}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _texts(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def _split(step: str, source: Path, outputs: Mapping[Split, Path]) -> StepReport:
    counts = {
        name: write_rows(
            path, (row for row in read_records(source, CerRecord) if row.case.split == name)
        )
        for name, path in outputs.items()
    }
    total = sum(counts.values())
    return StepReport(step=step, read=total, written=total, figures=counts)


def _invitation(folder: Path, count: int) -> str:
    desk = folder / "annotation"
    return (
        f"{desk / 'items.jsonl'} holds {count} items for annotators. Two people judge each item "
        "independently: whether each step is right, and which reply is better. Put their answers, CSV "
        "or JSON lines (compeer_core.annotation.annotations), into "
        f"{desk / 'answers'} and run the same command again; it lists the items on which two "
        "annotators disagree and a third has to adjudicate."
    )
