"""Do a judge's verdicts go together? `python -m training evaluate consistency <config.toml>`.

Our counterpart of COMPEER's Fig. 5a: how often the verdicts on the reasoning and the one on the reply
contradict each other, for UnifiReward and for a PRM with an ORM. What counts as a contradiction, and
what it is compared with, is defined in `training.evaluation.contradictions`:

- **accepts a reply that does not do what it praised** (primary): the strategy step is True and the
  reply at least as good as the reference, but the reply does not carry out the strategy. Whether it
  does is told by outer signs (`compeer_core.consistency`), which are often wrong; they are the same
  for all judges, so their errors blur a difference between judges and do not make one.
- the same on turns whose strategy has clear signs, where they are less often wrong;
- **steps against reply**: all steps True and the reply worse than the reference, or a step False and
  the reply better. No signs are needed.
- **says <model>**: an `assessor`, a language model, reads the turn and the verdicts, as in the paper.
  Its control deals the verdicts on replies out anew once, by the seed, and asks about those too.

Each stands beside the rate by chance and the difference of the two. Below 0 a judge is coherent; 0 is
what one reaches that always says True. Where there are several judges, each is also compared with the
first, on the same turns.

Turns are drawn without repetition until `turns` of them count: those that are complete, whose signs
can be told, that have another reply to be compared with, and on which every judge could be read. The
others are rejected and counted. What a judge said is kept in `folder`, a file for each, as it comes:
the same command goes on where it was stopped.
"""

import datetime
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from compeer_core.cer import Split
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.judgement import Judgement, ResponseVerdict, StepVerdict, Unscorable
from compeer_core.prompts import LANGUAGES, consistency_question
from compeer_core.reasoning import render_step
from compeer_core.registry import Registry
from compeer_core.taxonomy import Preference
from compeer_core.unifireward import Judge
from training.common import results
from training.common.progress import track
from training.common.run_directory import versions
from training.data.pictures import Pictures
from training.data.samples import read_records, write_records
from training.evaluation.assessing import Assessor, Counts, assessor_source, drop_torn_line
from training.evaluation.contradictions import (
    CONTRADICTIONS,
    Rates,
    Table,
    Term,
    Verdicts,
    broken_promise,
    holds,
    rates,
)
from training.evaluation.metrics import Estimate, Floats, drawn_weights, estimate
from training.evaluation.plots import plot_rates
from training.evaluation.strategy_signs import measure_signs, sign_lines
from training.evaluation.written_turns import Rejected, Row, Turn, read_rows, sift

_log = logging.getLogger(__name__)

PRIMARY = next(iter(CONTRADICTIONS))
CLEAR = f"{PRIMARY}, clear signs"
SEEN, BY_CHANCE, DIFFERENCE = "contradictions", "by chance", "difference"


class Config(FrozenModel):
    """Which judges, on which turns."""

    judges: tuple[str, ...] = Field(min_length=1)
    """Names in the list of models. Each is compared with the first."""
    models: Path = Path("assets/models.toml")
    """The list of models."""
    written: tuple[Path, ...] = Field(min_length=1)
    """Files of turns: rows of CER, or turns as the generators of `cer` wrote them
    (`steps/turns.jsonl`)."""
    splits: tuple[Split, ...] = ("valid", "test")
    """The splits that turns are taken from. No label is used, so a judge learns nothing from what it
    has seen; but it may know dialogues of the train split."""
    turns: int = Field(default=1000, ge=1)
    """How many turns shall count."""
    data_dir: Path | None = None
    """Folder of corpora, for rows with pictures of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for rows that show one."""
    esconv: Path | None = None
    """CER rows of ESConv (`cer rules`), on whose train split to measure how good the signs are. None skips it."""
    assessor: str | None = None
    """`openai:URL#MODEL`: a language model that is asked too. The key comes from the environment."""
    assessor_in_flight: int = Field(default=8, ge=1)
    """Questions to it at a time."""
    assessor_tries: int = Field(default=3, ge=1)
    """Answers that a question may cost, where they are of no use."""
    folder: Path
    """What was said, tables and the plot."""
    output: Path = results.FOLDER
    """Folder of the results files."""
    name: str = "consistency_nano"
    """Name of the results file."""
    title: str = "Contradictions between verdicts on steps and on replies (nano)"
    command: str = (
        "python -m training evaluate consistency training/configs/nano/evaluate_consistency.toml"
    )
    """Recorded with the numbers."""
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _names_each_judge_once(self) -> "Config":
        if len(set(self.judges)) < len(self.judges):
            raise ValueError("a judge is named twice")
        return self


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Judge turns until enough of them count, and write table and plot; a dry run counts turns."""
    if resume is not None:
        raise ConfigError("an evaluation goes on by itself where it stopped: begin it again")
    registry = Registry.from_toml(config.models)
    for name in config.judges:
        registry.entry(name, "judge")
    if config.assessor is not None:
        assessor_source(config.assessor)
    rows = list(read_rows(config.written, config.splits))
    reasons = Counter(each for each in map(sift, rows) if isinstance(each, Rejected))
    fit = len(rows) - reasons.total()
    _log.info("%d turns, %d of them fit to be judged; %s", len(rows), fit, _sentence(reasons))
    if fit < config.turns:
        _log.warning("fewer turns are fit than the %d that shall count", config.turns)
    if dry_run:
        return
    if not fit:
        raise ConfigError(f"{', '.join(map(str, config.written))}: no turn is fit to be judged")
    config.folder.mkdir(parents=True, exist_ok=True)
    judges = [_loaded(registry, name) for name in config.judges]
    try:
        study = examine(rows, judges, config)
    finally:
        for judge in judges:
            judge.close()
    if not study.turns:
        raise ConfigError(f"no turn counts: {_sentence(study.rejected)}")
    report(study, config)


# --- what judges say --------------------------------------------------------------------------


class Heard(FrozenModel):
    """What a judge said of a turn, a line of its file."""

    id: str
    verdicts: Verdicts | None
    """None where it could not be read."""


class Counted(FrozenModel):
    """A turn that counts, as `turns.jsonl` keeps it for a reader."""

    id: str
    group: str
    strategy: str
    follows: bool
    clear: bool
    """Its strategy has clear signs."""
    verdicts: Mapping[str, Verdicts]
    """By judge."""
    contradictions: Mapping[str, tuple[str, ...]]
    """By judge; without the assessor's."""


@dataclass(frozen=True)
class Study:
    """The turns that count, and what judges said of them."""

    turns: tuple[Turn, ...]
    verdicts: Mapping[str, tuple[Verdicts, ...]]
    """By judge, one for each turn."""
    looked_at: int
    rejected: Counter[str]

    @property
    def groups(self) -> list[str]:
        """What each turn belongs to: turns of one source dialogue are not independent."""
        return [turn.row.case.source_id for turn in self.turns]

    @property
    def follows(self) -> list[bool]:
        return [turn.follows for turn in self.turns]


def examine(rows: Sequence[Row], judges: Sequence[Judge], config: Config) -> Study:
    """Judge turns in an order drawn by the seed until enough of them count."""
    order = np.random.default_rng(config.seed).permutation(len(rows)).tolist()
    pictures = Pictures(config.data_dir, config.faces)
    files = [_Kept(config.folder / f"{judge.name}.jsonl", judge, pictures) for judge in judges]
    turns: list[Turn] = []
    verdicts: dict[str, list[Verdicts]] = {judge.name: [] for judge in judges}
    rejected: Counter[str] = Counter()

    def counting() -> Iterator[Turn]:
        for place in order:
            turn = sift(rows[place])
            if isinstance(turn, Rejected):
                rejected[turn] += 1
                continue
            said = [file.heard(turn) for file in files]
            if any(each is None for each in said):
                rejected[Rejected.UNREADABLE] += 1
                continue
            for file, each in zip(files, said, strict=True):
                assert each is not None
                verdicts[file.name].append(each)
            yield turn

    try:
        wanted = islice(counting(), config.turns)
        turns.extend(track(wanted, "judged", total=config.turns, unit="turns"))
    finally:
        for file in files:
            file.close()
    return Study(
        turns=tuple(turns),
        verdicts={name: tuple(each) for name, each in verdicts.items()},
        looked_at=len(turns) + rejected.total(),
        rejected=rejected,
    )


class _Kept:
    """The verdicts of one judge, in a file that is read first and written as they come."""

    def __init__(self, path: Path, judge: Judge, pictures: Pictures) -> None:
        self.name = judge.name
        self._judge = judge
        self._pictures = pictures
        self._known: dict[str, Verdicts | None] = {}
        if path.exists():
            drop_torn_line(path)
            self._known = {each.id: each.verdicts for each in read_records(path, Heard)}
        self._file = path.open("a", encoding="utf-8")

    def heard(self, turn: Turn) -> Verdicts | None:
        row = turn.row
        if row.id not in self._known:
            dialogue = row.case.dialogue(self._pictures.shown(row.case.history))
            [judgement] = self._judge.judge(dialogue, [turn.reading], [turn.reference])
            heard = Heard(id=row.id, verdicts=_verdicts(judgement))
            self._file.write(heard.model_dump_json() + "\n")
            self._file.flush()
            self._known[row.id] = heard.verdicts
        return self._known[row.id]

    def close(self) -> None:
        self._file.close()


def _verdicts(judgement: Judgement) -> Verdicts | None:
    outcomes = judgement.steps or ()
    correct = [each.correct for each in outcomes if isinstance(each, StepVerdict)]
    if len(correct) != 3 or not isinstance(judgement.response, ResponseVerdict):
        unread = [each for each in (*outcomes, judgement.response) if isinstance(each, Unscorable)]
        _log.info("a turn could not be judged: %s", unread[0].reason if unread else "no verdict")
        return None
    history, emotion, strategy = correct
    return Verdicts(steps=(history, emotion, strategy), preference=judgement.response.preference)


def _loaded(registry: Registry, name: str) -> Judge:
    judge = registry.judge(name)
    assert judge is not None  # a name that is unknown raises
    return judge


# --- numbers ----------------------------------------------------------------------------------


def report(study: Study, config: Config) -> None:
    """Write the results file, a CSV, the plot, and the turns for a reader."""
    weights = drawn_weights(study.groups, seed=config.seed)
    found = by_rule(study, weights)
    source = "signs of strategies (compeer_core/consistency.py) and the judges' own verdicts"
    counts: Counts | None = None
    if config.assessor is not None:
        assessor = Assessor(
            config.assessor,
            config.folder / "assessor.jsonl",
            in_flight=config.assessor_in_flight,
            tries=config.assessor_tries,
        )
        model = assessor_source(config.assessor)[1]
        name = f"says {model}"
        source += f"; {model}"
        found[name] = by_assessor(study, assessor, config.seed)
        counts = assessor.counts
    metrics = [line for about, by_judge in found.items() for line in comparison(about, by_judge)]
    metrics += verdict_lines(study, weights)
    metrics += _sampling_lines(study, counts)
    if config.esconv is not None:
        metrics += sign_lines(measure_signs(config.esconv))
    result = results.Result(
        name=config.name,
        title=config.title,
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        model=", ".join(config.judges),
        label_source=source,
        command=config.command,
        versions=versions(("torch", "transformers")),
        seed=config.seed,
        interval="95 % interval over source dialogues",
        metrics=tuple(metrics),
    )
    results.publish(result, config.output, config.folder)
    plot_rates(metrics, SEEN, BY_CHANCE, config.folder / "table.png")
    write_records(config.folder / "turns.jsonl", _counted(study))


@dataclass(frozen=True)
class Measured:
    """Rates of one judge, and on how many turns."""

    rates: Rates
    n: int


def by_rule(study: Study, weights: Floats) -> dict[str, dict[str, Measured]]:
    """Return the rates of each kind of contradiction, by judge."""
    clear = np.array([turn.has_clear_signs for turn in study.turns])
    tables = {name: Table.of(said, study.follows) for name, said in study.verdicts.items()}
    count = len(study.turns)
    found = {
        about: {name: Measured(rates(of(table), weights), count) for name, table in tables.items()}
        for about, of in CONTRADICTIONS.items()
    }
    if clear.any():
        found[CLEAR] = {
            name: Measured(
                rates(_only(broken_promise(table), clear), weights[:, clear]), clear.sum()
            )
            for name, table in tables.items()
        }
    return found


def by_assessor(study: Study, assessor: Assessor, seed: int) -> dict[str, Measured]:
    """Ask a model about the verdicts, and about those with the replies' ones dealt out anew.

    Only turns count on which it answered for every judge, both times.
    """
    dealt = np.random.default_rng([seed, 1]).permutation(len(study.turns)).tolist()
    own: dict[str, list[str]] = {}
    mixed: dict[str, list[str]] = {}
    for name, said in study.verdicts.items():
        pairs = list(zip(study.turns, said, strict=True))
        own[name] = [_question(turn, each, each.preference) for turn, each in pairs]
        mixed[name] = [
            _question(turn, each, said[other].preference)
            for (turn, each), other in zip(pairs, dealt, strict=True)
        ]
    asked = [question for each in (*own.values(), *mixed.values()) for question in each]
    answers = assessor.ask(asked)
    answered = np.array(
        [
            all(questions[place] in answers for questions in (*own.values(), *mixed.values()))
            for place in range(len(study.turns))
        ]
    )
    if not answered.any():
        return {}
    groups = [group for group, is_in in zip(study.groups, answered, strict=True) if is_in]
    weights = drawn_weights(groups, seed=seed)

    def rate(questions: Sequence[str]) -> Floats:
        asked = [one for one, is_in in zip(questions, answered, strict=True) if is_in]
        broken = np.array([not answers[one] for one in asked], dtype=np.float64)
        share: Floats = weights @ broken / weights.sum(axis=1)
        return share

    return {
        name: Measured(Rates(rate(own[name]), rate(mixed[name])), len(groups))
        for name in study.verdicts
    }


def _question(turn: Turn, verdicts: Verdicts, preference: Preference) -> str:
    steps = [
        (render_step(step), correct)
        for step, correct in zip(turn.said.reasoning, verdicts.steps, strict=True)
    ]
    language = turn.row.case.language
    return consistency_question(
        turn.row.case.dialogue(),
        steps,
        turn.said.reply,
        turn.reference,
        preference,
        language if language in LANGUAGES else "en",
    )


def comparison(about: str, by_judge: Mapping[str, Measured]) -> list[results.Metric]:
    """Return the lines of one kind of contradiction: each judge, and each less the first."""
    lines: list[results.Metric] = []
    for name, each in by_judge.items():
        lines += _line(each.rates.seen, each.rates.by_chance, each.n, name, about)
    for name, each in islice(by_judge.items(), 1, None):
        first, base = next(iter(by_judge.items()))
        seen = each.rates.seen - base.rates.seen
        by_chance = each.rates.by_chance - base.rates.by_chance
        lines += _line(seen, by_chance, each.n, f"{name} less {first}", about)
    return lines


def _line(seen: Floats, by_chance: Floats, n: int, of: str, about: str) -> list[results.Metric]:
    values = {SEEN: seen, BY_CHANCE: by_chance, DIFFERENCE: seen - by_chance}
    return [
        results.measured(name, estimate(each, n), unit="%", of=of, about=about)
        for name, each in values.items()
    ]


def verdict_lines(study: Study, weights: Floats) -> list[results.Metric]:
    """Return how often judges say what: a judge that says the same of all contradicts itself little."""
    lines: list[results.Metric] = []
    total = weights.sum(axis=1)
    for name, said in study.verdicts.items():
        table = Table.of(said, study.follows)
        shares = {
            "strategy step True": table.steps[:, 2],
            "all steps True": table.steps.all(axis=1),
            "reply accepted": table.accepts,
            "reply better": table.better,
            "reply worse": table.worse,
            "reply carries out its strategy": table.follows,
        }
        for title, each in shares.items():
            found: Estimate = estimate(weights @ each / total, len(said))
            lines.append(results.measured(title, found, unit="%", of=name, about="verdicts"))
    return lines


def _sampling_lines(study: Study, counts: Counts | None) -> list[results.Metric]:
    def line(about: str, of: str, count: int, n: int) -> results.Metric:
        return results.Metric(name="how many", value=count, n=max(1, n), of=of, about=about)

    lines = [line("turns drawn", "counted", len(study.turns), study.looked_at)]
    lines += [
        line("turns drawn", f"rejected: {reason}", count, study.looked_at)
        for reason, count in sorted(study.rejected.items())
    ]
    if counts is not None:
        asked = counts.asked + counts.known
        about = "questions to the assessor"
        lines.append(line(about, "asked", asked, asked))
        lines.append(line(about, "given up", counts.given_up, asked))
        lines.append(line(about, "unanswered", counts.unanswered.total(), asked))
        lines += [line(about, f"of no use: {why}", n, asked) for why, n in counts.retried.items()]
    return lines


def _counted(study: Study) -> Iterator[Counted]:
    found = {
        name: {
            about: holds(of(Table.of(said, study.follows))) for about, of in CONTRADICTIONS.items()
        }
        for name, said in study.verdicts.items()
    }
    for place, turn in enumerate(study.turns):
        yield Counted(
            id=turn.row.id,
            group=turn.row.case.source_id,
            strategy=str(turn.said.reasoning.strategy.strategy),
            follows=turn.follows,
            clear=turn.has_clear_signs,
            verdicts={name: said[place] for name, said in study.verdicts.items()},
            contradictions={
                name: tuple(about for about, each in kinds.items() if each[place])
                for name, kinds in found.items()
            },
        )


def _only(terms: Sequence[Term], where: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Term, ...]:
    return tuple(Term(each.steps[where], each.reply[where], each.among[where]) for each in terms)


def _sentence(reasons: Counter[str] | Counter[Rejected]) -> str:
    named = ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
    return f"rejected: {named or 'none'}"
