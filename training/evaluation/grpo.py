"""Compares policies on the same held-out histories: `python -m training evaluate grpo <config.toml>`.

All policies answer all histories with the same seeds. A judge scores the turns. A policy may have
over-optimised that reward, so it is reported with measures that do not depend on the judge:

- agreement of strategy and emotion with the labels of people
- overlap with the replies of people (BLEU-2, ROUGE-L)
- length and diversity: distinct-n, also at an equal number of bigrams since it falls with length, and
  the Vendi score
- NLL under the first policy, which exposes degenerate replies that a judge accepts and that look diverse

If a policy was trained with several seeds, each run answers with the seed of its training, so that all
policies give the same number of answers.

95 % intervals resample source dialogues, since turns of a dialogue are not independent. They do not cover
the variance between training runs; the reward of each run is reported separately. Policies are compared
by paired differences on the same histories and resamples.

The run folder contains all turns with their scores (`turns.<policy>.jsonl`), the table and a plot. An
interrupted evaluation resumes by itself.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.batch_generation import Turn
from compeer_core.cer import CerRecord, Split
from compeer_core.config import FrozenModel
from compeer_core.encoder import SentenceEncoder, load_encoder
from compeer_core.errors import ConfigError
from compeer_core.judgement import Form
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import Reading, read
from compeer_core.redundancy import reply_length
from compeer_core.stats import Floats, bootstrap_weights, estimate, jackknife, weighted_mean
from compeer_core.unifireward import Judge
from training.common import results
from training.common.diversity import distinct_without, fewest_runs, vendi_score
from training.common.jsonl import complete_rows, replace_rows
from training.common.judge_source import JudgeSource
from training.common.progress import track
from training.data.histories import read_histories, shortened
from training.data.pictures import Pictures
from training.data.records import drawn
from training.evaluation.answer_store import clear_stores, store_path
from training.evaluation.bleu_rouge import overlap
from training.evaluation.likelihood import LikelihoodModel
from training.evaluation.plots import TRAINING, plot_means, plot_training
from training.evaluation.policy_answers import (
    AnswerRequest,
    Policies,
    PolicySource,
    gate_state,
    loaded_policy,
    seed_of,
)
from training.stages import refuse_resume

_log = logging.getLogger(__name__)


_SEED = "{seed}"


class Compared(PolicySource):
    """A policy. With `{seed}` in `adapter` or `source`, it stands for one training run per seed."""

    metrics: Path | None = None
    """`metrics.jsonl` of the training, for the training plot; may contain `{seed}`."""
    against: tuple[str, ...] | None = None
    """The policies to compare with; None is the first policy."""

    @property
    def has_runs(self) -> bool:
        """Whether it stands for several training runs."""
        return _SEED in f"{self.source} {self.adapter}"

    def runs(self, seeds: tuple[int, ...]) -> list[tuple["Compared", tuple[int, ...]]]:
        """Return each run with its sampling seeds: the seed of its training, or all seeds."""
        if not self.has_runs:
            return [(self, seeds)]
        return [(self._of(seed), (seed,)) for seed in seeds]

    def _of(self, seed: int) -> "Compared":
        paths = {key: getattr(self, key) for key in ("source", "adapter", "metrics")}
        return self.model_copy(
            update={
                key: type(path)(str(path).replace(_SEED, str(seed)))
                for key, path in paths.items()
                if path is not None
            }
        )


class Config(FrozenModel):
    """Policies, judge, histories and settings."""

    policies: Policies[Compared] = Field(min_length=1)
    judge: JudgeSource
    form: Form = "hard"
    """Form of the reward; `hard` is the paper's, from -5 to 5."""
    histories: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows."""
    split: Split = "test"
    """The split of CER rows to use."""
    limit: int | None = Field(default=None, gt=0)
    """Maximum number of histories, sampled with seed 0."""
    history_characters: int | None = Field(default=None, gt=0)
    """Length limit of a history: the oldest utterances are dropped, as in training; None is no limit."""
    faces: Path | None = None
    data_dir: Path | None = None
    encoder: str | None = None
    """Sentence encoder of the Vendi score; None is the shipped one."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    """Each history is answered once per seed."""
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=512, gt=0)
    at_once: int = Field(default=16, gt=0)
    """Batch size in turns."""
    device: str | None = None
    folder: Path
    """Folder for turns, table and plots."""
    output: Path = results.FOLDER
    """Folder of the results files."""
    name: str = "grpo"
    title: str = "Policies on held-out histories"
    label_source: str = "people of the corpora (strategy, emotion); the judge (reward)"
    command: str = "python -m training evaluate grpo training/configs/small/evaluate_grpo.toml"

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        names = [policy.name for policy in self.policies]
        for policy in self.policies:
            others = [name for name in names if name != policy.name]
            for name in policy.against or ():
                if name not in others:
                    raise ValueError(
                        f"policy {policy.name}: `against` names {name!r}; the others are "
                        f"{', '.join(others)}"
                    )
        return self

    @property
    def pairs(self) -> dict[str, tuple[str, ...]]:
        """The policies that each one is compared with."""
        first, *others = self.policies
        pairs = {first.name: first.against or ()}
        for policy in others:
            pairs[policy.name] = (first.name,) if policy.against is None else policy.against
        return pairs


@dataclass(frozen=True)
class Answer:
    """A turn of a policy, with its scores."""

    history: int
    """Index of the history."""
    seed: int
    reading: Reading
    reward: float
    """NaN if unscorable."""
    steps: float
    """Mean reward of the three steps; NaN if one is unscorable."""
    reply: float
    strategy: bool | None
    """Whether the strategy agrees with the labels; None without labels."""
    emotion: bool | None
    reply_nll: float = math.nan
    """NLL of the reply under the first policy, nats/token; NaN for an incomplete turn."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Answer, score and compare; a dry run loads the judge and counts histories."""
    refuse_resume(resume, "an evaluation resumes by itself")
    available, left_out = read_histories(config.histories, config.split)
    histories = drawn(available, config.limit, 0)
    _log.info("%d histories (left out: %s)", len(histories), dict(left_out) or "none")
    histories = [shortened(history, config.history_characters) for history in histories]
    pictures = Pictures(config.data_dir, config.faces)
    trained = training_metrics(config)
    encoder = load_encoder(config.encoder)
    judge = config.judge.load()
    try:
        if dry_run:
            return
        answers = {}
        for policy in config.policies:
            answers[policy.name] = [
                answer
                for policy_run, seeds in policy.runs(config.seeds)
                for answer in score_turns(
                    generate_turns(policy_run, seeds, histories, pictures, config),
                    seeds,
                    histories,
                    pictures,
                    judge,
                    config.form,
                )
            ]
            _write_turns(config.folder, policy.name, histories, answers[policy.name])
    finally:
        judge.close()
    answers = with_reply_nll(answers, histories, pictures, config)
    metrics = comparison_metrics(answers, histories, encoder, config.pairs)
    metrics += run_metrics(answers, config, histories)
    result = results.made(
        name=config.name,
        title=config.title,
        model=", ".join(answers),
        label_source=config.label_source,
        command=config.command,
        gate=gate_state(config.policies),
        interval="95 % CI over source dialogues",
        compared="Policy",
        metrics=tuple(metrics),
    )
    results.publish(result, config.output, config.folder)
    plot_means(metrics, REWARD, config.folder / "reward.png")
    if trained:
        plot_training(trained, config.folder / "training.png")
    clear_stores(config.folder)


def training_metrics(config: Config) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the logged steps of each policy's training runs, as far as `metrics` is set.

    Raises:
        ConfigError: A file is missing, or has no steps.
    """
    by_policy: dict[str, list[list[dict[str, Any]]]] = {}
    for policy in config.policies:
        for policy_run, _ in policy.runs(config.seeds):
            if policy_run.metrics is None:
                continue
            steps = [
                row
                for row in complete_rows(policy_run.metrics)
                if all(row.get(metric) is not None for metric in TRAINING)
            ]
            if not steps:
                raise ConfigError(
                    f"policies.metrics: {policy_run.metrics} is missing or has no GRPO steps"
                )
            by_policy.setdefault(policy.name, []).append(steps)
    return by_policy


# --- turns -------------------------------------------------------------------------------------


def generate_turns(
    policy: PolicySource,
    seeds: Sequence[int],
    histories: Sequence[CerRecord],
    pictures: Pictures,
    config: Config,
) -> list[tuple[Turn, ...]]:
    """Answer each history once per seed.

    Raises:
        CompeerError: The policy cannot process a history.
    """
    sampling = Sampling(
        temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens
    )
    requests = (
        AnswerRequest(
            pictures.dialogue(history.case),
            tuple(seed_of(number, seed) for seed in seeds),
            history.case.language,
        )
        for number, history in enumerate(histories)
    )
    with loaded_policy(policy, at_once=config.at_once, device=config.device) as answerer:
        stored = store_path(config.folder, f"{policy.name}.{'-'.join(map(str, seeds))}")
        return list(answerer.answers(requests, sampling, len(histories), stored))


def score_turns(
    turns: Sequence[Sequence[Turn]],
    seeds: Sequence[int],
    histories: Sequence[CerRecord],
    pictures: Pictures,
    judge: Judge,
    form: Form,
) -> list[Answer]:
    """Judge the turns, all turns of a history together; `seeds` are those of its turns."""
    answers: list[Answer] = []
    for number, (history, of_history) in enumerate(zip(histories, turns, strict=True)):
        readings = [read(turn.text) for turn in of_history]
        judgements = judge.judge(
            pictures.dialogue(history.case),
            readings,
            [history.case.original or ""] * len(readings),
        )
        for seed, reading, judgement in zip(seeds, readings, judgements, strict=True):
            reward = judgement.reward(form)
            steps = reward.steps or ()
            answers.append(
                Answer(
                    number,
                    seed,
                    reading,
                    _or_nan(reward.total),
                    sum(map(_or_nan, steps)) / len(steps) if steps else math.nan,
                    _or_nan(reward.response),
                    _strategy_agrees(reading, history),
                    _emotion_agrees(reading, history),
                )
            )
    return answers


def with_reply_nll(
    answers: Mapping[str, list[Answer]],
    histories: Sequence[CerRecord],
    pictures: Pictures,
    config: Config,
) -> dict[str, list[Answer]]:
    """Return the answers with the NLL of their replies under the first policy."""
    first, _ = config.policies[0].runs(config.seeds)[0]
    model = LikelihoodModel(first.source, first.adapter)

    def nll(answer: Answer) -> float:
        if not answer.reading.is_complete:
            return math.nan
        history = histories[answer.history]
        dialogue = pictures.dialogue(history.case)
        messages = policy_messages(dialogue, first.style, history.case.language)
        likelihood = model.score(messages, answer.reading.raw)
        return likelihood.reply_loss / likelihood.reply_tokens

    return {
        name: [replace(answer, reply_nll=nll(answer)) for answer in track(own, f"NLL: {name}")]
        for name, own in answers.items()
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _strategy_agrees(reading: Reading, history: CerRecord) -> bool | None:
    strategies = history.case.labels.strategies
    if not strategies:
        return None
    return reading.strategy is not None and reading.strategy.strategy == strategies[0]


def _emotion_agrees(reading: Reading, history: CerRecord) -> bool | None:
    if history.case.labels.emotion is None:
        return None
    named = None if reading.emotion is None else reading.emotion.emotion
    return named == history.case.labels.emotion


def _write_turns(
    folder: Path, name: str, histories: Sequence[CerRecord], answers: Sequence[Answer]
) -> None:
    rows = (
        {
            "history": histories[answer.history].id,
            "seed": answer.seed,
            "text": answer.reading.raw,
            "complete": answer.reading.is_complete,
            "reward": None if math.isnan(answer.reward) else answer.reward,
            "strategy_as_labelled": answer.strategy,
            "emotion_as_labelled": answer.emotion,
        }
        for answer in answers
    )
    replace_rows(folder / f"turns.{name}.jsonl", rows)


# --- metrics -----------------------------------------------------------------------------------

REWARD = "reward"
_JUDGE, _PEOPLE, _REPLIES, _VARIETY = "the judge", "people's labels", "replies", "variety"

Value = Callable[[Answer], float]
MEANS: dict[str, dict[str, tuple[str, Value]]] = {
    _JUDGE: {
        REWARD: ("", lambda answer: answer.reward),
        "steps": ("", lambda answer: answer.steps),
        "reply": ("", lambda answer: answer.reply),
        "complete": ("%", lambda answer: float(answer.reading.is_complete)),
        "unscorable": ("%", lambda answer: float(math.isnan(answer.reward))),
    },
    _PEOPLE: {
        "strategy": ("%", lambda answer: math.nan if answer.strategy is None else answer.strategy),
        "emotion": ("%", lambda answer: math.nan if answer.emotion is None else answer.emotion),
    },
    _REPLIES: {
        "words": ("", lambda answer: reply_length(answer.reading.reply or "")),
        "NLL under the SFT policy, nats/token": ("", lambda answer: answer.reply_nll),
    },
}
"""Means over turns, by topic and name: the unit and the value of a turn, NaN if undefined."""


@dataclass(frozen=True)
class _Measure:
    """A measure of a policy, on all histories and on each resample."""

    about: str
    name: str
    unit: str
    values: Floats
    is_text: bool
    """Whether the resamples are jackknife ones (one source left out), as for diversity."""


def comparison_metrics(
    answers: Mapping[str, list[Answer]],
    histories: Sequence[CerRecord],
    encoder: SentenceEncoder,
    pairs: Mapping[str, Sequence[str]],
) -> list[results.Metric]:
    """Return the measures of each policy, and its differences from those it is compared with."""
    sources = [history.case.source_id for history in histories]
    weights = bootstrap_weights(sources)
    count = len({*sources})
    bigrams = _common_bigram_count(answers.values(), sources)
    measures = {
        name: _measures(own, weights, histories, encoder, bigrams) for name, own in answers.items()
    }
    metrics = []
    for name, own in measures.items():
        for other in (None, *pairs[name]):
            for place, measure in enumerate(own):
                values = measure.values
                if other is not None:
                    values = values - measures[other][place].values
                if np.isnan(values[0]):
                    continue
                result = jackknife(values, count) if measure.is_text else estimate(values, count)
                metrics.append(
                    results.measured(
                        measure.name,
                        result,
                        unit=measure.unit,
                        of=name,
                        baseline=other or "",
                        about=measure.about,
                    )
                )
    return metrics


def _measures(
    answers: Sequence[Answer],
    weights: Floats,
    histories: Sequence[CerRecord],
    encoder: SentenceEncoder,
    bigrams: int,
) -> list[_Measure]:
    weights = weights[:, [answer.history for answer in answers]]
    measures = [
        _Measure(about, name, unit, weighted_mean(weights, list(map(value, answers))), False)
        for about, means in MEANS.items()
        for name, (unit, value) in means.items()
    ]
    common = overlap(
        [answer.reading.reply or "" for answer in answers],
        [histories[answer.history].case.original or "" for answer in answers],
    )
    rouge = weighted_mean(weights, common.rouge_l)
    measures += [
        _Measure(_REPLIES, "ROUGE-L", "%", rouge, False),
        _Measure(_REPLIES, "BLEU-2", "%", common.bleu(weights, 2), False),
    ]
    sources = [history.case.source_id for history in histories]
    measures += [
        _Measure(_VARIETY, name, "", values, True)
        for name, values in diversity(answers, sources, encoder, bigrams).items()
    ]
    return measures


def run_metrics(
    answers: Mapping[str, Sequence[Answer]], config: Config, histories: Sequence[CerRecord]
) -> list[results.Metric]:
    """Return the reward of each training run, for policies with several."""
    sources = [history.case.source_id for history in histories]
    weights = bootstrap_weights(sources)
    metrics = []
    for policy in config.policies:
        if not policy.has_runs:
            continue
        for seed in config.seeds:
            own = [answer for answer in answers[policy.name] if answer.seed == seed]
            values = weighted_mean(
                weights[:, [answer.history for answer in own]], [answer.reward for answer in own]
            )
            result = estimate(values, len({*sources}))
            metrics.append(
                results.measured(f"seed {seed}", result, of=policy.name, about="reward of each run")
            )
    return metrics


def diversity(
    answers: Sequence[Answer], sources: Sequence[str], encoder: SentenceEncoder, bigrams: int = 0
) -> dict[str, Floats]:
    """Return the diversity of a policy's replies, overall and without each source in turn.

    Measured within a seed, which has one reply per history, and averaged over seeds: a policy is not
    penalised for similar answers to the same history.

    Args:
        answers: Answers of a policy.
        sources: Source dialogue of each history.
        encoder: Sentence encoder of the Vendi score.
        bigrams: Number of bigrams for an additional distinct-2; 0 omits it.

    Returns:
        By the name of the measure, shape (1 + sources,).
    """
    embeddings = encoder.encode([answer.reading.reply or "" for answer in answers])
    of_seeds: dict[str, list[list[float]]] = {}
    for own, replies, source in _by_seed(answers, sources):
        measures = {
            f"distinct-{length}": distinct_without(replies, source, length) for length in (1, 2)
        }
        if bigrams:
            name = f"distinct-2 of {bigrams:,} pairs"
            measures[name] = distinct_without(replies, source, 2, bigrams)
        of_source = np.array(source)
        subsets = [own, *(own[of_source != left_out] for left_out in dict.fromkeys(source))]
        measures["Vendi score"] = [
            vendi_score(embeddings[subset]) if len(subset) else 0.0 for subset in subsets
        ]
        for name, values in measures.items():
            of_seeds.setdefault(name, []).append(values)
    return {name: np.mean(values, axis=0) for name, values in of_seeds.items()}


def _common_bigram_count(policies: Iterable[Sequence[Answer]], sources: Sequence[str]) -> int:
    """Return the smallest number of bigrams of a policy at a seed, rounded down to hundreds."""
    fewest = min(
        fewest_runs(replies, source, 2)
        for answers in policies
        for _, replies, source in _by_seed(answers, sources)
    )
    return fewest // 100 * 100


def _by_seed(
    answers: Sequence[Answer], sources: Sequence[str]
) -> Iterator[tuple[npt.NDArray[np.intp], list[str], list[str]]]:
    """Yield the indices of each seed's answers, their replies and the sources of their histories."""
    seeds = np.array([answer.seed for answer in answers])
    for seed in sorted({*seeds.tolist()}):
        own = np.flatnonzero(seeds == seed)
        some = [answers[index] for index in own.tolist()]
        yield own, [a.reading.reply or "" for a in some], [sources[a.history] for a in some]
