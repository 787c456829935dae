"""The cost of judging: `python -m training benchmark judging <config.toml>` (COMPEER, Fig. 5b).

A round is one dialogue with G candidates. Each candidate is judged on three steps and, in both orders,
on its reply. Three methods are compared on the same rounds:

- *naive*: every verdict processes the conversation from the beginning, like calls to a chat API
- *session*: one session per candidate, with a KV cache that is reused from question to question
- *ours*: `compeer_core.backends.transformers_.prefix_scoring`, three to five forward passes for all
  candidates

Naive and ours are also run for a PRM with an ORM. All methods use the same weights. PRM and ORM are
two adapters on one base if `pair` is set, otherwise UnifiReward's weights stand in for both: timings
do not depend on the weights, except that a wrong draft costs *ours* another pass.

Seconds are medians. All methods judge a round before the next one starts, so background load slows all
of them. UnifiReward's verdicts are checked to be equal across methods.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.backends.protocol import Answers, CandidateQuestions, Message, interview
from compeer_core.backends.transformers_.prefix_scoring import Work
from compeer_core.backends.transformers_.scoring import TransformersScorer
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue
from compeer_core.errors import CompeerError, ConfigError
from compeer_core.prompts import judge_messages
from compeer_core.registry import Registry
from compeer_core.unifireward import ask_about_replies, ask_about_step
from training.benchmark.naive_scoring import NaiveScorer
from training.benchmark.publishing import publish, summarise
from training.benchmark.synthetic_dialogues import (
    synthetic_reference,
    synthetic_turn,
    synthetic_utterances,
)
from training.common import results
from training.common.progress import track
from training.stages import refuse_resume

NAIVE, OURS = "UnifiReward, naive", "UnifiReward, ours"

Messages = Sequence[Message]
Interviews = Sequence[CandidateQuestions]


class Config(FrozenModel):
    """The judge and the rounds."""

    models: Path = Path("assets/models.toml")
    """The list of models."""
    judge: str = ""
    """UnifiReward in that list; empty is the default judge."""
    pair: str = ""
    """A PRM with an ORM in that list; empty uses the judge's weights for both."""
    group_sizes: tuple[int, ...] = (1, 4, 8, 16, 32)
    """Numbers of candidates. Paper: G = 4."""
    histories: tuple[int, ...] = (2, 10, 20, 40)
    """Numbers of utterances of the dialogue."""
    base_group: int = 4
    """Group size while the history varies."""
    base_history: int = 10
    """History length while the group size varies."""
    repeats: int = Field(default=5, ge=1)
    """Timed rounds per setting, after a warm-up round."""
    equality_rounds: int = 250
    """Rounds of `base_group` candidates on which naive and our verdicts are compared."""
    output: Path = results.FOLDER
    """Folder of the results file."""
    name: str = "judging_cpu"
    command: str = "python -m training benchmark judging training/configs/benchmark_judging.toml"
    """Recorded with the numbers."""
    seed: int = 0


@dataclass(frozen=True)
class Method:
    """A method to judge a round."""

    name: str
    judge: Callable[[Messages, Interviews], list[Answers]]
    work: Work


@dataclass
class Cost:
    """The cost of a method, per round."""

    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The difference between the verdicts of two methods."""

    verdicts: int
    """Number of verdicts and preferences compared."""
    unequal: int
    largest: float
    """Largest absolute difference of a label's log-probability."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure and write the results file; a dry run only loads the judges."""
    refuse_resume(resume, "a benchmark cannot be resumed")
    registry = Registry.from_toml(config.models)
    unified = _local_scorer(registry, config.judge)
    pair = _local_pair(registry, config.pair) if config.pair else (unified, unified)
    if dry_run:
        return
    methods = judging_methods(unified, pair)
    sizes = dict.fromkeys(
        [
            *((size, config.base_history) for size in config.group_sizes),
            *((config.base_group, length) for length in config.histories),
        ]
    )
    metrics: list[results.Metric] = []
    for size, length in sizes:
        costs = measure(methods, size, length, config)
        metrics += list(_cost_metrics(costs, f"{size} candidates, {length} utterances"))
    rounds = track(range(config.equality_rounds), "comparing with naive", unit="rounds")
    difference = compare(
        methods, (synthetic_round(config, config.base_group, None, n) for n in rounds)
    )
    metrics += _difference_metrics(difference)
    publish(
        config.output,
        ("torch", "transformers"),
        name=config.name,
        title="Judging a round: seconds, forward passes, tokens read",
        model=", ".join(
            name for name in (config.judge or registry.default_name("judge"), config.pair) if name
        ),
        command=config.command,
        seed=config.seed,
        interval="fastest to slowest round",
        metrics=tuple(metrics),
    )


def judging_methods(
    unified: TransformersScorer, pair: tuple[TransformersScorer, TransformersScorer]
) -> list[Method]:
    """Return all methods; each counts its own work."""
    prm, orm = pair
    works = [Work() for _ in range(5)]

    def naive(messages: Messages, interviews: Interviews) -> list[Answers]:
        scorer = NaiveScorer(unified, works[0])
        return [interview(scorer.open(messages), each) for each in interviews]

    def sessions(messages: Messages, interviews: Interviews) -> list[Answers]:
        return [interview(_Session(unified, messages, works[1]), each) for each in interviews]

    def ours(messages: Messages, interviews: Interviews) -> list[Answers]:
        return _judge_together(unified, messages, interviews, works[2])

    def naive_pair(messages: Messages, interviews: Interviews) -> list[Answers]:
        process, outcome = NaiveScorer(prm, works[3]), NaiveScorer(orm, works[3])
        answers = []
        for each in interviews:
            steps = interview(process.open(messages), CandidateQuestions((), each.chain))
            reply = interview(outcome.open(messages), CandidateQuestions((), each.ends))
            answers.append(Answers(steps.ends, reply.ends))
        return answers

    def our_pair(messages: Messages, interviews: Interviews) -> list[Answers]:
        # Two models: the ORM cannot use the PRM's cache.
        steps, replies = (
            _judge_together(
                scorer, messages, [CandidateQuestions((), ends) for ends in questions], works[4]
            )
            for scorer, questions in (
                (prm, [each.chain for each in interviews]),
                (orm, [each.ends for each in interviews]),
            )
        )
        return [Answers(a.ends, b.ends) for a, b in zip(steps, replies, strict=True)]

    judges = {
        NAIVE: naive,
        "UnifiReward, sessions": sessions,
        OURS: ours,
        "PRM + ORM, naive": naive_pair,
        "PRM + ORM, ours": our_pair,
    }
    return [Method(*each, work) for each, work in zip(judges.items(), works, strict=True)]


class _Session:
    """A session with a KV cache, whose work is counted."""

    def __init__(self, scorer: TransformersScorer, messages: Messages, work: Work) -> None:
        _clear_cache(scorer)
        self._session = scorer.open(messages)
        self._work = work
        work.passes += 1
        work.tokens += len(self._session.state.ids)
        self.answer, self.close = self._session.answer, self._session.close

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        before = self._session.state.ids
        probabilities = self._session.ask(text, labels)
        after = self._session.state.ids
        shared = next(
            (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        self._work.passes += 1
        self._work.tokens += len(after) - min(shared, len(after) - 1)
        return probabilities


def measure(methods: Sequence[Method], size: int, length: int, config: Config) -> dict[str, Cost]:
    """Judge the same rounds with every method, in turn."""
    costs = {method.name: Cost() for method in methods}
    rounds = range(config.repeats + 1)
    for number in track(rounds, f"G {size}, history {length}", unit="rounds"):
        messages, interviews = synthetic_round(config, size, length, number)
        for method in methods:
            passes, tokens = method.work.passes, method.work.tokens
            started = time.perf_counter()
            method.judge(messages, interviews)
            seconds = time.perf_counter() - started
            if number == 0:
                continue  # warm-up
            cost = costs[method.name]
            cost.seconds.append(seconds)
            cost.passes.append(method.work.passes - passes)
            cost.tokens.append(method.work.tokens - tokens)
    return costs


def compare(
    methods: Sequence[Method],
    rounds: Iterator[tuple[Messages, Interviews]],
) -> Difference:
    """Compare the verdicts of the naive method with ours."""
    by_name = {method.name: method for method in methods}
    verdicts = unequal = 0
    largest = 0.0
    for messages, interviews in rounds:
        answers = (by_name[name].judge(messages, interviews) for name in (NAIVE, OURS))
        for first, second in zip(*answers, strict=True):
            for a, b in zip(
                (*first.chain, *first.ends), (*second.chain, *second.ends), strict=True
            ):
                verdicts += 1
                unequal += a.index(max(a)) != b.index(max(b))
                gaps = (abs(math.log(p) - math.log(q)) for p, q in zip(a, b, strict=True))
                largest = max(largest, *gaps)
    return Difference(verdicts, unequal, largest)


# --- rounds ------------------------------------------------------------------------------------


def synthetic_round(
    config: Config, size: int, length: int | None, number: int
) -> tuple[Messages, list[CandidateQuestions]]:
    """Return the judge's prompt and the interviews of a round.

    Args:
        config: Provides the seed, and the history lengths to choose from if `length` is None.
        size: Number of candidates.
        length: Number of utterances of the dialogue.
        number: Number of the round, part of the seed.
    """
    rng = np.random.default_rng([config.seed, size, length or 0, number])
    length = length or int(rng.choice(config.histories))
    utterances = synthetic_utterances(rng, length)
    interviews = []
    for _ in range(size):
        turn = synthetic_turn(rng)
        steps = tuple(ask_about_step(step) for step in turn.reasoning)
        reference = synthetic_reference(rng)
        orders = ((turn.reply, reference), (reference, turn.reply))
        interviews.append(
            CandidateQuestions(steps, tuple(ask_about_replies(*pair) for pair in orders))
        )
    return judge_messages(Dialogue(tuple(utterances))), interviews


# --- helpers -----------------------------------------------------------------------------------


def _local_scorer(registry: Registry, name: str) -> TransformersScorer:
    judge = registry.judge(name)
    if judge is None or not isinstance(judge.scorer, TransformersScorer):
        raise ConfigError(f"{name or 'the default judge'}: only a local judge can be timed")
    return judge.scorer


def _local_pair(registry: Registry, name: str) -> tuple[TransformersScorer, TransformersScorer]:
    judge = registry.judge(name)
    prm, orm = (judge.scorer, judge.reply_scorer) if judge is not None else (None, None)
    if not isinstance(prm, TransformersScorer) or not isinstance(orm, TransformersScorer):
        raise ConfigError(f"{name}: not a local PRM with an ORM")
    return prm, orm


def _clear_cache(scorer: TransformersScorer) -> None:
    """Clear the prefix cache, on the owner thread so that closing sessions finish first."""
    scorer.chat.owner.call(scorer.chat.stored.clear)


def _judge_together(
    scorer: TransformersScorer,
    messages: Messages,
    interviews: Interviews,
    work: Work,
) -> list[Answers]:
    _clear_cache(scorer)
    passes, tokens = scorer.work.passes, scorer.work.tokens
    outcomes = scorer.score_candidates(messages, interviews)
    work.passes += scorer.work.passes - passes
    work.tokens += scorer.work.tokens - tokens
    answers = []
    for outcome in outcomes:
        if isinstance(outcome, CompeerError):
            raise outcome
        answers.append(outcome)
    return answers


def _cost_metrics(costs: dict[str, Cost], about: str) -> Iterator[results.Metric]:
    for name, cost in costs.items():
        values = {
            "seconds": cost.seconds,
            "passes": [float(count) for count in cost.passes],
            "tokens": [float(count) for count in cost.tokens],
        }
        for measure, numbers in values.items():
            yield summarise(measure, numbers).model_copy(update={"of": name, "about": about})


def _difference_metrics(difference: Difference) -> list[results.Metric]:
    about, of = "ours against naive", "UnifiReward"
    values = {
        "unequal verdicts": difference.unequal,
        "largest difference of a log-probability": difference.largest,
    }
    return [
        results.Metric(name=name, value=value, n=difference.verdicts, of=of, about=about)
        for name, value in values.items()
    ]
