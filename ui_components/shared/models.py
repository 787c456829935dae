"""The models of a server, and their loading state.

Loading takes seconds to minutes. It happens in the background after the start, or in the thread of
the first job that needs the model; the page shows how long it has been going on.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from compeer_core.backends.protocol import Message, Sampling
from compeer_core.errors import CompeerError
from compeer_core.policy import Policy
from compeer_core.registry import Kind, ModelEntry, Registry, SourceKind
from compeer_core.unifireward import VERDICTS, Judge
from ui_components.server.admission_queue import AdmissionQueue

logger = logging.getLogger(__name__)

REMOTE_SLOTS = 8
"""Concurrent turns per endpoint."""

Model = TypeVar("Model")


@dataclass(frozen=True)
class Loading:
    """A model that is being loaded."""

    name: str
    seconds: float


class Models:
    """The registry and the loading state of its models."""

    def __init__(
        self,
        registry: Registry,
        *,
        policy: str | None = None,
        judge: str | None = None,
        local_slots: int = 1,
    ) -> None:
        """Wrap a registry.

        Args:
            registry: The available models.
            policy: The preselected policy; None takes the registry's default.
            judge: The same for the judge; empty preselects no judge.
            local_slots: Concurrent turns of the models in this process, which generate them as a batch.

        Raises:
            UnknownModelError: There is no such model.
        """
        self.registry = registry
        self._default: dict[Kind, str] = {
            "policy": registry.entry(policy or "", "policy").name,
            "judge": registry.default_name("judge") if judge is None else judge,
        }
        if judge:
            registry.entry(judge, "judge")
        self._begun: dict[str, float] = {}
        self._ready: set[str] = set()
        self._broken: set[str] = set()
        self._lock = threading.Lock()
        self._local = AdmissionQueue(local_slots)
        self._remote: dict[str, AdmissionQueue] = {}

    # --- entries ---------------------------------------------------------------------------------

    def entries(self, kind: Kind) -> list[ModelEntry]:
        """The entries of a kind in the registry's order."""
        return [entry for entry in self.registry.entries if entry.kind == kind]

    def entry(self, kind: Kind, name: str) -> ModelEntry | None:
        """The entry with that name, None if there is none."""
        return next((entry for entry in self.entries(kind) if entry.name == name), None)

    def default(self, kind: Kind) -> str:
        """The preselected name; empty if there is none of that kind."""
        return self._default[kind]

    def named(self, kind: Kind, name: str) -> str:
        """Return the name of an entry; an empty one means the default.

        Raises:
            UnknownModelError: There is none.
        """
        return self.registry.entry(name or self._default[kind], kind).name

    def can_force(self, name: str) -> bool:
        """Whether a policy continues given text. No endpoint does (`compeer_core.backends.openai.policy`)."""
        entry = self.entry("policy", name)
        return entry is not None and entry.where.kind is not SourceKind.ENDPOINT

    def public(self) -> list[dict[str, Any]]:
        """The public description of the models."""
        return [
            row | {"default": row["name"] == self._default[row["kind"]]}
            for row in self.registry.public()
        ]

    def queue(self, name: str) -> AdmissionQueue:
        """The queue of a model. Models in this process share one; each endpoint has its own."""
        entry = next((entry for entry in self.registry.entries if entry.name == name), None)
        if entry is None or entry.where.kind is not SourceKind.ENDPOINT:
            return self._local
        with self._lock:
            return self._remote.setdefault(name, AdmissionQueue(slots=REMOTE_SLOTS))

    def queues(self, names: Sequence[str]) -> list[AdmissionQueue]:
        """The queues of several models, each once, in the same order for everyone.

        With any order, two comparisons could each hold the place that the other waits for.
        """
        listed = (entry.name for entry in self.registry.entries if entry.name in names)
        queues = {id(queue): queue for queue in map(self.queue, listed)}
        return sorted(queues.values(), key=lambda queue: queue is not self._local)

    def queue_length(self) -> int:
        """How many visitors wait, over all queues."""
        with self._lock:
            queues = [self._local, *self._remote.values()]
        return sum(map(len, queues))

    # --- loading ---------------------------------------------------------------------------------

    def policy(self, name: str) -> Policy:
        """Return a policy, loaded if needed. Raises what the registry raises."""
        return self._tracked(name, self.registry.policy)

    def judge(self, name: str) -> Judge:
        """Return a judge, loaded if needed. Raises what the registry raises."""
        judge = self._tracked(name, self.registry.judge)
        assert judge is not None  # the registry returns None only for an empty name
        return judge

    def loading(self, name: str) -> Loading | None:
        """How long a model has been loading, None if it is not."""
        with self._lock:
            begun = self._begun.get(name)
        return None if begun is None else Loading(name, time.monotonic() - begun)

    def is_ready(self, name: str) -> bool:
        """Whether a model is loaded."""
        with self._lock:
            return name in self._ready

    def is_broken(self, name: str) -> bool:
        """Whether the last attempt to load a model failed."""
        with self._lock:
            return name in self._broken

    def warm_up(self, on_broken: Callable[[CompeerError], None]) -> threading.Thread:
        """Load the preselected models in the background and run each once.

        Args:
            on_broken: Called in that thread with the error.
        """
        thread = threading.Thread(
            target=self._warm_up, args=(on_broken,), name="warm-up", daemon=True
        )
        policy = self.default("policy")
        with self._lock:  # visible before the thread runs
            self._begun.setdefault(policy, time.monotonic())
        thread.start()
        return thread

    def _tracked(self, name: str, load: Callable[[str], Model]) -> Model:
        with self._lock:
            if name not in self._ready:
                self._begun.setdefault(name, time.monotonic())
        try:
            model = load(name)
        except CompeerError:
            with self._lock:
                self._begun.pop(name, None)
                self._broken.add(name)
            raise
        with self._lock:
            self._begun.pop(name, None)
            self._broken.discard(name)
            self._ready.add(name)
        return model

    def _warm_up(self, on_broken: Callable[[CompeerError], None]) -> None:
        """Warm up outside the queues: early visitors should see a model load, not a queue."""
        try:
            _write_a_word(self.policy(self.default("policy")))
            if self.default("judge"):
                _judge_a_word(self.judge(self.default("judge")))
        except CompeerError as error:
            logger.warning("a model could not be warmed up: %s", error)
            on_broken(error)


def _write_a_word(policy: Policy) -> None:
    message = Message(role="user", content=("Hello",))
    sampling = Sampling(max_new_tokens=1)
    completion = policy.backend.open((message,), sampling, threading.Event())
    try:
        for _ in completion.generate():
            break
    finally:
        completion.close()


def _judge_a_word(judge: Judge) -> None:
    message = Message(role="user", content=("Seeker: Hello\n",))
    session = judge.scorer.open((message,))
    try:
        session.ask("Hello", VERDICTS)
    finally:
        session.close()
