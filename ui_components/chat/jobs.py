"""Replies that are being generated in Chat: one at a time, or several to choose from (best of n)."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from compeer_core.best_of import Ranking, rank
from compeer_core.dialogue import Dialogue
from compeer_core.encoder import SentenceEncoder, load_encoder
from compeer_core.errors import CheckpointError, ConfigError, InputError
from compeer_core.grounding import StepChecker
from compeer_core.policy import Controls, Policy
from compeer_core.steering import GivenStep
from compeer_core.turn import SEEDS, TurnDone
from ui_components.shared.jobs import Job, JobRunner, ProgressChange, TurnRequest
from ui_components.shared.progress import Failure, Origin, Progress
from ui_components.shared.session import BestOf, Session, Turn
from ui_components.shared.session_store import SessionKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplyRequest:
    """What a reply is requested with."""

    model: str
    judge: str | None = None
    seed: int | None = None
    strategy: str | None = None
    """The strategy that the reply must follow."""
    must_show: bool = False
    """Draw again while the reply does not show the strategy."""
    given: tuple[GivenStep, ...] = ()
    """Steps that precede what the model writes."""
    origin: Origin = Origin()  # noqa: RUF009  (frozen)

    def progress(self, number: int = 0) -> Progress:
        """Return the initial state of a reply; of several, each has its own seed."""
        seed = None if self.seed is None else (self.seed + number) % SEEDS
        return Progress(
            model=self.model,
            judge=self.judge,
            seed=seed,
            key=secrets.token_urlsafe(9),
            origin=self.origin,
            since=time.monotonic(),
        )


class ReplyJob(Job):
    """One or several replies to one message."""

    def __init__(
        self, key: SessionKey, session: Session, replies: Sequence[Progress], grace_seconds: float
    ) -> None:
        super().__init__(key, len(replies), grace_seconds)
        self.dialogue = session.dialogue()
        self.checker = StepChecker(self.dialogue)
        self.turn = session.turns[-1]
        self.replies = tuple(replies)


class ReplyJobs(JobRunner[Session, ReplyJob]):
    """The jobs of Chat."""

    def begin(
        self,
        key: SessionKey,
        change: Callable[[Session], Session],
        request: ReplyRequest,
        index: int | None = None,
    ) -> ReplyJob:
        """Change a conversation and begin a reply to one of its messages, as one step.

        Args:
            key: The conversation.
            change: What sending does to it.
            request: Model, judge, seed and steering.
            index: The message; None is the last one.

        Raises:
            InputError: A reply is being generated (code ``already_writing``), the message must not
                be answered by a model (``left_to_people``), there is no room for one more, or the
                visitor deleted everything (``forgotten``); nothing changed.
        """
        progress = request.progress()

        def changed(session: Session) -> Session:
            session = change(session)
            return session.begun(len(session.turns) - 1 if index is None else index, progress)

        job = self._registered(key, changed, [progress])
        self._start(job, lambda: self._write(job, [request]))
        return job

    def begin_best_of(self, key: SessionKey, requests: Sequence[ReplyRequest]) -> ReplyJob:
        """Begin several replies to the last message and rank them when all have ended.

        Args:
            key: The conversation.
            requests: One per reply, with the same model and judge; the place of a reply is added to its seed.

        Raises:
            InputError: As for `begin`.
        """
        samples = tuple(request.progress(place) for place, request in enumerate(requests))
        job = self._registered(key, lambda session: session.sampled(samples), samples)
        self._start(job, lambda: self._write_best_of(job, requests))
        return job

    def update(self, key: SessionKey, change: Callable[[Session], Session]) -> None:
        """Change a conversation in which no reply is being generated.

        Raises:
            InputError: A reply is being generated (code ``already_writing``); nothing changed.
        """
        with self._reserved(key):
            self.store.update(key, change)

    def _registered(
        self, key: SessionKey, change: Callable[[Session], Session], replies: Sequence[Progress]
    ) -> ReplyJob:
        with self._reserved(key):
            session = self.store.update(key, change)
            if not session.turns:
                raise InputError("everything was deleted in the meantime", code="forgotten")
            job = ReplyJob(key, session, replies, self._grace_seconds)
            self._register(job)
        return job

    # --- in the threads of a job -----------------------------------------------------------------

    def _write(
        self, job: ReplyJob, requests: Sequence[ReplyRequest], reference: str | None = None
    ) -> None:
        first = requests[0]
        with self._admitted(job, [first.model]) as policies:
            policy = policies[first.model]
            judge = self._loaded_judge(job, first.judge)
            if (first.strategy or first.given) and not policy.backend.can_write:
                self._change(job, partial(replace, only_asked=True))
            turns = [
                TurnRequest(
                    policy,
                    _controls(request, policy, reply.seed),
                    reference if judge else None,
                    request.must_show,
                )
                for request, reply in zip(requests, job.replies, strict=True)
            ]
            self._generate(job, job.dialogue, judge, turns)

    def _write_best_of(self, job: ReplyJob, requests: Sequence[ReplyRequest]) -> None:
        best_of = job.turn.best_of
        assert best_of is not None  # `sampled` has set it
        compared = job.turn.reply(best_of.reference)
        reference = compared.reply.strip() if compared else None
        self._guard(job, lambda: self._write(job, requests, reference))
        self._abandon(job)  # samples that never began
        self._rank(job, best_of)

    def _rank(self, job: ReplyJob, best_of: BestOf) -> None:
        """Rank the replies of a group; samples without text are dropped. Different strategies have no ranks."""
        turn = _turn_of(self.store.get(job.key), job.turn.key)
        if turn is None:  # cleared in the meantime
            return
        replies = [reply for number in best_of.numbers if (reply := turn.reply(number))]
        written = [reply for reply in replies if reply.has_words]
        ranking = _ranking(written, job.dialogue) if written and not best_of.by_strategy else None
        numbers = tuple(reply.number for reply in written)
        ranked = replace(best_of, numbers=numbers, ranking=ranking)
        self.store.update(job.key, lambda session: session.ranked(turn.key, ranked))

    def _change(self, job: ReplyJob, change: ProgressChange, number: int | None = None) -> None:
        replies = job.replies if number is None else job.replies[number : number + 1]

        def changed(session: Session) -> Session:
            for reply in replies:
                before = session.progress(reply.key)
                if before is not None:  # not cleared in the meantime
                    progress = change(before).checked(before, job.checker)
                    session = session.with_progress(progress)
            return session

        self.store.update(job.key, changed)

    def _finish(self, job: ReplyJob, number: int, event: TurnDone) -> None:
        self._change(job, lambda progress: progress.after(event), number)
        self._metrics.count(event.record)

    def _fail(self, job: ReplyJob, failure: Failure, number: int | None = None) -> None:
        def failed(progress: Progress) -> Progress:
            return progress.failed(failure) if progress.outcome == "running" else progress

        self._change(job, failed, number)

    def _abandon(self, job: ReplyJob) -> None:
        self._change(job, _stopped)


def _controls(request: ReplyRequest, policy: Policy, seed: int | None) -> Controls:
    return Controls(
        strategy=request.strategy,
        given=request.given,
        sampling=replace(policy.sampling, seed=seed),
    )


def _stopped(progress: Progress) -> Progress:
    if progress.outcome != "running":
        return progress
    return replace(progress, phase="over", outcome="stopped")


def _turn_of(session: Session, key: str) -> Turn | None:
    return next((turn for turn in session.held() if turn.key == key), None)


def _ranking(replies: Sequence[Progress], dialogue: Dialogue) -> Ranking:
    texts = [reply.reply.strip() for reply in replies]
    history = [utterance.text for utterance in dialogue]
    rewards = [reply.record.reward if reply.record else None for reply in replies]
    return rank(rewards, texts, history, _encoder([*texts, *history]))


def _encoder(samples: Sequence[str]) -> SentenceEncoder | None:
    """Load the shipped encoder, if it can read these texts."""
    try:
        return load_encoder(samples=samples)
    except ConfigError:
        return None  # an unsupported language
    except CheckpointError as error:
        logger.error("the encoder could not be loaded: %s", error)
        return None
