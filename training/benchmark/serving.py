"""Several seekers at once: `python -m training benchmark serving <config.toml>`.

The app runs in a process of its own. Scripted seekers chat with it over HTTP, each from an address of
its own. A seeker sends its next message as soon as it has the reply (a closed loop without thinking
time). Conversation i has the same messages and seeds with any number of seekers at once.

Every message of a conversation contains a word that no other conversation has. Its appearance in
another seeker's reply or steps is cross-talk.

Run it on an otherwise idle machine. The seekers use the same processor as the server, but little of it.
"""

import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gradio_client import Client
from pydantic import Field, field_validator

from compeer_core.config import FrozenModel
from compeer_core.errors import BackendError, ConfigError
from compeer_core.registry import Registry
from training.benchmark.publishing import GIB, publish, summarise
from training.benchmark.server import Server, ask, connect, running_app, sampled_memory
from training.common import results
from training.stages import refuse_resume

Statistic = Callable[[Sequence[float]], float]
_log = logging.getLogger(__name__)

SYLLABLES = ("ba", "ki", "lo", "mu", "ne", "ri", "sa", "tu")
MOST_CONVERSATIONS = len(SYLLABLES) ** 2


class Config(FrozenModel):
    """The app, and how many seekers chat with it for how long."""

    name: str = "serving_cpu"
    """Name of the results file."""
    output: Path = results.FOLDER
    """Folder of the results file."""
    root: Path = Path()
    """The checkout; the app's working directory."""
    app: tuple[str, ...] = ("app.py", "--forwarded-allow-ips", "127.0.0.1")
    """Arguments of `python`; host and port are added. The app must trust forwarded addresses from here,
    since it limits the calls of one address."""
    models: Path = Path("assets/models.toml")
    """The list of models, relative to `root`, to name them. To use another list, pass it in `app` as well."""
    messages: Path = Path("training/configs/benchmark_serving.txt")
    """The seekers' messages, one per line."""
    seekers: tuple[int, ...] = (1, 4, 8, 16)
    """Numbers of seekers at once, beginning with 1."""
    turns: int = Field(default=2, ge=1)
    """Turns of a conversation."""
    conversations: int = Field(default=4, ge=1, le=MOST_CONVERSATIONS)
    """Fewest conversations per number of seekers; with fewer seekers, each has several in a row."""
    long_turns: int = Field(default=12, ge=2)
    """Turns of the long conversation of one seeker alone."""
    repeats: int = Field(default=1, ge=1)
    """How often everything is measured."""
    seed: int = Field(default=0, ge=0)
    """Turn t of conversation i samples with `seed + 1000 * i + t`."""

    @field_validator("seekers")
    @classmethod
    def _begins_with_one(cls, seekers: tuple[int, ...]) -> tuple[int, ...]:
        if seekers[:1] != (1,) or sorted(set(seekers)) != list(seekers):
            raise ValueError("must begin with 1 and ascend")
        if seekers[-1] > MOST_CONVERSATIONS:
            raise ValueError(f"must be at most {MOST_CONVERSATIONS}")
        return seekers


@dataclass(frozen=True)
class Turn:
    """One turn as its seeker saw it."""

    conversation: int
    seconds: float
    """From Send to the whole answer."""
    text: str = ""
    """The answer, with its steps; empty after an error."""
    reply: str = ""
    first_token_seconds: float | None = None
    """From Send to the first token, waiting included; None if no model was called."""
    tokens: int = 0


@dataclass(frozen=True)
class Load:
    """What a number of seekers measured at once."""

    seekers: int
    seconds: float
    """Until all conversations had ended."""
    turns: Sequence[Turn]
    memory: Sequence[int]
    """Samples of the server's resident bytes."""

    @property
    def answered(self) -> list[Turn]:
        """The turns without an error."""
        return [turn for turn in self.turns if turn.text]

    @property
    def turns_per_minute(self) -> float:
        return 60 * len(self.answered) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(turn.tokens for turn in self.turns) / self.seconds


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure, print the table and write the results file; a dry run only reads the files."""
    refuse_resume(resume, "a benchmark cannot be resumed")
    registry = Registry.from_toml(config.root / config.models)
    registry.check()
    lines = config.messages.read_text(encoding="utf-8").split("\n")
    script = [line for line in lines if line]
    if not script:
        raise ConfigError(f"{config.messages}: there are no messages")
    if dry_run:
        return
    loads: list[Load] = []
    long: list[Sequence[Turn]] = []
    with running_app(config.app, config.root) as server:
        warm_up = _conversation(connect(server.url), 0, script, 1, config.seed)
        if not warm_up[0].reply:
            raise BackendError("the app did not reply to the first message")
        for _ in range(config.repeats):
            loads += [_load(server, config, script, seekers) for seekers in config.seekers]
            long.append(
                _conversation(connect(server.url), 0, script, config.long_turns, config.seed)
            )
    judge = registry.default_name("judge")
    publish(
        config.output,
        ("torch", "transformers", "gradio"),
        name=config.name,
        title="Several seekers at once",
        model=registry.default_name("policy") + (f" judged by {judge}" if judge else ""),
        command="python -m training benchmark serving training/configs/benchmark_serving.toml",
        seed=config.seed,
        gate="off" if "--no-gate" in config.app else "on",
        metrics=(*metrics_of(loads), *_late_turn(long)),
    )


def secret_word(conversation: int) -> str:
    """Return the word of a conversation; none contains another.

    Example:
        >>> secret_word(0), secret_word(9)
        ('Zobabax', 'Zokikix')
    """
    first, second = divmod(conversation, len(SYLLABLES))
    return f"Zo{SYLLABLES[first]}{SYLLABLES[second]}x"


def has_cross_talk(turn: Turn) -> bool:
    """Whether an answer contains the word of another conversation."""
    text = turn.text.casefold()
    others = (secret_word(i) for i in range(MOST_CONVERSATIONS) if i != turn.conversation)
    return any(word.casefold() in text for word in others)


def has_own_word(turn: Turn) -> bool:
    """Whether an answer contains the word of its conversation."""
    return secret_word(turn.conversation).casefold() in turn.text.casefold()


def metrics_of(loads: Sequence[Load]) -> Iterator[results.Metric]:
    """Return the rows of the table, measure by measure."""
    of = {
        load.seekers: [other for other in loads if other.seekers == load.seekers] for load in loads
    }
    turns = {seekers: [turn for load in of[seekers] for turn in load.turns] for seekers in of}

    def each(
        name: str, values: Callable[[int], Sequence[float]], unit: str, note: str, by: Statistic
    ) -> Iterator[results.Metric]:
        for seekers in of:
            if numbers := values(seekers):
                who = f"{seekers} seeker{'s' if seekers > 1 else ''}"
                yield _summary(f"{name}, {who}", numbers, unit, note, by)

    def count(name: str, holds: Callable[[Turn], bool], note: str) -> Iterator[results.Metric]:
        for metric in each(name, lambda s: [float(holds(t)) for t in turns[s]], "", note, sum):
            yield metric.model_copy(update={"low": None, "high": None})

    def ratios(seekers: int) -> list[float]:
        if seekers == 1:
            return []
        pairs = zip(of[seekers], of[1], strict=True)
        return [load.turns_per_minute / alone.turns_per_minute for load, alone in pairs]

    def first(seekers: int) -> list[float]:
        times = [turn.first_token_seconds for turn in turns[seekers]]
        return [seconds for seconds in times if seconds is not None]

    def whole(seekers: int) -> list[float]:
        return [turn.seconds for load in of[seekers] for turn in load.answered]

    def memory(seekers: int) -> list[float]:
        return [sample / GIB for load in of[seekers] for sample in load.memory]

    runs = "n: runs; all turns without an error"
    yield from each(
        "Turns per minute", lambda s: [load.turns_per_minute for load in of[s]], "", runs, _median
    )
    yield from each("Throughput relative to 1 seeker", ratios, "x", "turns per minute", _median)
    yield from each(
        "Speed over all seekers",
        lambda s: [load.tokens_per_second for load in of[s]],
        "tokens/s",
        "rejected draws included",
        _median,
    )
    waiting = "waiting and HTTP included; n: turns"
    yield from each("First token after Send, median", first, "s", waiting, _median)
    yield from each("First token after Send, p95", first, "s", waiting, _p95)
    yield from each("Whole turn, median", whole, "s", "over HTTP; n: turns", _median)
    yield from each("Whole turn, p95", whole, "s", "over HTTP; n: turns", _p95)
    yield from count("Errors", lambda turn: not turn.text, "calls that failed; n: turns")
    yield from count(
        "Turns without a reply", lambda t: bool(t.text and not t.reply), "withheld; n: turns"
    )
    yield from count("Cross-talk", has_cross_talk, "answers with another seeker's word; n: turns")
    yield from count("Own word", has_own_word, "answers with the seeker's own word; n: turns")
    yield from each(
        "Resident memory of the server", memory, "GiB", "maximum; n: samples", lambda v: max(v)
    )


def _summary(
    name: str, values: Sequence[float], unit: str, note: str, by: Statistic
) -> results.Metric:
    """Return a row; a single measurement has no range."""
    metric = summarise(name, values, unit, note, statistic=by)
    return metric if len(values) > 1 else metric.model_copy(update={"low": None, "high": None})


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _p95(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.95))


def _late_turn(conversations: Sequence[Sequence[Turn]]) -> Iterator[results.Metric]:
    pairs = [
        (early.first_token_seconds, late.first_token_seconds)
        for early, *_, late in conversations
        if early.first_token_seconds and late.first_token_seconds
    ]
    if not pairs:
        return
    last = len(conversations[0])
    note = "one seeker alone; n: conversations"
    rows = {
        "First token after Send, turn 1": ([early for early, _ in pairs], "s"),
        f"First token after Send, turn {last}": ([late for _, late in pairs], "s"),
        f"First token, turn {last} relative to turn 1": ([b / a for a, b in pairs], "x"),
    }
    for name, (values, unit) in rows.items():
        yield _summary(name, values, unit, note, _median)


# --- the seekers ---------------------------------------------------------------------------------


def _load(server: Server, config: Config, script: Sequence[str], seekers: int) -> Load:
    numbers = range(max(seekers, config.conversations))
    clients = [connect(server.url, f"10.0.0.{number + 1}") for number in numbers]
    with (
        sampled_memory(server.process.pid, every_seconds=0.25) as memory,
        ThreadPoolExecutor(seekers) as pool,
    ):
        started = time.monotonic()
        jobs = [
            pool.submit(_conversation, client, number, script, config.turns, config.seed)
            for number, client in enumerate(clients)
        ]
        turns = [turn for job in jobs for turn in job.result()]
        load = Load(seekers, time.monotonic() - started, turns, memory)
    _log.info("%d seekers: %.1f turns a minute", seekers, load.turns_per_minute)
    return load


def _conversation(
    client: Client, conversation: int, script: Sequence[str], turns: int, seed: int
) -> list[Turn]:
    """Hold a conversation. A message without a reply is left out of the history."""
    history: list[dict[str, str]] = []
    taken: list[Turn] = []
    for number in range(turns):
        line = script[(conversation * turns + number) % len(script)]
        message = f"{line} I have told only {secret_word(conversation)}."
        started = time.monotonic()
        try:
            answer = ask(client, message, history, seed + 1000 * conversation + number)
        except Exception as error:  # noqa: BLE001  (an error of any kind is counted)
            _log.warning("a turn of conversation %d failed: %s", conversation, error)
            taken.append(Turn(conversation, time.monotonic() - started))
            continue
        told = answer.turn
        early = told["first_token_seconds"]
        reply = told["reply"]
        taken.append(
            Turn(
                conversation,
                answer.seconds,
                json.dumps(told, ensure_ascii=False),
                reply,
                # The server counts from the end of the queue; the seeker waits from Send on.
                None if early is None else answer.seconds - (told["seconds"] - early),
                told["tokens"],
            )
        )
        if reply:
            history += [
                {"role": "user", "content": message},
                {"role": "assistant", "content": reply},
            ]
    return taken
