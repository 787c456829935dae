"""Generates a policy's answers to histories in batches, with a seed per answer.

Answers can be stored in a file, from which an interrupted evaluation resumes. Answers with a forced strategy are
generated one by one through `compeer_core.policy.Policy`, as on the page: its label is written into the turn.

The gate of `compeer_core.gate` is off unless a policy turns it on: an evaluation measures what a model writes,
and the page what a person sees. Results state it (`gate_state`).
"""

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, Field

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_ import TransformersBackend
from compeer_core.backends.transformers_.batch_generation import Prompt, Turn, generate_turns
from compeer_core.config import FrozenModel
from compeer_core.consistency import Followed, carries_out
from compeer_core.dialogue import Dialogue
from compeer_core.gate import faults_of, previous_reply
from compeer_core.model_pool import Lease, ModelPool
from compeer_core.policy import Controls, Policy, Style
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import TurnFinished, read
from compeer_core.turn import FRESH_DRAWS, draw_seed
from training.common.fingerprints import digest, fingerprint
from training.common.progress import track
from training.common.run_directory import versions
from training.common.threads import use_all_threads
from training.evaluation.answer_store import AnswerStore

_LIBRARIES = ("torch", "transformers")


class PolicySource(FrozenModel):
    """A policy to evaluate."""

    name: str = Field(pattern=r"^[\w.\-]+$")
    source: str
    """Checkpoint folder or Hub ID."""
    adapter: Path | None = None
    style: Style = "trained"
    system_prompt: str = Field(default="", exclude_if=lambda prompt: not prompt)
    """The system message in the style `trained`."""
    temperature: float | None = Field(default=None, ge=0)
    """Replaces the temperature at which an evaluation samples; greedy decoding stays greedy."""
    exact_quotations: bool = False
    """Whether reasoning steps can quote only what the seeker wrote."""
    fresh_sentences: bool = Field(default=False, exclude_if=lambda is_on: not is_on)
    """Whether a reply can contain no short sentence that the supporter has said before."""
    strategy_openings: dict[str, str] = Field(default={}, exclude_if=lambda words: not words)
    """As in `models.toml`: first words of the strategy step where a strategy is forced."""
    gate: bool = Field(default=False, exclude_if=lambda is_on: not is_on)
    """Whether answers that may not be shown are drawn again, as on the page. If every draw is rejected, the
    answer is empty. Greedy answers are not drawn again."""


Named = TypeVar("Named", bound=PolicySource)


def _names_differ(policies: tuple[Named, ...]) -> tuple[Named, ...]:
    names = [policy.name for policy in policies]
    if len({*names}) < len(names):
        raise ValueError(f"two policies have the same name: {', '.join(names)}")
    return policies


Policies = Annotated[tuple[Named, ...], AfterValidator(_names_differ)]
"""Policies with different names."""


@dataclass(frozen=True)
class AnswerRequest:
    """A history to answer."""

    dialogue: Dialogue
    seeds: tuple[int, ...]
    """An answer is sampled with each of them."""
    language: str = "en"
    strategy: str | None = None
    """The strategy to force. `Turn.ids` of such an answer is empty."""
    draws: int = 1
    """How often an answer is drawn at most until its reply shows the forced strategy (`carries_out`). If none does,
    the first counts. Greedy answers are drawn once."""


class Answerer:
    """A loaded policy."""

    def __init__(self, policy: PolicySource, lease: Lease, at_once: int) -> None:
        self._policy = policy
        self._lease = lease
        self._at_once = at_once

    @functools.cached_property
    def _identity(self) -> list[Any]:
        """Everything answers depend on, besides sampling and prompts."""
        policy, device = self._policy, str(self._lease.chat.model.device)
        paths = [Path(policy.source), policy.adapter]
        weights = [fingerprint(path) for path in paths if path is not None and path.exists()]
        names = [policy.source, str(policy.adapter), policy.style]
        return [*names, weights, device, versions(_LIBRARIES)]

    def answers(
        self,
        requests: Iterable[AnswerRequest],
        sampling: Sampling,
        total: int | None = None,
        stored: Path | None = None,
    ) -> Iterator[tuple[Turn, ...]]:
        """Yield the answers to each request, one per seed, in order.

        Args:
            requests: Consumed lazily, so that not all images are in memory at once.
            sampling: Sampling settings; the seed is ignored.
            total: Number of requests, for the progress display.
            stored: File to store answers in. Answers already there are reused if policy, prompts and
                sampling are the same. None stores nothing.

        Raises:
            CompeerError: The policy cannot process one of the histories.
        """
        if self._policy.temperature is not None and sampling.temperature > 0:
            sampling = replace(sampling, temperature=self._policy.temperature)
        sampling = replace(
            sampling,
            exact_quotations=self._policy.exact_quotations,
            fresh_sentences=self._policy.fresh_sentences,
        )
        answers = self._generate(
            requests, sampling, None if stored is None else AnswerStore(stored)
        )
        return track(answers, self._policy.name, total=total, unit="histories")

    def _generate(
        self, requests: Iterable[AnswerRequest], sampling: Sampling, store: AnswerStore | None
    ) -> Iterator[tuple[Turn, ...]]:
        for batch in self._batches(requests):
            turns = self._batch_answers(batch, sampling, store)
            if self._policy.gate:
                turns = self._gated(batch, turns, sampling, store)
            yield from turns

    def _prompt(self, request: AnswerRequest) -> Prompt:
        style, reserved = self._policy.style, self._lease.chat.reserved
        messages = policy_messages(
            request.dialogue,
            style,
            request.language,
            reserved,
            system_prompt=self._policy.system_prompt,
        )
        return Prompt(messages, request.seeds)

    def _batch_answers(
        self, batch: Sequence[AnswerRequest], sampling: Sampling, store: AnswerStore | None
    ) -> Sequence[tuple[Turn, ...]]:
        """Take the answers from the store, or generate them."""
        if store is None:
            return self._generate_batch(batch, sampling)
        openings = self._policy.strategy_openings
        forced = [[each.strategy, each.draws, openings] for each in batch]
        key = digest([self._identity, repr(sampling), repr([*map(self._prompt, batch)]), forced])
        turns = store.take(key)
        if turns is None:
            turns = self._generate_batch(batch, sampling)
            store.put(key, turns)
        return turns

    def _gated(
        self,
        batch: Sequence[AnswerRequest],
        turns: Sequence[tuple[Turn, ...]],
        sampling: Sampling,
        store: AnswerStore | None,
    ) -> list[tuple[Turn, ...]]:
        """Draw rejected answers again, as `take_turn` does; empty the text of those that stay rejected."""
        answers = {
            (place, number): turn
            for place, of_prompt in enumerate(turns)
            for number, turn in enumerate(of_prompt)
        }

        def rejected() -> list[tuple[int, int]]:
            return [
                (place, number)
                for (place, number), turn in answers.items()
                if faults_of(read(turn.text), previous_reply(batch[place].dialogue))
            ]

        for draw in range(1, FRESH_DRAWS + 1 if sampling.temperature > 0 else 1):
            places = rejected()
            if not places:
                break
            fresh = [
                replace(batch[place], seeds=(draw_seed(batch[place].seeds[number], draw),))
                for place, number in places
            ]
            drawn = self._batch_answers(fresh, sampling, store)
            answers |= {key: turn for key, (turn,) in zip(places, drawn, strict=True)}
        answers |= {key: replace(answers[key], text="") for key in rejected()}
        return [
            tuple(answers[place, number] for number in range(len(of_prompt)))
            for place, of_prompt in enumerate(turns)
        ]

    def _generate_batch(
        self, batch: Sequence[AnswerRequest], sampling: Sampling
    ) -> list[tuple[Turn, ...]]:
        free = iter(self._free([each for each in batch if each.strategy is None], sampling))
        return [
            next(free)
            if each.strategy is None
            else tuple(self._forced(each, sampling, seed) for seed in each.seeds)
            for each in batch
        ]

    def _free(self, batch: Sequence[AnswerRequest], sampling: Sampling) -> list[tuple[Turn, ...]]:
        chat, prompts = self._lease.chat, [*map(self._prompt, batch)]
        job = functools.partial(
            generate_turns, chat, self._lease.adapter, prompts, sampling, threading.Event()
        )
        turns = []
        for outcome in chat.owner.call(job):
            if isinstance(outcome, Exception):
                raise outcome
            turns.append(outcome)
        return turns

    def _forced(self, request: AnswerRequest, sampling: Sampling, seed: int) -> Turn:
        """Draw a turn with the policy of the page, again while its reply ignores the strategy."""
        lease, strategy = self._lease, request.strategy
        assert strategy is not None
        backend = TransformersBackend(lease.name, lease.scheduler, lease.adapter, lease.release)
        policy = Policy(
            self._policy.name,
            backend,
            self._policy.style,
            system_prompt=self._policy.system_prompt,
            strategy_openings=self._policy.strategy_openings,
        )
        history = request.dialogue.merged().utterances
        turns: list[Turn] = []
        while len(turns) < (request.draws if sampling.temperature > 0 else 1):
            controls = Controls(strategy, sampling=replace(sampling, seed=seed))
            stream = policy.respond(request.dialogue, controls, threading.Event())
            *_, last = stream
            assert isinstance(last, TurnFinished)
            reading, ended = last.reading, stream.tokens < sampling.max_new_tokens
            turns.append(Turn(reading.raw, (), ended))
            followed = carries_out(history, reading.reply or "", strategy, request.language)
            if followed is not Followed.NO:
                return turns[-1]
            seed = draw_seed(seed, 1)
        return turns[0]

    def _batches(self, requests: Iterable[AnswerRequest]) -> Iterator[list[AnswerRequest]]:
        """Group requests into batches of up to `at_once` turns, but at least one request."""
        batch: list[AnswerRequest] = []
        turns = 0
        for request in requests:
            if batch and turns + len(request.seeds) > self._at_once:
                yield batch
                batch, turns = [], 0
            batch.append(request)
            turns += len(request.seeds)
        if batch:
            yield batch


@contextmanager
def loaded_policy(
    policy: PolicySource, *, at_once: int = 16, device: str | None = None
) -> Iterator[Answerer]:
    """Load a policy for the duration of a `with` block.

    Args:
        policy: The policy.
        at_once: Batch size in turns.
        device: Device of the model; None selects one automatically.

    Raises:
        CompeerError: The policy cannot be loaded.
    """
    lease = ModelPool().lease(policy.source, policy.adapter, None, device)
    try:
        use_all_threads(lease.chat)
        yield Answerer(policy, lease, at_once)
    finally:
        lease.release()


def gate_state(policies: Sequence[PolicySource]) -> str:
    """Return "off", "on", or the names of the policies whose answers passed the gate.

    Example:
        >>> policies = [PolicySource(name=name, source="x", gate=name == "b") for name in "ab"]
        >>> gate_state(policies[:1]), gate_state(policies)
        ('off', 'on for b')
    """
    names = [policy.name for policy in policies if policy.gate]
    if not names:
        return "off"
    return "on" if len(names) == len(policies) else f"on for {', '.join(names)}"


def seed_of(history: int, seed: int) -> int:
    """Return the sampling seed of an answer, which is the same for every policy."""
    return int(np.random.SeedSequence((history, seed)).generate_state(1, np.uint64)[0])
