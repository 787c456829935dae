"""Evaluates reward models on held-out labels: `python -m training evaluate reward <config.toml>`.

The counterpart of COMPEER's Table 1. For each of the three steps: weighted F1 and the recall of False as
in the paper, and measures that a judge which always says True cannot pass: balanced accuracy, Matthews'
correlation, AUROC. For the reply: weighted F1 and accuracy of the four-way preference. The majority class
is included as a baseline.

Intervals resample source dialogues. A temperature per judge is fitted on the validation split; it does not
change verdicts, and is reported with the calibration error before and after. Agreement with human
judgements is reported as accuracy and Cohen's kappa, and a classifier that sees words alone is included
as a second baseline. On pairs of a reply and its corruption (`training.cer.sanity`), the share is
reported in which a judge gives the reply the higher probability.

All ratings are stored in `folder`, so that tables and plots can be recomputed without the judges.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from compeer_core.cer import CerRecord, Split
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS
from compeer_core.registry import Registry
from compeer_core.stats import Estimate, wilson
from compeer_core.taxonomy import Preference
from training.common import results
from training.common.calibration import calibration_error, fit_temperature, tempered
from training.data.pictures import Pictures
from training.data.records import drawn, read_records
from training.evaluation.judge_ratings import Rated, rate, rate_file
from training.evaluation.metrics import (
    preference_report,
    reward_model_difference,
    reward_model_report,
)
from training.evaluation.plots import plot_reliability, plot_table
from training.evaluation.word_baseline import WordBaseline
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

MAJORITY = "majority class"
"""Name of the baseline without a model."""

STEP_MEASURES = {
    "weighted_f1": "weighted F1",
    "recall_false": "recall of False",
    "balanced_accuracy": "balanced accuracy",
    "mcc": "MCC",
    "auroc": "AUROC",
}
REPLY_MEASURES = {
    "weighted_f1": "weighted F1",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "kappa": "kappa",
}
_PLAIN = frozenset({"mcc", "kappa"})
"""Measures that are not percentages."""

HUMAN_SOURCE = "; corpus lines: labels of that corpus"


class Config(FrozenModel):
    """Judges and rows."""

    judges: tuple[str, ...]
    """Names in the list of models."""
    models: Path = Path("assets/models.toml")
    """The list of models."""
    test: tuple[Path, ...]
    """Files of CER rows; only rows of the test split are used."""
    validation: tuple[Path, ...] = ()
    """Files whose validation rows are used to fit the temperature; empty skips calibration."""
    baseline: tuple[Path, ...] = ()
    """Files whose train rows the word baseline learns from; empty leaves it out."""
    sanity: tuple[Path, ...] = ()
    """Files of `cer sanity`; only rows of the test split are used."""
    human: tuple[Path, ...] = ()
    """Files of human judgements, reported by corpus."""
    human_splits: tuple[Split, ...] = ("test",)
    """Splits of human judgements; use more than `test` only for judges not trained on them."""
    human_rows: int | None = None
    """Maximum number of human judgements per corpus, sampled by the seed; None uses all."""
    data_dir: Path | None = None
    """Folder of corpora, for rows with images of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for rows that show one."""
    folder: Path
    """Folder for ratings, tables and plots."""
    rows: int | None = None
    """Maximum number of rows to rate, of test, validation and sanity each, sampled by the seed; None uses all."""
    output: Path = results.FOLDER
    """Folder of the results files."""
    name: str = "reward"
    """Name of the results file."""
    title: str = "Judges on held-out rows"
    label_source: str
    """Who or what made the labels of `test` and `sanity`."""
    command: str
    """Recorded with the numbers."""
    seed: int = 0


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Rate all rows with all judges and write tables and plots; a dry run counts the rows."""
    refuse_resume(resume, "an evaluation resumes by itself")
    rows, seed = config.rows, config.seed
    test = drawn(_rows_of_split(config.test, "test"), rows, seed)
    validation = drawn(_rows_of_split(config.validation, "valid"), rows, seed)
    human = _human_judgements(config)
    sanity = drawn(_rows_of_split(config.sanity, "test"), rows, seed)
    learnt = _rows_of_split(config.baseline, "train")
    _log.info(
        "%d test rows, %d validation rows, %d human judgements, %d sanity pairs, %d baseline rows",
        *map(len, (test, validation, human, sanity, learnt)),
    )
    if dry_run:
        return
    if not test:
        raise ConfigError(f"{', '.join(map(str, config.test))}: no row of the test split")
    config.folder.mkdir(parents=True, exist_ok=True)
    registry = Registry.from_toml(config.models)
    pictures = Pictures(config.data_dir, config.faces, skip_unreadable=True)
    rated: dict[str, dict[str, list[Rated]]] = {}
    for name in config.judges:
        judge = registry.judge(name)
        assert judge is not None  # an unknown name raises
        parts = {"test": test, "validation": validation, "human": human, "sanity": sanity}
        rated[name] = {
            part: rate_file(
                judge, rows, len(rows), pictures, config.folder / f"{name}.{part}.jsonl"
            )
            for part, rows in parts.items()
            if rows
        }
        judge.close()
    if learnt:
        for words in (WordBaseline(learnt), WordBaseline(learnt, findings=True)):
            rated[words.name] = {"test": list(rate(words, test, pictures))}
    for name, reason in pictures.unreadable.items():
        _log.warning("judged without the unreadable image %s: %s", name, reason)
    report(config, rated)


def report(config: Config, rated: Mapping[str, Mapping[str, Sequence[Rated]]]) -> None:
    """Write the results file, a CSV and the plots."""
    on_test = {name: parts["test"] for name, parts in rated.items()}
    metrics = comparison(on_test)
    any_human = any("human" in parts for parts in rated.values())
    for name, parts in rated.items():
        if "validation" in parts:
            metrics += calibration(name, parts["validation"], parts["test"])
        if "human" in parts:
            metrics += human_agreement(name, parts["human"])
        if "sanity" in parts:
            metrics += sanity_shares(name, parts["sanity"])
        unread = sum(row.unscorable for row in parts["test"])
        question_count = sum(_questions(row) for row in parts["test"])
        metrics.append(
            results.measured(
                "share",
                wilson(unread, question_count),
                unit="%",
                of=name,
                about="unreadable verdicts",
            )
        )
    result = results.made(
        name=config.name,
        title=config.title,
        model=", ".join(config.judges),
        label_source=config.label_source + (HUMAN_SOURCE if any_human else ""),
        command=config.command,
        seed=config.seed,
        interval="95 % CI over source dialogues",
        metrics=tuple(metrics),
    )
    results.publish(result, config.output, config.folder)
    plot_table(metrics, config.folder / "table.png")
    for name, parts in rated.items():
        probability, label = _step_verdicts(parts["test"])
        plot_reliability(probability, label, name, config.folder / f"{name}.reliability.png")


def comparison(rated: Mapping[str, Sequence[Rated]]) -> list[results.Metric]:
    """Return the table: each judge, the majority class, and paired differences on the steps.

    Args:
        rated: Ratings of the same rows by each judge. A judge without a rating for a question (such as
            an ORM on steps) has no line for it.
    """
    metrics: list[results.Metric] = []
    for place, part in enumerate(STEPS):
        about = f"step {place + 1}, {part.value}"
        labels: list[bool] = []
        groups: list[str] = []
        for name, rows in rated.items():
            read = [
                (label, probability, row.group)
                for row in rows
                if (label := row.steps[place]) is not None
                and (probability := row.step_probabilities[place]) is not None
            ]
            if not _both_kinds(label for label, _, _ in read):
                continue
            own_labels, probabilities, own_groups = map(list, zip(*read, strict=True))
            estimates = reward_model_report(own_labels, probabilities, own_groups)
            metrics += _line(estimates, STEP_MEASURES, name, about)
            if len(own_labels) > len(labels):
                labels, groups = own_labels, own_groups
        if labels:
            majority = float(np.mean(labels) >= 0.5)
            estimates = reward_model_report(labels, [majority] * len(labels), groups)
            metrics += _line(estimates, STEP_MEASURES, MAJORITY, about)
        metrics += _differences(rated, place, about)
    metrics += _reply_lines(rated)
    return metrics


def _differences(
    rated: Mapping[str, Sequence[Rated]], place: int, about: str
) -> list[results.Metric]:
    """Return the differences between the first judge and the others, on rows that both rated."""
    (first, rows), *rest = rated.items()
    metrics: list[results.Metric] = []
    for name, other_rows in rest:
        by_id = {row.id: row.step_probabilities[place] for row in other_rows}
        read = [
            (label, own, other, row.group)
            for row in rows
            if (label := row.steps[place]) is not None
            and (own := row.step_probabilities[place]) is not None
            and (other := by_id.get(row.id)) is not None
        ]
        if _both_kinds(label for label, *_ in read):
            labels, own_probabilities, others, groups = map(list, zip(*read, strict=True))
            difference = reward_model_difference(labels, own_probabilities, others, groups)
            metrics += _line(difference, STEP_MEASURES, first, about, baseline=name)
    return metrics


def _reply_lines(rated: Mapping[str, Sequence[Rated]]) -> list[results.Metric]:
    metrics: list[results.Metric] = []
    longest: list[tuple[str, str]] = []
    for name, rows in rated.items():
        read = _preferences(rows)
        if not read:
            continue
        labels, verdicts, groups = map(list, zip(*read, strict=True))
        estimates = preference_report(labels, verdicts, groups)
        metrics += _line(estimates, REPLY_MEASURES, name, "reply")
        if len(labels) > len(longest):
            longest = list(zip(labels, groups, strict=True))
    if longest:
        labels, groups = map(list, zip(*longest, strict=True))
        majority = max(Preference, key=lambda preference: labels.count(preference.value)).value
        estimates = preference_report(labels, [majority] * len(labels), groups)
        metrics += _line(estimates, REPLY_MEASURES, MAJORITY, "reply")
    return metrics


def calibration(
    name: str, validation: Sequence[Rated], test: Sequence[Rated]
) -> list[results.Metric]:
    """Return the temperature fitted on validation rows, and the calibration errors on test rows."""
    fitted_on = _step_verdicts(validation)
    probability, label = _step_verdicts(test)
    if not fitted_on[0] or not probability:
        return []
    temperature = fit_temperature(*fitted_on)
    errors = (
        ("ECE", calibration_error(probability, label)),
        (
            "ECE after temperature scaling",
            calibration_error(tempered(probability, temperature), label),
        ),
    )
    about = "calibration of the steps"
    return [
        results.Metric(
            name="temperature", value=temperature, n=len(fitted_on[0]), of=name, about=about
        ),
        *(
            results.Metric(name=title, value=value, n=len(probability), of=name, about=about)
            for title, value in errors
        ),
    ]


def human_agreement(name: str, rows: Sequence[Rated]) -> list[results.Metric]:
    """Return a judge's agreement with people, by corpus."""
    metrics: list[results.Metric] = []
    by_corpus = sorted(rows, key=lambda row: row.corpus)
    for corpus, of_corpus in itertools.groupby(by_corpus, key=lambda row: row.corpus):
        read = _preferences(of_corpus)
        if not read:
            continue
        labels, verdicts, groups = map(list, zip(*read, strict=True))
        estimates = preference_report(labels, verdicts, groups)
        measures = {
            "accuracy": "accuracy",
            "accuracy_majority": "accuracy of the majority class",
            "kappa": "kappa",
        }
        metrics += _line(estimates, measures, name, f"corpus: {corpus}")
    return metrics


def sanity_shares(name: str, rows: Sequence[Rated]) -> list[results.Metric]:
    """Return in how many pairs a judge gives a reply a higher probability than its corruption.

    Pairs without a readable preference are left out of the share and its n.
    """
    by_corruption = sorted(rows, key=lambda row: row.decided_by)
    metrics: list[results.Metric] = []
    for decided_by, pairs in itertools.groupby(by_corruption, key=lambda row: row.decided_by):
        preferred = [
            (given[0] > given[1]) == (row.preference is Preference.FIRST) and given[0] != given[1]
            for row in pairs
            if (given := row.preference_probabilities) is not None
        ]
        if preferred:
            metrics.append(
                results.measured(
                    "own reply preferred",
                    wilson(sum(preferred), len(preferred)),
                    unit="%",
                    of=name,
                    about=f"sanity: {decided_by.rpartition('/')[2]}",
                )
            )
    return metrics


def _rows_of_split(paths: Iterable[Path], split: Split) -> list[CerRecord]:
    return [
        record
        for path in paths
        for record in read_records(path, CerRecord)
        if record.case.split == split
    ]


def _human_judgements(config: Config) -> list[CerRecord]:
    """Return the human judgements, sampled per corpus so that small ones are represented."""
    by_corpus: defaultdict[str, list[CerRecord]] = defaultdict(list)
    for path in config.human:
        for record in read_records(path, CerRecord):
            if record.case.split in config.human_splits:
                by_corpus[record.case.corpus].append(record)
    return [
        record
        for _, records in sorted(by_corpus.items())
        for record in drawn(records, config.human_rows, config.seed)
    ]


def _preferences(rows: Iterable[Rated]) -> list[tuple[str, str, str]]:
    """Return label, verdict and group of each row that has both."""
    return [
        (row.preference.value, row.verdict.value, row.group)
        for row in rows
        if row.preference is not None and row.verdict is not None
    ]


def _step_verdicts(rows: Sequence[Rated]) -> tuple[list[float], list[bool]]:
    """Return the probabilities and labels of all steps that have both."""
    pairs = [
        (probability, label)
        for row in rows
        for label, probability in zip(row.steps, row.step_probabilities, strict=True)
        if label is not None and probability is not None
    ]
    return [probability for probability, _ in pairs], [label for _, label in pairs]


def _questions(row: Rated) -> int:
    return sum(label is not None for label in row.steps) + (row.preference is not None)


def _both_kinds(labels: Iterable[bool]) -> bool:
    return len(set(labels)) == 2


def _line(
    estimates: Mapping[str, Estimate],
    measures: Mapping[str, str],
    of: str,
    about: str,
    baseline: str = "",
) -> list[results.Metric]:
    return [
        results.measured(
            title,
            estimates[key],
            unit="" if key in _PLAIN else "%",
            of=of,
            baseline=baseline,
            about=about,
        )
        for key, title in measures.items()
        if key in estimates
    ]
