"""Replies on their way: one thread each, watched by the page.

The thread writes what it gets into the visitor's `Session`, whoever looks. Handlers only look. So a
page that was reloaded sees the reply go on, and nothing is lost when it was closed: the last
watcher to leave sets the stop flag, and what was written until then is kept.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

from compeer_core.conversation import TurnDone, take_turn
from compeer_core.dialogue import Dialogue
from compeer_core.errors import CompeerError, InputError
from compeer_core.policy import Controls
from compeer_core.unifireward import Judge
from ui_components.metrics import Metrics
from ui_components.models import Models
from ui_components.progress import Failure, Phase, Progress
from ui_components.session import Session, SessionKey, SessionStore
from ui_components.waiting import LineFullError

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""How long a reply goes on although nobody watches."""


@dataclass(frozen=True)
class Order:
    """What a reply is asked for with."""

    model: str
    judge: str | None = None
    seed: int | None = None


class Job:
    """One reply on its way."""

    def __init__(self, key: SessionKey, turn_key: str, grace_seconds: float) -> None:
        self.key = key
        self.turn_key = turn_key
        self.stop = threading.Event()
        self.over = threading.Event()
        self._grace_seconds = grace_seconds
        self._watchers = 0
        self._leaving: threading.Timer | None = None
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count as a watcher until the block ends. When the last one has left, the reply is stopped.

        A page that is reloaded leaves before it comes back, so there is a moment of grace.
        """
        with self._lock:
            self._watchers += 1
            if self._leaving is not None:
                self._leaving.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._watchers -= 1
                if self._watchers == 0 and not self.over.is_set():
                    self._leaving = threading.Timer(self._grace_seconds, self._stop_if_alone)
                    self._leaving.daemon = True
                    self._leaving.start()

    def _stop_if_alone(self) -> None:
        with self._lock:
            if self._watchers == 0:
                self.stop.set()


class Writers:
    """All replies on their way on one server."""

    def __init__(
        self,
        models: Models,
        store: SessionStore,
        metrics: Metrics,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._models = models
        self._store = store
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        self._grace_seconds = grace_seconds
        self._jobs: dict[SessionKey, Job] = {}
        self._lock = threading.Lock()

    def job(self, key: SessionKey) -> Job | None:
        """The reply on its way in a conversation, if there is one."""
        with self._lock:
            return self._jobs.get(key)

    def count(self) -> int:
        """How many replies are on their way, those in line among them."""
        with self._lock:
            return len(self._jobs)

    def stop(self, key: SessionKey) -> bool:
        """End the reply on its way. Return whether there was one."""
        job = self.job(key)
        if job is None:
            return False
        job.stop.set()
        return True

    def begin(self, key: SessionKey, change: Callable[[Session], Session], order: Order) -> Job:
        """Change a conversation and begin a reply to its last message, as one step.

        Args:
            key: Whose conversation.
            change: What sending does to it.
            order: Model, judge and seed.

        Raises:
            InputError: A reply is on its way already (code ``already_writing``); nothing changed.
        """
        with self._lock:
            if key in self._jobs:
                raise InputError("a reply is on its way", code="already_writing")
            session = self._store.update(key, change)
            turn = session.turns[-1]
            dialogue = session.dialogue()
            progress = Progress(
                model=order.model, judge=order.judge, seed=order.seed, since=time.monotonic()
            )
            begun = replace(turn, progress=progress)
            self._store.update(key, lambda now: now.with_turn(begun))
            job = Job(key, turn.key, self._grace_seconds)
            self._jobs[key] = job
        threading.Thread(
            target=self._run, args=(job, dialogue, order), name="reply", daemon=True
        ).start()
        return job

    # --- in the thread of a job ------------------------------------------------------------------

    def _run(self, job: Job, dialogue: Dialogue, order: Order) -> None:
        try:
            self._write(job, dialogue, order)
        except LineFullError:
            self._fail(job, "line")
        except InputError:
            logger.exception("a turn was refused")
            self._fail(job, "reply")
        except Exception as error:  # noqa: BLE001  (a thread's last resort: the page must hear of it)
            # The words of a library's error may quote the prompt, so only its kind and place are kept.
            trace = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a reply ended in a %s\n%s", type(error).__name__, trace)
            self._fail(job, "reply")
        finally:
            with self._lock:
                self._jobs.pop(job.key, None)
            job.over.set()

    def _write(self, job: Job, dialogue: Dialogue, order: Order) -> None:
        line = self._models.line(order.model)
        with line.place() as ticket:
            while not line.wait(ticket):
                if job.stop.is_set():
                    self._change(job, partial(replace, phase="over", outcome="stopped"))
                    return
                ahead = line.ahead(ticket)
                self._change(job, partial(replace, place=ahead))
            self._phase(job, "loading")
            try:
                policy = self._models.policy(order.model)
            except CompeerError:
                logger.exception("the model %s could not be loaded", order.model)
                self._fail(job, "model")
                return
            judge = self._judge(job, order)
            self._phase(job, "writing")
            controls = Controls(sampling=replace(policy.sampling, seed=order.seed))
            events = take_turn(
                policy,
                judge,
                dialogue,
                controls,
                job.stop,
                deadline_seconds=self._deadline_seconds,
            )
            with closing(events):
                for event in events:
                    self._change(job, methodcaller("after", event))
                    if isinstance(event, TurnDone):
                        self._metrics.count(event.record)

    def _judge(self, job: Job, order: Order) -> Judge | None:
        if not order.judge:
            return None
        try:
            return self._models.judge(order.judge)
        except CompeerError:
            logger.exception("the judge %s could not be loaded", order.judge)
            self._change(job, partial(replace, judge=None, judge_failed=True))
            return None

    def _phase(self, job: Job, phase: Phase) -> None:
        self._change(job, partial(replace, phase=phase, since=time.monotonic()))

    def _fail(self, job: Job, failure: Failure) -> None:
        self._change(job, methodcaller("failed", failure))

    def _change(self, job: Job, change: Callable[[Progress], Progress]) -> None:
        def changed(session: Session) -> Session:
            for turn in (*session.turns, *(session.undo.turns if session.undo else ())):
                if turn.key == job.turn_key and turn.progress is not None:
                    return session.with_turn(replace(turn, progress=change(turn.progress)))
            return session  # the visitor has cleared it meanwhile

        self._store.update(job.key, changed)
