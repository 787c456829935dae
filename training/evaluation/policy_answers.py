"""Generates a policy's answers to histories in batches, with a seed per answer.

Answers can be stored in a file, from which an interrupted evaluation resumes.
"""

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.batch_generation import Prompt, Turn, generate_turns
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue
from compeer_core.model_pool import Lease, ModelPool
from compeer_core.policy import Style
from compeer_core.prompts import policy_messages
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
    temperature: float | None = Field(default=None, ge=0)
    """Replaces the temperature at which an evaluation samples; greedy decoding stays greedy."""
    exact_quotations: bool = False
    """Whether reasoning steps can quote only what the seeker wrote."""


@dataclass(frozen=True)
class AnswerRequest:
    """A history to answer."""

    dialogue: Dialogue
    seeds: tuple[int, ...]
    """An answer is sampled with each of them."""
    language: str = "en"


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
        sampling = replace(sampling, exact_quotations=self._policy.exact_quotations)
        answers = self._generate(
            requests, sampling, None if stored is None else AnswerStore(stored)
        )
        return track(answers, self._policy.name, total=total, unit="histories")

    def _generate(
        self, requests: Iterable[AnswerRequest], sampling: Sampling, store: AnswerStore | None
    ) -> Iterator[tuple[Turn, ...]]:
        reserved = self._lease.chat.reserved
        for batch in self._batches(requests):
            prompts = [
                Prompt(
                    policy_messages(each.dialogue, self._policy.style, each.language, reserved),
                    each.seeds,
                )
                for each in batch
            ]
            if store is None:
                yield from self._generate_batch(prompts, sampling)
                continue
            key = digest([self._identity, repr(sampling), repr(prompts)])
            turns = store.take(key)
            if turns is None:
                turns = self._generate_batch(prompts, sampling)
                store.put(key, turns)
            yield from turns

    def _generate_batch(
        self, prompts: Sequence[Prompt], sampling: Sampling
    ) -> list[tuple[Turn, ...]]:
        chat = self._lease.chat
        job = functools.partial(
            generate_turns, chat, self._lease.adapter, prompts, sampling, threading.Event()
        )
        turns = []
        for outcome in chat.owner.call(job):
            if isinstance(outcome, Exception):
                raise outcome
            turns.append(outcome)
        return turns

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


def seed_of(history: int, seed: int) -> int:
    """Return the sampling seed of an answer, which is the same for every policy."""
    return int(np.random.SeedSequence((history, seed)).generate_state(1, np.uint64)[0])
