"""Policies on the same held-out histories: `python -m training evaluate grpo <config.toml>`.

Every policy answers every history from the same seeds. A judge scores the turns, and beside the
reward that a policy may have learnt to please stand measures that are none of the judge's: whether
the strategy and the emotion that it names are those that people labelled, what its replies have in
common with those that people gave (BLEU-2, ROUGE-L), how long and how different they are
(distinct-n, also of as many pairs of words for each policy, since it falls with length; Vendi
score), and how much they surprise the first policy: a reply that falls apart pleases a judge that
does not mind, and counts as diverse, but is not what a model of the language expects.

Of a policy that was trained several times, from several seeds, each run answers from the seed of its own
training, so that together they answer as often as a policy of one run.

Intervals are at 95 % and draw whole source dialogues, since turns of one are alike. They say how far
other dialogues would move a number, not how far other runs of training would: the reward of each run
stands beside. Policies are compared on the same histories and the same draws, as differences of pairs.

The run folder keeps every turn with its scores (`turns.<policy>.jsonl`), the table and a plot. An
evaluation that was stopped goes on with the turns that are written.
"""

import datetime
import json
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
from compeer_core.reweighting import reply_length
from compeer_core.unifireward import Judge
from training.common import results
from training.common.diversity import distinct_without, fewest_runs, vendi_score
from training.common.jsonl import whole_rows
from training.common.judge_source import JudgeSource
from training.common.progress import track
from training.common.run_directory import versions
from training.data.histories import read_histories, shortened
from training.data.pictures import Pictures
from training.data.samples import drawn
from training.evaluation.answering import Asked, PolicySource, answering, seed_of
from training.evaluation.kept_answers import forget, kept_file
from training.evaluation.likelihood import LikelihoodModel
from training.evaluation.metrics import Floats, drawn_weights, estimate, jackknife, weighted_mean
from training.evaluation.overlap import overlap
from training.evaluation.plots import TRAINING, plot_means, plot_training

_log = logging.getLogger(__name__)


_SEED = "{seed}"


class Compared(PolicySource):
    """One policy. With `{seed}` in `adapter` or `source` it is as many runs as there are seeds."""

    metrics: Path | None = None
    """`metrics.jsonl` of the training, which is drawn beside that of the others; `{seed}` as above."""
    against: tuple[str, ...] | None = None
    """Which policies it is compared with; None is the first one."""

    @property
    def has_runs(self) -> bool:
        """Whether it is several runs of a training."""
        return _SEED in f"{self.source} {self.adapter}"

    def runs(self, seeds: tuple[int, ...]) -> list[tuple["Compared", tuple[int, ...]]]:
        """Return each run with the seeds that it answers from: its own, or all of one run."""
        if not self.has_runs:
            return [(self, seeds)]
        return [(self._of(seed), (seed,)) for seed in seeds]

    def _of(self, seed: int) -> "Compared":
        places = {key: getattr(self, key) for key in ("source", "adapter", "metrics")}
        return self.model_copy(
            update={
                key: type(place)(str(place).replace(_SEED, str(seed)))
                for key, place in places.items()
                if place is not None
            }
        )


class Config(FrozenModel):
    """What is compared, on what."""

    policies: tuple[Compared, ...] = Field(min_length=1)
    judge: JudgeSource
    form: Form = "hard"
    """Of the reward; `hard` is the paper's, from -5 to 5."""
    histories: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows."""
    split: Split = "test"
    """Which split of rows of CER."""
    limit: int | None = Field(default=None, gt=0)
    """At most so many histories, drawn by the seed 0."""
    history_characters: int | None = Field(default=None, gt=0)
    """Oldest utterances of a history are left out beyond this, as in training; None leaves out none."""
    faces: Path | None = None
    data_dir: Path | None = None
    encoder: str | None = None
    """For the Vendi score; None is the shipped one."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    """Each history is answered once from each."""
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=512, gt=0)
    at_once: int = Field(default=16, gt=0)
    """Turns that are written together."""
    device: str | None = None
    folder: Path
    """Where the turns, the table and the plot go."""
    output: Path = results.FOLDER
    """Folder of the results files."""
    name: str = "grpo_nano"
    title: str = "Policies on held-out histories"
    label_source: str = "people of the corpora (strategy, emotion); the judge (reward)"
    command: str = "python -m training evaluate grpo training/configs/nano/evaluate_grpo.toml"

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        names = [policy.name for policy in self.policies]
        if len({*names}) < len(names):
            raise ValueError(f"two policies have one name: {', '.join(names)}")
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
        """Which policies each one is compared with."""
        first, *others = self.policies
        pairs = {first.name: first.against or ()}
        for policy in others:
            pairs[policy.name] = (first.name,) if policy.against is None else policy.against
        return pairs


@dataclass(frozen=True)
class Answer:
    """One turn of a policy, and what it is worth."""

    history: int
    """Number of the history."""
    seed: int
    reading: Reading
    reward: float
    """NaN where the judge could not score it."""
    steps: float
    """Mean of the three steps; NaN where one could not be scored."""
    reply: float
    strategy: bool | None
    """Whether the strategy is one that people labelled; None where nobody said."""
    emotion: bool | None
    surprise: float = math.nan
    """Of the first policy at the reply, in nats a token; NaN where the turn is not complete."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Let the policies answer, score and compare; a dry run loads the judge and counts histories."""
    if resume is not None:
        raise ConfigError("an evaluation goes on by itself where it stopped: begin it again")
    found, left_out = read_histories(config.histories, config.split)
    histories = drawn(found, config.limit, 0)
    _log.info("%d histories (left out: %s)", len(histories), dict(left_out) or "none")
    histories = [shortened(history, config.history_characters) for history in histories]
    pictures = Pictures(config.data_dir, config.faces)
    trained = metrics_of_training(config)
    encoder = load_encoder(config.encoder)
    judge = config.judge.load()
    try:
        if dry_run:
            return
        answers = {}
        for policy in config.policies:
            answers[policy.name] = [
                answer
                for one, seeds in policy.runs(config.seeds)
                for answer in scored(
                    written(one, seeds, histories, pictures, config),
                    seeds,
                    histories,
                    pictures,
                    judge,
                    config.form,
                )
            ]
            _keep(config.folder, policy.name, histories, answers[policy.name])
    finally:
        judge.close()
    answers = surprising(answers, histories, pictures, config)
    metrics = compared(answers, histories, encoder, config.pairs)
    metrics += of_runs(answers, config, histories)
    result = results.Result(
        name=config.name,
        title=config.title,
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        model=", ".join(answers),
        label_source=config.label_source,
        command=config.command,
        versions=versions(("torch", "transformers")),
        interval="95 % interval over source dialogues",
        compared="Policy",
        metrics=tuple(metrics),
    )
    results.publish(result, config.output, config.folder)
    plot_means(metrics, REWARD, config.folder / "reward.png")
    if trained:
        plot_training(trained, config.folder / "training.png")
    forget(config.folder)


def metrics_of_training(config: Config) -> dict[str, list[list[dict[str, Any]]]]:
    """Return what the runs of each policy have logged in training, where they name it.

    Raises:
        ConfigError: A file is missing, or has no steps.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for policy in config.policies:
        for one, _ in policy.runs(config.seeds):
            if one.metrics is None:
                continue
            steps = [
                row
                for row in whole_rows(one.metrics)
                if all(row.get(metric) is not None for metric in TRAINING)
            ]
            if not steps:
                raise ConfigError(
                    f"policies.metrics: {one.metrics} is not there, or holds no steps of GRPO"
                )
            found.setdefault(policy.name, []).append(steps)
    return found


# --- the turns ---------------------------------------------------------------------------------


def written(
    policy: PolicySource,
    seeds: Sequence[int],
    histories: Sequence[CerRecord],
    pictures: Pictures,
    config: Config,
) -> list[tuple[Turn, ...]]:
    """Let a policy answer each history, once from each seed.

    Raises:
        CompeerError: A history cannot be read by the policy.
    """
    sampling = Sampling(
        temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens
    )
    asked = (
        Asked(
            pictures.dialogue(history.case),
            tuple(seed_of(number, seed) for seed in seeds),
            history.case.language,
        )
        for number, history in enumerate(histories)
    )
    with answering(policy, at_once=config.at_once, device=config.device) as answerer:
        kept = kept_file(config.folder, f"{policy.name}.{'-'.join(map(str, seeds))}")
        return list(answerer.answers(asked, sampling, len(histories), kept))


def scored(
    turns: Sequence[Sequence[Turn]],
    seeds: Sequence[int],
    histories: Sequence[CerRecord],
    pictures: Pictures,
    judge: Judge,
    form: Form,
) -> list[Answer]:
    """Judge the turns, all of a history at once; they were drawn from `seeds`."""
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
                    _known(reward.total),
                    sum(map(_known, steps)) / len(steps) if steps else math.nan,
                    _known(reward.response),
                    _names_strategy(reading, history),
                    _names_emotion(reading, history),
                )
            )
    return answers


def surprising(
    answers: Mapping[str, list[Answer]],
    histories: Sequence[CerRecord],
    pictures: Pictures,
    config: Config,
) -> dict[str, list[Answer]]:
    """Return the answers with how much their replies surprise the first policy."""
    first, _ = config.policies[0].runs(config.seeds)[0]
    model = LikelihoodModel(first.source, first.adapter)

    def of(answer: Answer) -> float:
        if not answer.reading.is_complete:
            return math.nan
        history = histories[answer.history]
        messages = policy_messages(
            pictures.dialogue(history.case), first.style, history.case.language
        )
        found = model.surprise(messages, answer.reading.raw)
        return found.reply_loss / found.reply_tokens

    return {
        name: [replace(answer, surprise=of(answer)) for answer in track(given, f"surprise: {name}")]
        for name, given in answers.items()
    }


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _names_strategy(reading: Reading, history: CerRecord) -> bool | None:
    strategies = history.case.labels.strategies
    if not strategies:
        return None
    return reading.strategy is not None and reading.strategy.strategy in strategies


def _names_emotion(reading: Reading, history: CerRecord) -> bool | None:
    if history.case.labels.emotion is None:
        return None
    named = None if reading.emotion is None else reading.emotion.emotion
    return named == history.case.labels.emotion


def _keep(
    folder: Path, name: str, histories: Sequence[CerRecord], answers: Sequence[Answer]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"turns.{name}.jsonl").open("w", encoding="utf-8") as file:
        for one in answers:
            row: dict[str, Any] = {
                "history": histories[one.history].id,
                "seed": one.seed,
                "text": one.reading.raw,
                "complete": one.reading.is_complete,
                "reward": None if math.isnan(one.reward) else one.reward,
                "strategy_as_labelled": one.strategy,
                "emotion_as_labelled": one.emotion,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


# --- the numbers -------------------------------------------------------------------------------

REWARD = "reward"
_JUDGE, _PEOPLE, _REPLIES, _VARIETY = "the judge", "people's labels", "replies", "variety"

Value = Callable[[Answer], float]
MEANS: dict[str, dict[str, tuple[str, Value]]] = {
    _JUDGE: {
        REWARD: ("", lambda one: one.reward),
        "steps": ("", lambda one: one.steps),
        "reply": ("", lambda one: one.reply),
        "complete": ("%", lambda one: float(one.reading.is_complete)),
        "not scorable": ("%", lambda one: float(math.isnan(one.reward))),
    },
    _PEOPLE: {
        "strategy": ("%", lambda one: math.nan if one.strategy is None else one.strategy),
        "emotion": ("%", lambda one: math.nan if one.emotion is None else one.emotion),
    },
    _REPLIES: {
        "words": ("", lambda one: reply_length(one.reading.reply or "")),
        "surprise of the first policy": ("nats a token", lambda one: one.surprise),
    },
}
"""Means over turns, by what they ask: the unit, and what of a turn; NaN where it does not say."""


@dataclass(frozen=True)
class _Measure:
    """One measure of one policy: of all histories, then of each sample or without each source."""

    about: str
    name: str
    unit: str
    values: Floats
    is_text: bool
    """Whether the values leave a source out each, as those of variety do."""


def compared(
    answers: Mapping[str, list[Answer]],
    histories: Sequence[CerRecord],
    encoder: SentenceEncoder,
    pairs: Mapping[str, Sequence[str]],
) -> list[results.Metric]:
    """Return the measures of each policy, and how it differs from those it is compared with."""
    sources = [history.case.source_id for history in histories]
    weights = drawn_weights(sources)
    count = len({*sources})
    amount = _amount(answers.values(), sources)
    measures = {
        name: _measures(given, weights, histories, encoder, amount)
        for name, given in answers.items()
    }
    metrics = []
    for name, own in measures.items():
        for other in (None, *pairs[name]):
            for place, one in enumerate(own):
                values = one.values
                if other is not None:
                    values = values - measures[other][place].values
                if np.isnan(values[0]):
                    continue
                found = jackknife(values, count) if one.is_text else estimate(values, count)
                of = name if other is None else f"{name} less {other}"
                metrics.append(
                    results.measured(one.name, found, unit=one.unit, of=of, about=one.about)
                )
    return metrics


def _measures(
    answers: Sequence[Answer],
    weights: Floats,
    histories: Sequence[CerRecord],
    encoder: SentenceEncoder,
    amount: int,
) -> list[_Measure]:
    weights = weights[:, [one.history for one in answers]]
    found = [
        _Measure(about, name, unit, weighted_mean(weights, [value(one) for one in answers]), False)
        for about, means in MEANS.items()
        for name, (unit, value) in means.items()
    ]
    in_common = overlap(
        [one.reading.reply or "" for one in answers],
        [histories[one.history].case.original or "" for one in answers],
    )
    rouge = weighted_mean(weights, in_common.rouge_l)
    found += [
        _Measure(_REPLIES, "ROUGE-L", "%", rouge, False),
        _Measure(_REPLIES, "BLEU-2", "%", in_common.bleu(weights, 2), False),
    ]
    sources = [history.case.source_id for history in histories]
    found += [
        _Measure(_VARIETY, name, "", values, True)
        for name, values in diversity(answers, sources, encoder, amount).items()
    ]
    return found


def of_runs(
    answers: Mapping[str, Sequence[Answer]], config: Config, histories: Sequence[CerRecord]
) -> list[results.Metric]:
    """Return the reward of each run of the policies that have several."""
    sources = [history.case.source_id for history in histories]
    weights = drawn_weights(sources)
    metrics = []
    for policy in config.policies:
        if not policy.has_runs:
            continue
        for seed in config.seeds:
            own = [one for one in answers[policy.name] if one.seed == seed]
            values = weighted_mean(
                weights[:, [one.history for one in own]], [one.reward for one in own]
            )
            found = estimate(values, len({*sources}))
            metrics.append(
                results.measured(f"seed {seed}", found, of=policy.name, about="reward of each run")
            )
    return metrics


def diversity(
    answers: Sequence[Answer], sources: Sequence[str], encoder: SentenceEncoder, amount: int = 0
) -> dict[str, Floats]:
    """Return how different the replies of a policy are: of all, then without each source in turn.

    Each seed gives one reply to each history; the measures are taken within a seed, so that a policy
    is not charged for answering the same history alike, and averaged over the seeds.

    Args:
        answers: Of one policy.
        sources: Of each history.
        encoder: For the Vendi score.
        amount: Pairs of words of which distinct-2 is taken once more; 0 does not.

    Returns:
        By the name of the measure, shape (1 + sources,).
    """
    embeddings = encoder.encode([one.reading.reply or "" for one in answers])
    found: dict[str, list[list[float]]] = {}
    for own, replies, source in _by_seed(answers, sources):
        measures = {
            f"distinct-{length}": distinct_without(replies, source, length) for length in (1, 2)
        }
        if amount:
            name = f"distinct-2 of {amount:,} pairs"
            measures[name] = distinct_without(replies, source, 2, amount)
        of_source = np.array(source)
        kept = [own, *(own[of_source != left_out] for left_out in dict.fromkeys(source))]
        measures["Vendi score"] = [
            vendi_score(embeddings[some]) if len(some) else 0.0 for some in kept
        ]
        for name, values in measures.items():
            found.setdefault(name, []).append(values)
    return {name: np.mean(of_seeds, axis=0) for name, of_seeds in found.items()}


def _amount(policies: Iterable[Sequence[Answer]], sources: Sequence[str]) -> int:
    """Return how many pairs of words every policy has at every seed, in whole hundreds."""
    fewest = min(
        fewest_runs(replies, source, 2)
        for answers in policies
        for _, replies, source in _by_seed(answers, sources)
    )
    return fewest // 100 * 100


def _by_seed(
    answers: Sequence[Answer], sources: Sequence[str]
) -> Iterator[tuple[npt.NDArray[np.intp], list[str], list[str]]]:
    """Yield the places of the answers from each seed, their replies and the sources of their histories."""
    of_seed = np.array([one.seed for one in answers])
    for seed in sorted({*of_seed.tolist()}):
        own = np.flatnonzero(of_seed == seed)
        some = [answers[place] for place in own.tolist()]
        yield own, [one.reading.reply or "" for one in some], [sources[one.history] for one in some]
