"""Policies answer histories, many at a time, each answer from a seed of its own."""

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.batch_writing import Prompt, Turn, write_turns
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue
from compeer_core.model_pool import ModelPool
from compeer_core.policy import Style
from compeer_core.prompts import policy_messages
from training.progress import track

_log = logging.getLogger(__name__)


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


def answered(
    policy: PolicySource,
    asked: Sequence[Asked],
    sampling: Sampling,
    *,
    at_once: int = 16,
    device: str | None = None,
) -> list[tuple[Turn, ...]]:
    """Let a policy answer everything it is asked, once from each seed.

    Args:
        policy: Is loaded for it, and let go of.
        asked: In any order; the answers come in the same.
        sampling: Its seed is not looked at.
        at_once: About so many turns are written together.
        device: Where; None takes what there is.

    Raises:
        CompeerError: The policy cannot be loaded, or cannot read one of the histories.
    """
    lease = ModelPool().lease(policy.source, policy.adapter, None, device)
    together = max(1, at_once // max((len(one.seeds) for one in asked), default=1))
    turns: list[tuple[Turn, ...]] = []
    try:
        parts = [asked[begin : begin + together] for begin in range(0, len(asked), together)]
        for part in track(parts, policy.name, unit="batches"):
            prompts = [
                Prompt(
                    policy_messages(one.dialogue, policy.style, one.language, lease.chat.reserved),
                    one.seeds,
                )
                for one in part
            ]
            job = functools.partial(
                write_turns, lease.chat, lease.adapter, prompts, sampling, threading.Event()
            )
            for one in lease.chat.owner.call(job):
                if isinstance(one, Exception):
                    raise one
                turns.append(one)
    finally:
        lease.release()
    return turns


def seed_of(history: int, seed: int) -> int:
    """Return what an answer is drawn from, the same for every policy."""
    return int(np.random.SeedSequence((history, seed)).generate_state(1, np.uint64)[0])
