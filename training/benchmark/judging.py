"""What judging costs: `python -m training benchmark judging <config.toml>` (COMPEER, Fig. 5b).

A round is one dialogue with G candidates, each judged on three steps and, in both orders, on its reply.
Compared in one run, on the same rounds:

- *naive*: the conversation is read from its beginning for every verdict, as when a judge is a chat
  model that is called again and again;
- *session*: one conversation for each candidate, what was read is kept from question to question;
- *ours*: `compeer_core.backends.transformers_.prefix_scoring`, three to five passes for all candidates;

for UnifiReward, and for a PRM and an ORM, for which what can be shared is shared too. Every way
judges with the same weights; the PRM and the ORM are two adapters on one base if the list of models
names such a pair, else UnifiReward's own weights take both parts: what is timed does not depend on
what the weights have learnt, except that a wrong draft costs *ours* another pass.

Seconds are medians; each round is judged by all ways in turn, so that whatever else the machine does
slows all of them. Whether all ways of UnifiReward come to the same verdicts is checked on every round.
"""

import datetime
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.backends.protocol import (
    Answers,
    CandidateQuestions,
    Message,
    with_question,
)
from compeer_core.backends.transformers_.prefix_scoring import Work
from compeer_core.backends.transformers_.scoring import TransformersScorer
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue
from compeer_core.errors import CompeerError, ConfigError
from compeer_core.prompts import judge_messages
from compeer_core.registry import Registry
from compeer_core.unifireward import ask_about_replies, ask_about_step
from training.benchmark.made_up_talk import made_up_reference, made_up_turn, made_up_utterances
from training.benchmark.naive import read_anew
from training.common import results
from training.common.progress import track
from training.common.run_directory import versions

_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """Which judge, and on which rounds."""

    models: Path = Path("assets/models.toml")
    """The list of models."""
    judge: str = ""
    """UnifiReward in that list; empty is the default judge."""
    pair: str = ""
    """A PRM and an ORM in that list; empty lets the judge's weights stand in for both."""
    group_sizes: tuple[int, ...] = (1, 4, 8, 16, 32)
    """Candidates of a round. Paper: G = 4."""
    histories: tuple[int, ...] = (2, 10, 20, 40)
    """Utterances of the dialogue."""
    base_group: int = 4
    """The group size at which the histories are compared."""
    base_history: int = 10
    """The history at which the group sizes are compared."""
    repeats: int = Field(default=5, ge=1)
    """Scheduler for each pair of numbers, after one that is not counted."""
    equality_rounds: int = 250
    """Scheduler of `base_group` candidates on which naive verdicts and ours are compared."""
    output: Path = results.FOLDER
    """Folder of the results file."""
    name: str = "judging_cpu"
    command: str = "python -m training benchmark judging training/configs/benchmark_judging.toml"
    """Recorded with the numbers."""
    seed: int = 0


@dataclass(frozen=True)
class Way:
    """A way to judge a round."""

    name: str
    judge: Callable[[Sequence[Message], Sequence[CandidateQuestions]], list[Answers]]
    work: Work


@dataclass
class Measured:
    """What one way has cost, round by round."""

    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """How far two ways are apart."""

    verdicts: int
    """Verdicts and preferences compared."""
    unequal: int
    largest: float
    """Largest difference of a label's log-probability."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure and write the results file; a dry run only loads the judges."""
    if resume is not None:
        raise ConfigError("a benchmark cannot be resumed: begin it again")
    registry = Registry.from_toml(config.models)
    unified = _in_process(registry, config.judge)
    pair = _pair(registry, config.pair) if config.pair else (unified, unified)
    if dry_run:
        return
    ways = ways_to_judge(unified, pair)
    sizes = dict.fromkeys(
        [
            *((size, config.base_history) for size in config.group_sizes),
            *((config.base_group, length) for length in config.histories),
        ]
    )
    metrics: list[results.Metric] = []
    for size, length in sizes:
        found = measure(ways, size, length, config)
        metrics += list(_lines(found, f"{size} candidates, {length} utterances"))
    rounds = track(range(config.equality_rounds), "compared with naive", unit="rounds")
    difference = compare(ways, (round_of(config, config.base_group, None, n) for n in rounds))
    metrics += _equality(difference)
    result = results.Result(
        name=config.name,
        title="Judging a round: seconds, forward passes, tokens read",
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        model=", ".join(
            name for name in (config.judge or registry.default_name("judge"), config.pair) if name
        ),
        label_source="timed",
        command=config.command,
        versions=versions(("torch", "transformers")),
        seed=config.seed,
        machine=platform.processor() or platform.machine(),
        interval="fastest to slowest round",
        metrics=tuple(metrics),
    )
    results.save(result, config.output)
    _log.info("%s", results.render(result))


def ways_to_judge(
    unified: TransformersScorer, pair: tuple[TransformersScorer, TransformersScorer]
) -> list[Way]:
    """Return all ways; each counts its own work."""
    process, outcome = pair
    works = [Work() for _ in range(5)]

    def naive(messages: Sequence[Message], held: Sequence[CandidateQuestions]) -> list[Answers]:
        return [naively(unified, messages, one, works[0]) for one in held]

    def sessions(messages: Sequence[Message], held: Sequence[CandidateQuestions]) -> list[Answers]:
        return [in_a_session(unified, messages, one, works[1]) for one in held]

    def ours(messages: Sequence[Message], held: Sequence[CandidateQuestions]) -> list[Answers]:
        _forget(unified)
        return _counted(unified, messages, held, works[2])

    def apart(messages: Sequence[Message], held: Sequence[CandidateQuestions]) -> list[Answers]:
        answers = []
        for one in held:
            steps = naively(process, messages, CandidateQuestions((), one.chain), works[3])
            reply = naively(outcome, messages, CandidateQuestions((), one.ends), works[3])
            answers.append(Answers(steps.ends, reply.ends))
        return answers

    def apart_sharing(messages: Sequence[Message], held: Sequence[CandidateQuestions]) -> list[Answers]:
        # Two models: what the PRM has read is of no use to the ORM.
        _forget(process)
        steps = _counted(process, messages, [CandidateQuestions((), one.chain) for one in held], works[4])
        _forget(outcome)
        replies = _counted(outcome, messages, [CandidateQuestions((), one.ends) for one in held], works[4])
        return [Answers(a.ends, b.ends) for a, b in zip(steps, replies, strict=True)]

    names = (
        "UnifiReward, naive",
        "UnifiReward, sessions",
        "UnifiReward, ours",
        "PRM + ORM, naive",
        "PRM + ORM, ours",
    )
    judges = (naive, sessions, ours, apart, apart_sharing)
    return [Way(*each) for each in zip(names, judges, works, strict=True)]


def naively(
    scorer: TransformersScorer, messages: Sequence[Message], interview: CandidateQuestions, work: Work
) -> Answers:
    """Judge one candidate; everything is read from the beginning for every question."""
    asked = list(messages)
    chain: list[tuple[float, ...]] = []
    for question in interview.chain:
        asked = with_question(asked, question.text)
        chain.append(read_anew(scorer, asked, question, work))
        likeliest = max(range(len(question.labels)), key=chain[-1].__getitem__)
        asked = [*asked, Message("assistant", (question.labels[likeliest],))]
    ends = [
        read_anew(scorer, with_question(asked, question.text), question, work)
        for question in interview.ends
    ]
    return Answers(tuple(chain), tuple(ends))


def in_a_session(
    scorer: TransformersScorer, messages: Sequence[Message], interview: CandidateQuestions, work: Work
) -> Answers:
    """Judge one candidate in one conversation that keeps what was read."""
    _forget(scorer)
    session = scorer.open(messages)
    read = len(session.state.ids)
    work.passes += 1
    work.tokens += read
    chain: list[tuple[float, ...]] = []
    ends: list[tuple[float, ...]] = []
    for place, question in enumerate((*interview.chain, *interview.ends)):
        before = session.state.ids
        given = session.ask(question.text, question.labels)
        shared = next(
            (n for n, (a, b) in enumerate(zip(before, session.state.ids, strict=False)) if a != b),
            min(len(before), len(session.state.ids)),
        )
        work.passes += 1
        work.tokens += len(session.state.ids) - min(shared, len(session.state.ids) - 1)
        if place < len(interview.chain):
            chain.append(given)
            session.answer(question.labels[max(range(len(given)), key=given.__getitem__)])
        else:
            ends.append(given)
    session.close()
    return Answers(tuple(chain), tuple(ends))


def measure(ways: Sequence[Way], size: int, length: int, config: Config) -> dict[str, Measured]:
    """Judge the same rounds in every way, one after another."""
    found = {way.name: Measured() for way in ways}
    rounds = range(config.repeats + 1)
    for number in track(rounds, f"G {size}, history {length}", unit="rounds"):
        messages, held = round_of(config, size, length, number)
        for way in ways:
            passes, tokens = way.work.passes, way.work.tokens
            begun = time.perf_counter()
            way.judge(messages, held)
            seconds = time.perf_counter() - begun
            if number == 0:
                continue  # warms caches and allocators
            found[way.name].seconds.append(seconds)
            found[way.name].passes.append(way.work.passes - passes)
            found[way.name].tokens.append(way.work.tokens - tokens)
    return found


def compare(
    ways: Sequence[Way], rounds: Iterator[tuple[Sequence[Message], Sequence[CandidateQuestions]]]
) -> Difference:
    """Compare naive verdicts with ours, round by round."""
    naive, ours = (
        next(way for way in ways if way.name == name)
        for name in ("UnifiReward, naive", "UnifiReward, ours")
    )
    verdicts = unequal = 0
    largest = 0.0
    for messages, held in rounds:
        for one, other in zip(naive.judge(messages, held), ours.judge(messages, held), strict=True):
            for a, b in zip((*one.chain, *one.ends), (*other.chain, *other.ends), strict=True):
                verdicts += 1
                unequal += a.index(max(a)) != b.index(max(b))
                gaps = (abs(math.log(p) - math.log(q)) for p, q in zip(a, b, strict=True))
                largest = max(largest, *gaps)
    return Difference(verdicts, unequal, largest)


# --- rounds ------------------------------------------------------------------------------------


def round_of(
    config: Config, size: int, length: int | None, number: int
) -> tuple[Sequence[Message], list[CandidateQuestions]]:
    """Return what a judge reads before the first question, and the interviews of a round.

    Args:
        config: The seed; and the histories, one of which is drawn if `length` is None.
        size: Candidates.
        length: Utterances of the dialogue.
        number: Which round: texts are drawn by it.
    """
    rng = np.random.default_rng([config.seed, size, length or 0, number])
    length = length or int(rng.choice(config.histories))
    said = made_up_utterances(rng, length)
    interviews = []
    for _ in range(size):
        turn = made_up_turn(rng)
        steps = tuple(ask_about_step(step) for step in turn.reasoning)
        reference = made_up_reference(rng)
        orders = ((turn.reply, reference), (reference, turn.reply))
        interviews.append(CandidateQuestions(steps, tuple(ask_about_replies(*pair) for pair in orders)))
    return judge_messages(Dialogue(tuple(said))), interviews


# --- the rest ----------------------------------------------------------------------------------


def _in_process(registry: Registry, name: str) -> TransformersScorer:
    judge = registry.judge(name)
    if judge is None or not isinstance(judge.scorer, TransformersScorer):
        raise ConfigError(f"{name or 'the default judge'}: only a judge in this process is timed")
    return judge.scorer


def _pair(registry: Registry, name: str) -> tuple[TransformersScorer, TransformersScorer]:
    judge = registry.judge(name)
    scorers = (judge.scorer, judge.reply_scorer) if judge is not None else (None, None)
    first, second = scorers
    if not isinstance(first, TransformersScorer) or not isinstance(second, TransformersScorer):
        raise ConfigError(f"{name}: not a PRM and an ORM in this process")
    return first, second


def _forget(scorer: TransformersScorer) -> None:
    """Forget earlier rounds. On the owner thread, behind the sessions that are still closing."""
    scorer.chat.owner.call(scorer.state_cache.clear)


def _counted(
    scorer: TransformersScorer,
    messages: Sequence[Message],
    held: Sequence[CandidateQuestions],
    work: Work,
) -> list[Answers]:
    passes, tokens = scorer.work.passes, scorer.work.tokens
    found = scorer.score_candidates(messages, held)
    work.passes += scorer.work.passes - passes
    work.tokens += scorer.work.tokens - tokens
    answers = []
    for one in found:
        if isinstance(one, CompeerError):
            raise one
        answers.append(one)
    return answers


def _lines(found: dict[str, Measured], about: str) -> Iterator[results.Metric]:
    for name, measured in found.items():
        values = {
            "seconds": measured.seconds,
            "passes": [float(count) for count in measured.passes],
            "tokens": [float(count) for count in measured.tokens],
        }
        for measure_name, numbers in values.items():
            yield results.Metric(
                name=measure_name,
                value=statistics.median(numbers),
                low=min(numbers),
                high=max(numbers),
                n=len(numbers),
                of=name,
                about=about,
            )


def _equality(difference: Difference) -> list[results.Metric]:
    about, of = "ours against naive", "UnifiReward"
    return [
        results.Metric(
            name="unequal verdicts",
            value=difference.unequal,
            n=difference.verdicts,
            of=of,
            about=about,
        ),
        results.Metric(
            name="largest difference of a log-probability",
            value=difference.largest,
            n=difference.verdicts,
            of=of,
            about=about,
        ),
    ]
