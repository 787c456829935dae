"""Speed and memory of the demo: `python -m training benchmark training/configs/benchmark.toml`.

Each is measured several times and reported as median and range:

- seconds from `python app.py` until its page is served, after a warm-up start for the disk cache
- in this process: seconds from Send to the first token, tokens per second of a whole turn, and
  seconds from the reply's last token to the last score
- seconds of a whole turn through `/chat`, over HTTP
- peak memory of the server while it answers

Run it on an otherwise idle machine.
"""

import logging
from pathlib import Path

from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.policy import Policy
from compeer_core.registry import Registry
from compeer_core.unifireward import Judge
from training.benchmark.publishing import GIB, publish, summarise
from training.benchmark.server import chat, running_app, sampled_memory
from training.benchmark.timed_turns import timed_turns, tokens_per_second
from training.common import results
from training.stages import refuse_resume

_log = logging.getLogger(__name__)


FIRST_TURN = "in process, a first message without a picture; long dialogues take longer"
NOTHING_LEFT = (
    "steps are judged while the turn is generated; a reply without a reference is not judged"
)


class Config(FrozenModel):
    """What to measure, and how often."""

    name: str = "benchmark_cpu"
    """Name of the results file."""
    output: Path = results.FOLDER
    """Folder of the results file."""
    root: Path = Path()
    """The checkout; the app's working directory."""
    app: tuple[str, ...] = ("app.py",)
    """Arguments of `python`; host and port are added."""
    models: Path = Path("assets/models.toml")
    """The list of models, relative to `root`. To use another list, pass it in `app` as well."""
    policy: str = ""
    """A policy of that list; empty is the default, as in the app."""
    judge: str = ""
    """A judge of that list; empty is the default."""
    starts: int = Field(default=5, ge=1)
    """Number of timed starts of the app."""
    turns: int = Field(default=20, ge=1)
    """Number of turns timed in this process."""
    http_turns: int = Field(default=5, ge=1)
    """Number of turns timed through `/chat`."""
    seed: int = 0
    """Turn i samples with `seed + i`."""
    messages: tuple[str, ...] = Field(
        default=(
            "I lost my job last month and I cannot tell my family.",
            "My best friend stopped talking to me and I do not know why.",
            "Exams are next week and I lie awake every night.",
        ),
        min_length=1,
    )
    """The seeker's messages, used in rotation."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure, print the table and write the results file."""
    refuse_resume(resume, "a benchmark cannot be resumed")
    registry = Registry.from_toml(config.root / config.models)
    registry.check()
    if dry_run:
        return
    # The app must have exited before turns are timed in this process: both need all cores.
    metrics = _measure_server(config)
    policy, judge = registry.policy(config.policy), registry.judge(config.judge)
    metrics += _measure_turns(config, policy, judge)
    registry.close()
    publish(
        config.output,
        ("torch", "transformers", "gradio"),
        name=config.name,
        title="Speed and memory",
        model=policy.name if judge is None else f"{policy.name} judged by {judge.name}",
        command="python -m training benchmark training/configs/benchmark.toml",
        seed=config.seed,
        metrics=tuple(metrics),
    )


def _measure_server(config: Config) -> list[results.Metric]:
    served = [_seconds_until_served(config, start) for start in range(config.starts + 1)]
    with (
        running_app(config.app, config.root) as server,
        sampled_memory(server.process.pid) as memory,
    ):
        turns = [
            chat(server.url, config.messages[i % len(config.messages)], config.seed + i)
            for i in range(config.http_turns + 1)
        ]
    return [
        summarise("Page served after `python app.py`", served[1:], "s", "warm disk"),
        summarise("Whole turn through `/chat`", turns[1:], "s", "reply and scores, over HTTP"),
        summarise(
            "Resident memory of the server",
            [sample / GIB for sample in memory],
            "GiB",
            "maximum while it answered",
            statistic=max,
        ),
    ]


def _seconds_until_served(config: Config, start: int) -> float:
    with running_app(config.app, config.root) as server:
        _log.info("start %d: page after %.2f s", start, server.seconds_until_served)
        return server.seconds_until_served


def _measure_turns(config: Config, policy: Policy, judge: Judge | None) -> list[results.Metric]:
    records = timed_turns(policy, judge, config.messages, config.turns, config.seed)
    first = [r.first_token_seconds for r in records if r.first_token_seconds is not None]
    metrics = [
        summarise("First token after Send", first, "s", FIRST_TURN),
        summarise(
            "Speed of a whole turn",
            [tokens_per_second(r) for r in records],
            "tokens/s",
            "Send to last token; the judge's work on the steps included",
        ),
    ]
    if judge is not None:
        scoring = [r.scoring_seconds for r in records]
        metrics.append(
            summarise("Last token of the reply to all scores", scoring, "s", NOTHING_LEFT)
        )
        alone = timed_turns(policy, None, config.messages, config.turns, config.seed)
        speeds = [tokens_per_second(r) for r in alone]
        metrics.append(summarise("Speed of a turn without a judge", speeds, "tokens/s"))
    return metrics
