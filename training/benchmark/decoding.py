"""Speed and quality of decoding, one turn at a time: `python -m training benchmark decoding <config.toml>`.

Three forward passes for the same weights and adapter are compared in one run, turn by turn:

- *generate*: transformers' own
- *fused step*: `compeer_core.backends.transformers_.fused_step` with the weights as they are, the
  default
- *compressed*: `--quantize int8`, which reads compressed copies (`packed_step`)

All are driven by `generate`, greedily. Their likelihoods of held-out turns are measured token by token,
so that every pass takes the steps that it takes in decoding. Run it on an otherwise idle machine.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from transformers import LogitsProcessor, StoppingCriteria

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_ import ChatModel
from compeer_core.backends.transformers_.sequence_state import SequenceState
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue, Speaker, Utterance
from compeer_core.errors import ConfigError
from compeer_core.model_pool import Lease, ModelPool, Quantization
from compeer_core.prompts import policy_messages
from training.benchmark.publishing import machine, publish, summarise
from training.cer.written import Config as Written
from training.cer.written import written_rows
from training.common import results
from training.common.progress import track
from training.data.pictures import Pictures
from training.stages import refuse_resume

PLAIN, FUSED, COMPRESSED = "generate", "fused step", "compressed"
PASSES: dict[str, Quantization | None] = {PLAIN: None, FUSED: None, COMPRESSED: "int8"}


class Config(FrozenModel):
    """The model, and how often to measure."""

    base: Path = Path("assets/checkpoints/compeer-small-base")
    adapter: Path | None = Path("assets/checkpoints/compeer-small")
    written: Path = Path("assets/cer/plain.jsonl.gz")
    """Dialogues; the turns of their test split are the prompts and the held-out turns."""
    turns: int = Field(default=12, ge=1)
    """Turns to generate, after one that is not timed."""
    tokens: int = Field(default=128, ge=2)
    """Most tokens of a generated turn."""
    likelihoods: int = Field(default=50, ge=1)
    """Held-out turns whose likelihood is measured."""
    seed: int = Field(default=0, ge=0)
    """Draws the turns."""
    output: Path = results.FOLDER
    """Folder of the results file."""
    name: str = "decoding_cpu"


@dataclass
class _Times:
    """What one pass generated, turn by turn."""

    first: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Measure, print the table and write the results file; a dry run only draws the turns."""
    refuse_resume(resume, "a benchmark cannot be resumed")
    count = max(config.turns, config.likelihoods)
    held_out = _held_out(config, count)
    if dry_run:
        return
    with _loaded(config) as leases:
        times = _timed(config, leases, [messages for messages, _ in held_out[: config.turns]])
        losses = {
            name: [
                _loss(lease, messages, turn)
                for messages, turn in track(held_out[: config.likelihoods], f"NLL: {name}")
            ]
            for name, lease in leases.items()
            if name != FUSED
        }
    publish(
        config.output,
        ("torch", "transformers"),
        name=config.name,
        title="Decoding one turn at a time",
        model=config.base.name + (f"+{config.adapter.name}" if config.adapter else ""),
        command="python -m training benchmark decoding training/configs/benchmark_decoding.toml",
        seed=config.seed,
        machine=f"{machine()}, {torch.backends.cpu.get_cpu_capability()}",
        metrics=tuple(_metrics(times, losses)),
    )


def _held_out(config: Config, count: int) -> list[tuple[list[Message], str]]:
    """Draw turns with the messages before them."""
    rows = [
        row
        for row in written_rows(Written(written=config.written, output=config.output))
        if row.case.split == "test"
    ]
    if len(rows) < count:
        raise ConfigError(f"{config.written}: {len(rows)} turns in the test split, {count} needed")
    order = np.random.default_rng(config.seed).permutation(len(rows))[:count]
    pictures = Pictures(None, None)
    return [
        (list(policy_messages(pictures.dialogue(row.case), "trained")), row.first.turn or "")
        for row in (rows[place] for place in order.tolist())
    ]


@contextmanager
def _loaded(config: Config) -> Iterator[dict[str, Lease]]:
    """Load the weights once per pass."""
    leases: dict[str, Lease] = {}
    try:
        for name, quantize in PASSES.items():
            leases[name] = ModelPool().lease(str(config.base), config.adapter, quantize, "cpu")
        plain = leases[PLAIN].chat
        plain.owner.call(plain.model.float)  # conversion restores transformers' own pass
        yield leases
    finally:
        for lease in leases.values():
            lease.release()


def _timed(
    config: Config, leases: dict[str, Lease], prompts: Sequence[list[Message]]
) -> dict[str, _Times]:
    times = {name: _Times() for name in leases}
    opening = policy_messages(Dialogue((Utterance(Speaker.SEEKER, "Hello."),)), "trained")
    for lease in leases.values():
        _generated(lease, opening, config.tokens)
    for messages in track(prompts, "turns"):
        for name, lease in leases.items():
            tokens, seconds = _generated(lease, messages, config.tokens)
            own = times[name]
            own.turns.append(tokens)
            own.first.append(seconds[0])
            own.speeds.append((len(tokens) - 1) / (seconds[-1] - seconds[0]))
    return times


class _Clock(StoppingCriteria):
    """Notes when each token arrives, and ends the turn."""

    def __init__(self, chat: ChatModel) -> None:
        self._ends = chat.end_tokens
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self._start = time.perf_counter()

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        self.tokens.append(int(input_ids[0, -1]))
        self.seconds.append(time.perf_counter() - self._start)
        return torch.tensor([self.tokens[-1] in self._ends])


def _generated(
    lease: Lease, messages: Sequence[Message], tokens: int
) -> tuple[list[int], list[float]]:
    """Return the tokens of a turn, and when each arrived."""
    chat = lease.chat

    def generate() -> _Clock:
        state = SequenceState(chat.encode(messages), lease.adapter)
        clock = _Clock(chat)
        chat.run(state, tokens, criteria=[clock])
        return clock

    clock = chat.owner.call(generate)
    return clock.tokens, clock.seconds


class _Written(LogitsProcessor):
    """Lets only the next token of a given turn pass, and sums its negative log-likelihood."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter(tokens)
        self.loss = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = next(self._tokens)
        self.loss -= float(torch.log_softmax(scores[0], -1)[token])
        scores.fill_(-math.inf)[0, token] = 0.0
        return scores


def _loss(lease: Lease, messages: Sequence[Message], turn: str) -> tuple[float, int]:
    """Return the NLL of a turn in nats, and its number of tokens."""
    chat = lease.chat

    def measure() -> tuple[float, int]:
        tokens = [*chat.continuation(turn), chat.tokenizer.eos_token_id]
        written = _Written(tokens)
        chat.run(SequenceState(chat.encode(messages), lease.adapter), len(tokens), [written])
        return written.loss, len(tokens)

    return chat.owner.call(measure)


def _metrics(
    times: dict[str, _Times], losses: dict[str, list[tuple[float, int]]]
) -> Iterator[results.Metric]:
    for name, own in times.items():
        yield summarise(f"Speed, {name}", own.speeds, "tokens/s", "from the first token on")
    for name, own in times.items():
        yield summarise(f"First token, {name}", own.first, "s", "the prompt is read in 32 bits")
    for name in (FUSED, COMPRESSED):
        turns = zip(times[PLAIN].turns, times[name].turns, strict=True)
        equal = sum(ours == theirs for ours, theirs in turns)
        yield results.Metric(
            name=f"Turns equal to those of {PLAIN}, {name}",
            value=equal,
            n=len(times[name].turns),
            note="every token, greedy",
        )
    for name, pairs in losses.items():
        tokens = sum(count for _, count in pairs)
        yield results.Metric(
            name=f"NLL of held-out turns, {name}",
            value=sum(loss for loss, _ in pairs) / tokens,
            n=len(pairs),
            unit="nats/token",
        )
    exact, rough = (sum(loss for loss, _ in losses[name]) for name in (PLAIN, COMPRESSED))
    yield results.Metric(
        name=f"Relative difference of the NLL, {COMPRESSED}",
        value=100 * (rough / exact - 1),
        n=len(losses[PLAIN]),
        unit="%",
    )
