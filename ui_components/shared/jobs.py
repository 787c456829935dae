"""Generation jobs and the loop that shows them: what Chat and Compare have in common.

A job generates one or several replies in threads of its own and writes their progress into the
visitor's record in a `SessionStore`, whether or not a page is open. Handlers only read that record, so
a reloaded page sees the replies continue. A job stops shortly after its last watcher has left; the text
written until then stays in the record.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, Generic, TypeVar

from compeer_core.dialogue import Dialogue
from compeer_core.errors import CompeerError, InputError
from compeer_core.forced_turn import take_forced_turn
from compeer_core.logs import trace_of
from compeer_core.policy import Controls, Policy
from compeer_core.turn import TurnDone, take_turn
from compeer_core.unifireward import Judge
from ui_components.server.admission_queue import PlacesTakenError, QueueFullError
from ui_components.server.metrics import Metrics
from ui_components.shared.models import Models
from ui_components.shared.progress import Failure, Progress
from ui_components.shared.session_store import SessionKey, SessionRecord, SessionStore

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 120.0
"""Time limit of a reply, judging and fresh draws included."""
GRACE_SECONDS = 5.0
"""How long a job continues after its last watcher has left. A reload leaves before it comes back."""
UNWATCHED_SECONDS = 5.0
"""How long a new job waits for its first watcher: the page may have been closed before it began."""
STOP_SECONDS = 5.0
"""How long a stopped job may take to end before the next one is refused."""
UPDATES_PER_SECOND = 12
HEARTBEAT_SECONDS = 1.0
"""Gradio notices that a page was closed only when a handler yields."""

Update = dict[Any, Any]
"""What a handler yields: new values by component."""
ProgressChange = Callable[[Progress], Progress]


@dataclass(frozen=True)
class TurnRequest:
    """What one reply is generated with."""

    policy: Policy
    controls: Controls
    reference: str | None = None
    """The reply that the judge compares it with."""
    must_show: bool = False
    """Draw again while the reply does not show the forced strategy."""


class Job:
    """Replies that are being generated for one conversation."""

    def __init__(self, key: SessionKey, replies: int, grace_seconds: float) -> None:
        self.key = key
        self.stopped = threading.Event()
        """Set once the whole job was told to stop."""
        self.over = threading.Event()
        self.stop_events = tuple(threading.Event() for _ in range(replies))
        """One per reply, so that each can be stopped alone."""
        self._grace_seconds = grace_seconds
        self._watchers = 0
        self._stop_timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Stop all replies."""
        for event in (self.stopped, *self.stop_events):
            event.set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count as a watcher until the block ends; the last one to leave stops the job after a while."""
        with self._lock:
            self._watchers += 1
            if self._stop_timer is not None:
                self._stop_timer.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._watchers -= 1
            self.stop_unless_watched(self._grace_seconds)

    def keep_running(self) -> None:
        """Continue without watchers: the visitor reads another conversation meanwhile."""
        with self._lock:
            self._watchers += 1

    def stop_unless_watched(self, seconds: float = UNWATCHED_SECONDS) -> None:
        """Stop the job after some seconds unless it has a watcher then."""
        with self._lock:
            if self._watchers == 0 and not self.over.is_set():
                self._stop_timer = threading.Timer(seconds, self._stop_if_alone)
                self._stop_timer.daemon = True
                self._stop_timer.start()

    def _stop_if_alone(self) -> None:
        with self._lock:
            if self._watchers == 0:
                self.stop()


Record = TypeVar("Record", bound=SessionRecord)
AnyJob = TypeVar("AnyJob", bound=Job)


class _StoppedInQueueError(Exception):
    """The job was stopped before its turn came."""


class _ModelError(Exception):
    """A policy could not be loaded."""


class JobRunner(ABC, Generic[Record, AnyJob]):
    """All jobs of one screen; at most one per conversation.

    A screen says where progress is stored (`_change`), what happens to a reply that has ended
    (`_finish`) or failed (`_fail`), and what is left of a job that never left the queue (`_abandon`).
    """

    def __init__(
        self,
        models: Models,
        store: SessionStore[Record],
        metrics: Metrics,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        gated: bool = True,
    ) -> None:
        self.store = store
        self._models = models
        self._metrics = metrics
        self._deadline_seconds = deadline_seconds
        """For each reply."""
        self._grace_seconds = grace_seconds
        self._gated = gated
        """Whether draws with a fault are rejected."""
        self._jobs: dict[SessionKey, AnyJob] = {}
        self._reserved_keys: set[SessionKey] = set()
        self._lock = threading.Lock()

    def job(self, key: SessionKey) -> AnyJob | None:
        """The running job of a conversation, if there is one."""
        with self._lock:
            return self._jobs.get(key)

    def count(self) -> int:
        """How many jobs are running or queued."""
        with self._lock:
            return len(self._jobs)

    def stop(self, key: SessionKey, reply: int | None = None) -> None:
        """Stop one reply of the running job, or all of them."""
        job = self.job(key)
        if job is not None and reply is None:
            job.stop()
        elif job is not None and reply is not None and 0 <= reply < len(job.stop_events):
            job.stop_events[reply].set()

    def forget(self, visitor: str) -> None:
        """Stop a visitor's jobs and delete their records."""
        with self._lock:
            jobs = [job for key, job in self._jobs.items() if key.visitor == visitor]
        for job in jobs:
            job.stop()
        self.store.forget(visitor)

    async def wait_for_stopped(self, key: SessionKey) -> None:
        """Wait until a job that was told to stop has ended."""
        job = self.job(key)
        if job is not None and job.stopped.is_set():
            await asyncio.to_thread(job.over.wait, STOP_SECONDS)

    # --- starting a job --------------------------------------------------------------------------

    @contextmanager
    def _reserved(self, key: SessionKey) -> Iterator[None]:
        """Let nobody else start a job in this conversation until the block ends.

        Raises:
            InputError: A job is running or being started (code ``already_writing``).
        """
        with self._lock:
            if key in self._jobs or key in self._reserved_keys:
                raise InputError("a reply is being generated", code="already_writing")
            self._reserved_keys.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._reserved_keys.discard(key)

    def _register(self, job: AnyJob) -> None:
        """Make a job visible to `job`, `stop` and `forget`."""
        with self._lock:
            self._jobs[job.key] = job
        if not self.store.is_current(job.key):
            job.stop()  # `forget` may have run before the job was registered

    def _start(self, job: AnyJob, work: Callable[[], None]) -> None:
        """Run a registered job in its own thread."""
        job.stop_unless_watched()
        threading.Thread(target=self._run, args=(job, work), name="job", daemon=True).start()

    # --- in the threads of a job -----------------------------------------------------------------

    def _run(self, job: AnyJob, work: Callable[[], None]) -> None:
        try:
            self._guard(job, work)
        finally:
            with self._lock:
                self._jobs.pop(job.key, None)
            job.over.set()

    def _guard(self, job: AnyJob, work: Callable[[], None]) -> None:
        """Do the work of a job; a failure becomes the outcome of its unfinished replies."""
        try:
            work()
        except _StoppedInQueueError:
            self._abandon(job)
        except _ModelError:
            self._fail(job, "model")
        except PlacesTakenError:
            self._fail(job, "places")
        except QueueFullError:
            self._fail(job, "line")
        except Exception as error:  # noqa: BLE001  (last resort: the page must show the failure)
            logger.error("a generation job failed: %s", trace_of(error))
            self._fail(job, "reply")

    @contextmanager
    def _admitted(self, job: AnyJob, names: Sequence[str]) -> Iterator[dict[str, Policy]]:
        """Wait in the queues of some policies, load them, and hold the places until the block ends."""
        with ExitStack() as places:
            for queue in self._models.queues(names):
                place = queue.admitted(
                    *(job.key.caller, job.stopped, partial(self._set_place, job)),
                    size=len(job.stop_events),
                )
                if not places.enter_context(place):
                    raise _StoppedInQueueError
            self._set_phase(job, "loading")
            try:
                policies = {name: self._models.policy(name) for name in names}
            except CompeerError as error:
                logger.error("a policy could not be loaded: %s", error)
                raise _ModelError from error
            yield policies

    def _loaded_judge(self, job: AnyJob, name: str | None) -> Judge | None:
        """Load a judge. None if there is none, or if it could not be loaded."""
        if not name:
            return None
        try:
            return self._models.judge(name)
        except CompeerError as error:
            logger.error("the judge %s could not be loaded: %s", name, error)
            self._change(job, partial(replace, judge=None, judge_failed=True))
            return None

    def _generate(
        self, job: AnyJob, dialogue: Dialogue, judge: Judge | None, requests: Sequence[TurnRequest]
    ) -> None:
        """Generate the replies of a job at the same time, so that a local model can batch them."""
        self._set_phase(job, "writing")
        threads = [
            threading.Thread(
                target=self._generate_reply,
                args=(job, number, dialogue, judge, request),
                name="reply",
                daemon=True,
            )
            for number, request in enumerate(requests)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _generate_reply(
        self,
        job: AnyJob,
        number: int,
        dialogue: Dialogue,
        judge: Judge | None,
        request: TurnRequest,
    ) -> None:
        try:
            take = take_forced_turn if request.must_show else take_turn
            events = take(
                request.policy,
                judge,
                dialogue,
                request.controls,
                job.stop_events[number],
                request.reference,
                deadline_seconds=self._deadline_seconds,
                gated=self._gated,
            )
            with closing(events):
                for event in events:
                    if isinstance(event, TurnDone):
                        self._finish(job, number, event)
                    else:
                        self._change(job, methodcaller("after", event), number)
        except Exception as error:  # noqa: BLE001  (one reply must not end the others)
            logger.error("a reply failed: %s", trace_of(error))
            self._fail(job, "reply", number)

    def _set_phase(self, job: AnyJob, phase: str) -> None:
        self._change(job, partial(replace, phase=phase, since=time.monotonic()))

    def _set_place(self, job: AnyJob, place: int) -> None:
        self._change(job, partial(replace, place=place))

    # --- what a screen adds ----------------------------------------------------------------------

    @abstractmethod
    def _change(self, job: AnyJob, change: ProgressChange, number: int | None = None) -> None:
        """Change the stored progress of one reply of a job, or of all of them."""

    @abstractmethod
    def _finish(self, job: AnyJob, number: int, event: TurnDone) -> None:
        """Store a reply that has ended."""

    @abstractmethod
    def _fail(self, job: AnyJob, failure: Failure, number: int | None = None) -> None:
        """Mark one reply, or all that have not ended, as failed."""

    @abstractmethod
    def _abandon(self, job: AnyJob) -> None:
        """Mark the replies of a job that was stopped in the queue."""


async def watch(
    job: Job | None, draw: Callable[[bool], Update], heartbeat: Update
) -> AsyncGenerator[Update, None]:
    """Yield what a page must change until a job is over.

    Args:
        job: The job; None draws once.
        draw: Returns what has changed since it was last called; it is told whether the job is over.
        heartbeat: An update that changes nothing, for when nothing was drawn for a while.
    """
    with nullcontext() if job is None else job.watched():
        last_yield = time.monotonic()
        while True:
            is_over = job is None or job.over.is_set()
            update = draw(is_over)
            if not update and time.monotonic() - last_yield > HEARTBEAT_SECONDS:
                update = heartbeat
            if update:
                last_yield = time.monotonic()
                yield update
            if is_over:
                return
            await asyncio.sleep(1 / UPDATES_PER_SECOND)
