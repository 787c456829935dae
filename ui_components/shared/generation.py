"""Replies on their way: one thread each, watched by the page.

The thread writes what it gets into the visitor's `Session`, whoever looks. Handlers only look. So a
page that was reloaded sees the reply go on, and nothing is lost when it was closed: the last
watcher to leave sets the stop flag, and what was written until then is kept.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

from compeer_core.best_of import Ranking, rank
from compeer_core.dialogue import Dialogue
from compeer_core.encoder import SentenceEncoder, load_encoder
from compeer_core.errors import CheckpointError, CompeerError, ConfigError, InputError
from compeer_core.logs import trace_of
from compeer_core.policy import Controls, Policy
from compeer_core.steering import GivenStep
from compeer_core.turn import SEEDS, TurnDone, take_turn
from compeer_core.unifireward import Judge
from ui_components.server.admission_queue import LineFullError, PlacesTakenError
from ui_components.server.metrics import Metrics
from ui_components.shared.models import Models
from ui_components.shared.progress import Failure, Origin, Phase, Progress
from ui_components.shared.session import BestOf, Session, Turn
from ui_components.shared.session_store import SessionKey, SessionStore

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""How long a reply goes on although nobody watches."""
UNWATCHED_SECONDS = 5.0
"""How long one that has just begun goes on until somebody does: the page may have been closed before."""


@dataclass(frozen=True)
class Order:
    """What a reply is asked for with."""

    model: str
    judge: str | None = None
    seed: int | None = None
    strategy: str | None = None
    """One that the reply has to follow."""
    given: tuple[GivenStep, ...] = ()
    """Steps that stand before the model begins."""
    origin: Origin = Origin()  # noqa: RUF009  (frozen)

    def begun(self, number: int = 0) -> Progress:
        """Return the first state of a reply; of several, each has a seed of its own."""
        seed = None if self.seed is None else (self.seed + number) % SEEDS
        return Progress(
            model=self.model,
            judge=self.judge,
            seed=seed,
            key=secrets.token_urlsafe(9),
            origin=self.origin,
            since=time.monotonic(),
        )


class Job:
    """A reply on its way, or several that were asked for at once."""

    def __init__(
        self,
        key: SessionKey,
        turn_key: str,
        grace_seconds: float,
        replies: Sequence[Progress] = (),
    ) -> None:
        self.key = key
        self.turn_key = turn_key
        self.replies = tuple(reply.key for reply in replies)
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
            self.stop_unless_watched(self._grace_seconds)

    def stop_unless_watched(self, seconds: float = UNWATCHED_SECONDS) -> None:
        """Stop the reply after some seconds unless somebody watches then."""
        with self._lock:
            if self._watchers == 0 and not self.over.is_set():
                self._leaving = threading.Timer(seconds, self._stop_if_alone)
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
        store: SessionStore[Session],
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

    def forget(self, visitor: str) -> None:
        """End all replies to a visitor."""
        with self._lock:
            jobs = [job for key, job in self._jobs.items() if key.visitor == visitor]
        for job in jobs:
            job.stop.set()

    def begin(
        self,
        key: SessionKey,
        change: Callable[[Session], Session],
        order: Order,
        index: int | None = None,
    ) -> Job:
        """Change a conversation and begin a reply to one of its messages, as one step.

        Args:
            key: Whose conversation.
            change: What sending does to it.
            order: What is asked for.
            index: The message; None is the last one.

        Raises:
            InputError: A reply is on its way already (code ``already_writing``), the message is
                left to people (``left_to_people``), or there is no room for one more; nothing
                changed.
        """
        progress = order.begun()

        def changed(session: Session) -> Session:
            session = change(session)
            return session.begun(len(session.turns) - 1 if index is None else index, progress)

        with self._lock:
            session, job = self._added(key, changed, [progress])
        dialogue = session.dialogue()
        self._start(job, lambda: self._write(job, dialogue, order, progress))
        return job

    def keep(self, key: SessionKey, change: Callable[[Session], Session]) -> None:
        """Change a conversation as `begin` does, without a reply.

        Raises:
            InputError: A reply is on its way (code ``already_writing``); nothing changed.
        """
        with self._lock:
            self._check_idle(key)
            self._store.update(key, change)

    def begin_best_of(self, key: SessionKey, order: Order, size: int) -> Job:
        """Begin several replies to the last message, to be ranked when all are there.

        Args:
            key: Whose conversation.
            order: What is asked for; a seed is that of the first reply, and counts up.
            size: How many.

        Raises:
            InputError: As for `begin`.
        """
        samples = [order.begun(number) for number in range(size)]
        with self._lock:
            session, job = self._added(
                key, lambda session: session.sampled(tuple(samples)), samples
            )
        turn = session.turns[-1]
        self._start(job, lambda: self._write_several(job, session.dialogue(), order, turn))
        return job

    def _added(
        self, key: SessionKey, change: Callable[[Session], Session], replies: Sequence[Progress]
    ) -> tuple[Session, Job]:
        self._check_idle(key)
        session = self._store.update(key, change)
        if not session.turns:
            raise InputError("everything was deleted meanwhile", code="forgotten")
        job = Job(key, session.turns[-1].key, self._grace_seconds, replies)
        self._jobs[key] = job
        return session, job

    def _check_idle(self, key: SessionKey) -> None:
        if key in self._jobs:
            raise InputError("a reply is on its way", code="already_writing")

    def _start(self, job: Job, work: Callable[[], None]) -> None:
        job.stop_unless_watched()
        threading.Thread(target=self._run, args=(job, work), name="reply", daemon=True).start()

    # --- in the thread of a job ------------------------------------------------------------------

    def _run(self, job: Job, work: Callable[[], None]) -> None:
        try:
            work()
        except PlacesTakenError:
            self._fail(job, "places")
        except LineFullError:
            self._fail(job, "line")
        except Exception as error:  # noqa: BLE001  (a thread's last resort: the page must hear of it)
            logger.error("a reply ended in a %s", trace_of(error))
            self._fail(job, "reply")
        finally:
            with self._lock:
                self._jobs.pop(job.key, None)
            job.over.set()

    def _write(self, job: Job, dialogue: Dialogue, order: Order, progress: Progress) -> None:
        with self._served(job, order) as policy:
            if policy is not None:
                judge = self._judge(job, order)
                self._phase(job, "writing")
                self._take_turn(job, progress, policy, judge, dialogue, order)

    def _write_several(self, job: Job, dialogue: Dialogue, order: Order, turn: Turn) -> None:
        best_of = turn.best_of
        assert best_of is not None  # it was made with the samples
        reference = turn.reply(best_of.reference)
        samples = [reply for number in best_of.numbers if (reply := turn.reply(number))]
        try:
            with self._served(job, order) as policy:
                if policy is None:
                    return
                judge = self._judge(job, order)
                self._phase(job, "writing")
                words = reference.reply.strip() if reference and judge else None
                # Replies that are on their way at the same time are written in one batch.
                with ThreadPoolExecutor(len(samples), thread_name_prefix="sample") as pool:
                    begun = [
                        pool.submit(
                            self._take_turn, job, sample, policy, judge, dialogue, order, words
                        )
                        for sample in samples
                    ]
                for each in begun:
                    each.result()
        finally:
            self._change(job, _ended)
            self._rank(job, dialogue, turn, best_of)

    def _rank(self, job: Job, dialogue: Dialogue, turn: Turn, best_of: BestOf) -> None:
        """Rank what there is of a group; the members that were never begun are gone."""
        held = {one.key: one for one in self._store.get(job.key).held()}
        now = held.get(turn.key)
        if now is None:  # the visitor has cleared it meanwhile
            return
        found = [reply for number in best_of.numbers if (reply := now.reply(number))]
        there = [reply for reply in found if reply.has_words]
        ranking = _ranking(there, dialogue) if there else None
        ranked = replace(best_of, numbers=tuple(one.number for one in there), ranking=ranking)
        self._store.update(job.key, lambda session: session.ranked(turn.key, ranked))

    @contextmanager
    def _served(self, job: Job, order: Order) -> Iterator[Policy | None]:
        """Wait in the line and load the policy; None if there is nothing to be written."""
        line = self._models.line(order.model)
        with line.place(job.key.caller) as ticket:
            while not line.wait(ticket):
                if job.stop.is_set():
                    self._change(job, _ended)
                    yield None
                    return
                ahead = line.ahead(ticket)
                self._change(job, partial(replace, place=ahead))
            self._phase(job, "loading")
            try:
                policy = self._models.policy(order.model)
            except CompeerError as error:
                logger.error("the model %s could not be loaded: %s", order.model, error)
                self._fail(job, "model")
                yield None
                return
            yield policy

    def _take_turn(
        self,
        job: Job,
        progress: Progress,
        policy: Policy,
        judge: Judge | None,
        dialogue: Dialogue,
        order: Order,
        reference: str | None = None,
    ) -> None:
        is_steered = bool(order.strategy or order.given)
        if is_steered and not policy.backend.can_write:
            self._change(job, partial(replace, only_asked=True))
        events = take_turn(
            policy,
            judge,
            dialogue,
            Controls(
                strategy=order.strategy,
                given=order.given,
                sampling=replace(policy.sampling, seed=progress.seed),
            ),
            job.stop,
            reference,
            deadline_seconds=self._deadline_seconds,
        )
        with closing(events):
            for event in events:
                self._change(job, methodcaller("after", event), progress)
                if isinstance(event, TurnDone):
                    self._metrics.count(event.record)

    def _judge(self, job: Job, order: Order) -> Judge | None:
        if not order.judge:
            return None
        try:
            return self._models.judge(order.judge)
        except CompeerError as error:
            logger.error("the judge %s could not be loaded: %s", order.judge, error)
            self._change(job, partial(replace, judge=None, judge_failed=True))
            return None

    def _phase(self, job: Job, phase: Phase, only: Progress | None = None) -> None:
        self._change(job, partial(replace, phase=phase, since=time.monotonic()), only)

    def _fail(self, job: Job, failure: Failure) -> None:
        def failed(progress: Progress) -> Progress:
            return progress.failed(failure) if progress.outcome == "running" else progress

        self._change(job, failed)

    def _change(
        self, job: Job, change: Callable[[Progress], Progress], only: Progress | None = None
    ) -> None:
        """Change all replies of a job, or one of them, wherever they stand now."""
        keys = job.replies if only is None else (only.key,)

        def changed(session: Session) -> Session:
            for key in keys:
                progress = session.progress(key)
                if progress is not None:  # else the visitor has cleared it meanwhile
                    session = session.with_progress(change(progress))
            return session

        self._store.update(job.key, changed)


def _ended(progress: Progress) -> Progress:
    """A reply that was never begun, and will not be."""
    if progress.outcome != "running":
        return progress
    return replace(progress, phase="over", outcome="stopped")


def _ranking(replies: Sequence[Progress], dialogue: Dialogue) -> Ranking:
    texts = [reply.reply.strip() for reply in replies]
    history = [said.text for said in dialogue]
    return rank([_reward(reply) for reply in replies], texts, history, _encoder([*texts, *history]))


def _reward(reply: Progress) -> float | None:
    if reply.record is None or reply.record.judgement is None:
        return None
    return reply.record.judgement.reward().total


def _encoder(samples: Sequence[str]) -> SentenceEncoder | None:
    """Load the shipped encoder, if it can read these texts."""
    try:
        return load_encoder(samples=samples)
    except ConfigError:
        return None  # a language that it does not know
    except CheckpointError as error:
        logger.error("the encoder could not be loaded: %s", error)
        return None
