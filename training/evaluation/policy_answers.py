"""Policies answer histories, many at a time, each answer from a seed of its own.

What they have answered can be kept in a file, and is then not written again.
"""

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.batch_generation import Prompt, Turn, write_turns
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue
from compeer_core.model_pool import Lease, ModelPool
from compeer_core.policy import Style
from compeer_core.prompts import policy_messages
from training.common.fingerprints import digest, fingerprint
from training.common.progress import track
from training.common.run_directory import versions
from training.common.threads import use_all_threads
from training.evaluation.answer_store import KeptAnswers

_LIBRARIES = ("torch", "transformers")


class PolicySource(FrozenModel):
    """One policy."""

    name: str = Field(pattern=r"^[\w.\-]+$")
    source: str
    """Checkpoint folder, or name on the hub."""
    adapter: Path | None = None
    style: Style = "trained"


@dataclass(frozen=True)
class Asked:
    """What a policy is asked to answer."""

    dialogue: Dialogue
    seeds: tuple[int, ...]
    """One answer is drawn from each."""
    language: str = "en"


class Answerer:
    """A loaded policy."""

    def __init__(self, policy: PolicySource, lease: Lease, at_once: int) -> None:
        self._policy = policy
        self._lease = lease
        self._at_once = at_once

    @functools.cached_property
    def _identity(self) -> list[Any]:
        """What answers depend on beside what is asked."""
        policy, device = self._policy, str(self._lease.chat.model.device)
        places = [Path(policy.source), policy.adapter]
        weights = [fingerprint(one) for one in places if one is not None and one.exists()]
        named = [policy.source, str(policy.adapter), policy.style]
        return [*named, weights, device, versions(_LIBRARIES)]

    def answers(
        self,
        asked: Iterable[Asked],
        sampling: Sampling,
        total: int | None = None,
        kept: Path | None = None,
    ) -> Iterator[tuple[Turn, ...]]:
        """Answer everything that is asked, once from each seed, in the order asked.

        Args:
            asked: Read as it is answered, so that pictures need not all be in memory at once.
            sampling: Its seed is not looked at.
            total: How much will be asked, for the display of progress.
            kept: File of the answers, which is made, or gone on with where it holds answers to the
                same questions by the same weights; None keeps nothing.

        Raises:
            CompeerError: The policy cannot read one of the histories.
        """
        written = self._written(asked, sampling, None if kept is None else KeptAnswers(kept))
        return track(written, self._policy.name, total=total, unit="histories")

    def _written(
        self, asked: Iterable[Asked], sampling: Sampling, kept: KeptAnswers | None
    ) -> Iterator[tuple[Turn, ...]]:
        reserved = self._lease.chat.reserved
        for part in self._parts(asked):
            prompts = [
                Prompt(
                    policy_messages(one.dialogue, self._policy.style, one.language, reserved),
                    one.seeds,
                )
                for one in part
            ]
            if kept is None:
                yield from self._write(prompts, sampling)
                continue
            asked_now = digest([self._identity, repr(sampling), repr(prompts)])
            turns = kept.take(asked_now)
            if turns is None:
                turns = self._write(prompts, sampling)
                kept.put(asked_now, turns)
            yield from turns

    def _write(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[tuple[Turn, ...]]:
        chat = self._lease.chat
        job = functools.partial(
            write_turns, chat, self._lease.adapter, prompts, sampling, threading.Event()
        )
        turns = []
        for one in chat.owner.call(job):
            if isinstance(one, Exception):
                raise one
            turns.append(one)
        return turns

    def _parts(self, asked: Iterable[Asked]) -> Iterator[list[Asked]]:
        """Yield what is written together: some `at_once` turns, or one history's if they are more."""
        part: list[Asked] = []
        turns = 0
        for one in asked:
            if part and turns + len(one.seeds) > self._at_once:
                yield part
                part, turns = [], 0
            part.append(one)
            turns += len(one.seeds)
        if part:
            yield part


@contextmanager
def answering(
    policy: PolicySource, *, at_once: int = 16, device: str | None = None
) -> Iterator[Answerer]:
    """Load a policy, and let go of it at the end of the `with` block.

    Args:
        policy: Which.
        at_once: About so many turns are written together.
        device: Where; None takes what there is.

    Raises:
        CompeerError: It cannot be loaded.
    """
    lease = ModelPool().lease(policy.source, policy.adapter, None, device)
    try:
        use_all_threads(lease.chat)
        yield Answerer(policy, lease, at_once)
    finally:
        lease.release()


def seed_of(history: int, seed: int) -> int:
    """Return what an answer is drawn from, the same for every policy."""
    return int(np.random.SeedSequence((history, seed)).generate_state(1, np.uint64)[0])
