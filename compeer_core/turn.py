"""One turn of one visitor: the policy generates, the judge scores live, a record remains.

The page and the API call `take_turn`. It merges generation and judging into one stream of events,
ends at a stop or at its deadline, and always closes with a `TurnDone`. If the policy fails, its
partial text remains; if the judge fails, the reply is unaffected.

With the gate (`compeer_core.gate`), a draw with a fault is rejected before its reply is judged, and
the turn is drawn again with another seed, up to `FRESH_DRAWS` times. If the last draw has a fault, too,
the reply is withheld: the record's reading has none.

Visitors see the messages of a `BackendError`, so backends put no paths, addresses or keys into them.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from compeer_core.dialogue import Dialogue
from compeer_core.errors import BackendError
from compeer_core.gate import RejectedDraw, faults_of, previous_reply
from compeer_core.logs import trace_of
from compeer_core.policy import Controls, Policy
from compeer_core.reasoning import Event, Part, PartFinished, Reading, Step, TurnFinished
from compeer_core.unifireward import (
    Judge,
    Judgement,
    NotApplicable,
    ReplyOutcome,
    StepOutcome,
    Unscorable,
)

logger = logging.getLogger(__name__)

SEEDS = 2**31
"""Random seeds are below this, so that every backend accepts them."""

FRESH_DRAWS = 3
"""How often a turn is drawn again after the gate has rejected it. Greedy decoding is not repeated."""

TOO_SLOW = "the reply took longer than {seconds:g} seconds and was stopped"
STOPPED_FIRST = Unscorable("the turn was stopped before this was judged")
LATE_FIRST = Unscorable("the time was up before this was judged")

REJECTED = NotApplicable("the gate rejected the reply, so it is not judged")

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class StepJudged:
    """The judge has scored a step."""

    part: Part
    outcome: StepOutcome


@dataclass(frozen=True)
class ReplyJudged:
    """The judge has scored the reply."""

    outcome: ReplyOutcome


@dataclass(frozen=True)
class TurnRecord:
    """The record of a turn."""

    model: str
    judge: str | None
    seed: int
    """Of the last draw, or of the one that `compeer_core.forced_turn` keeps, like the fields below. With the
    same model, dialogue and controls, it gives the same turn."""
    raw: str
    """The full text that the model generated."""
    reading: Reading
    """Of that text, but without the reply if it is withheld."""
    judgement: Judgement | None
    """None without a judge, and for a turn that a stop, a failure or the deadline cut off: its missing
    parts are not the model's fault, so there is no format penalty."""
    status: Status
    error: str | None
    """One sentence for the visitor if the status is "failed"."""
    first_token_seconds: float | None
    seconds: float
    """From the start to the last token."""
    scoring_seconds: float
    """From the last token to the last score."""
    tokens: int
    """Of all draws."""
    controls: Controls = Controls()  # noqa: RUF009  (frozen)
    """The controls, with the seed that was used."""
    gated: bool = False
    """Whether the gate was on."""
    rejected: tuple[RejectedDraw, ...] = ()
    """The rejected draws, in order; the last draw, too, if its reply is withheld."""
    withheld: bool = False
    """Whether the gate rejected the last draw."""

    @property
    def draws(self) -> int:
        """The number of draws."""
        return len(self.rejected) + (not self.withheld)

    @property
    def reward(self) -> float | None:
        """The total reward, None if the turn was not judged or its reply is withheld."""
        if self.withheld or self.judgement is None:
            return None
        return self.judgement.reward().total


@dataclass(frozen=True)
class TurnDone:
    """The last event of every turn."""

    record: TurnRecord


@dataclass(frozen=True)
class DrawRejected:
    """The gate has rejected the turn so far, and it is drawn again."""

    draw: RejectedDraw
    """What was generated so far; `TurnDone` has it again."""


TurnEvent = Event | StepJudged | ReplyJudged | DrawRejected | TurnDone


class Halt(threading.Event):
    """Set when the visitor stops the turn, and at the deadline."""

    def __init__(self, stop: threading.Event, seconds: float) -> None:
        super().__init__()
        self._stop = stop
        self._ends_at = time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._ends_at

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def is_set(self) -> bool:
        return super().is_set() or self.is_stopped or self.is_late

    def wait(self, timeout: float | None = None) -> bool:
        left = self._ends_at - time.monotonic()
        self._stop.wait(max(0.0, left if timeout is None else min(timeout, left)))
        return self.is_set()


def take_turn(
    policy: Policy,
    judge: Judge | None,
    dialogue: Dialogue,
    controls: Controls,
    stop: threading.Event,
    reference: str | None = None,
    deadline_seconds: float = 120,
    *,
    gated: bool = False,
) -> Generator[TurnEvent, None, None]:
    """Generate a turn and judge it live.

    A step is judged as soon as it is finished, while the policy goes on; a policy and a judge that share one model
    take turns. All verdicts on steps come before `TurnFinished`.

    Args:
        policy: The model that answers.
        judge: The judge, if any.
        dialogue: The history; its last utterance is the seeker's.
        controls: A random seed is used if the sampling has none.
        stop: Set it from any thread to end the turn.
        reference: A reply to compare with.
        deadline_seconds: Time limit of the turn, judging and fresh draws included.
        gated: Whether draws with a fault are rejected, see `compeer_core.gate`.

    Raises:
        InputError: The controls are invalid; the model was not called.
    """
    started = time.monotonic()
    halt = Halt(stop, deadline_seconds)
    sampling = policy.sampling if controls.sampling is None else controls.sampling
    first_seed = secrets.randbelow(SEEDS) if sampling.seed is None else sampling.seed
    fresh_draws = FRESH_DRAWS if sampling.temperature > 0 else 0
    rejected: tuple[RejectedDraw, ...] = ()
    tokens = 0
    first_token_seconds: float | None = None
    while True:
        before = time.monotonic() - started
        seed = draw_seed(first_seed, len(rejected))
        drawn = replace(controls, sampling=replace(sampling, seed=seed))
        record = yield from _draw(
            policy, judge, dialogue, drawn, halt, reference, deadline_seconds, gated=gated
        )
        tokens += record.tokens
        rejected += record.rejected
        if first_token_seconds is None and record.first_token_seconds is not None:
            first_token_seconds = before + record.first_token_seconds
        may_draw_again = len(rejected) <= fresh_draws and not halt.is_set()
        if not (record.withheld and record.status == "finished" and may_draw_again):
            break
        yield DrawRejected(rejected[-1])

    yield TurnDone(
        replace(
            record,
            first_token_seconds=first_token_seconds,
            seconds=before + record.seconds,
            tokens=tokens,
            rejected=rejected,
        )
    )


def draw_seed(first_seed: int, draw: int) -> int:
    """Return the seed of a draw, from 0 to `SEEDS` - 1.

    Args:
        first_seed: The seed of the turn; draw 0 uses it as it is.
        draw: The number of draws before it. The seeds of different fresh draws are independent
            (`numpy.random.SeedSequence`).
    """
    if draw == 0:
        return first_seed
    return int(np.random.SeedSequence((first_seed, draw)).generate_state(1)[0]) % SEEDS


def _draw(
    policy: Policy,
    judge: Judge | None,
    dialogue: Dialogue,
    controls: Controls,
    halt: Halt,
    reference: str | None,
    deadline_seconds: float,
    *,
    gated: bool,
) -> Generator[TurnEvent, None, TurnRecord]:
    """Draw and judge a turn once; the controls have a seed. Returns the record of this draw alone."""
    assert controls.sampling is not None
    assert controls.sampling.seed is not None
    seed = controls.sampling.seed
    started = time.monotonic()
    failure: str | None = None
    reading: Reading | None = None
    judgement: Judgement | None = None
    first_token_seconds: float | None = None
    steps: list[StepOutcome] = []

    with (
        closing(policy.respond(dialogue, controls, halt)) as stream,
        closing(_LiveJudge(judge, dialogue, halt)) as live_judge,
    ):
        try:
            for event in stream:
                is_last = isinstance(event, TurnFinished)
                for judged in live_judge.judged(wait=is_last):
                    steps.append(judged.outcome)
                    yield judged
                if isinstance(event, TurnFinished):
                    reading = event.reading
                elif first_token_seconds is None:
                    first_token_seconds = time.monotonic() - started
                yield event
                live_judge.begin_step(event)
        except BackendError as error:
            failure = str(error)
            logger.warning("policy %s failed: %s", policy.name, trace_of(error))
        assert reading is not None  # a stream always ends with a TurnFinished
        written = time.monotonic()

        status: Status = "finished"
        if failure is not None:
            status = "failed"
        elif halt.is_set() and not reading.is_complete:
            status = "stopped" if halt.is_stopped else "failed"
            failure = None if halt.is_stopped else TOO_SLOW.format(seconds=deadline_seconds)
        is_finished = status == "finished"
        faults = (
            faults_of(reading, previous_reply(dialogue), is_finished=is_finished) if gated else ()
        )
        if judge is not None and is_finished:
            if not reading.is_complete:
                judgement = Judgement.of_incomplete(has_reference=reference is not None)
            elif faults:
                judgement = Judgement(tuple(steps), REJECTED, is_complete=True)
            else:
                verdict = live_judge.judge_reply(reading.turn.reply, reference)
                yield ReplyJudged(verdict)
                judgement = Judgement(tuple(steps), verdict, is_complete=True)
        tokens = stream.tokens

    return TurnRecord(
        model=policy.name,
        judge=None if judge is None else judge.name,
        seed=seed,
        raw=reading.raw,
        reading=replace(reading, reply=None) if faults else reading,
        judgement=judgement,
        status=status,
        error=failure,
        first_token_seconds=first_token_seconds,
        seconds=written - started,
        scoring_seconds=time.monotonic() - written,
        tokens=tokens,
        controls=controls,
        gated=gated,
        rejected=(RejectedDraw(seed, reading.raw, faults),) if faults else (),
        withheld=bool(faults),
    )


class _LiveJudge:
    """The judge of a turn: absent, active, or out of time.

    It judges steps in a thread of its own, so that the policy need not wait for verdicts. With a shared model that
    keeps batches full, and with a judge elsewhere it hides the network.
    """

    def __init__(self, judge: Judge | None, dialogue: Dialogue, halt: Halt) -> None:
        self._session = None if judge is None else judge.open(dialogue)
        self._halt = halt
        self._thread = None if judge is None else ThreadPoolExecutor(1, "judge")
        self._asked: deque[Future[StepJudged]] = deque()

    def begin_step(self, event: Event) -> None:
        """Begin to judge the step that `event` finishes, if any."""
        if self._thread is None or not isinstance(event, PartFinished):
            return
        if event.content is not None and not isinstance(event.content, str):
            self._asked.append(self._thread.submit(self._judge_step, event.part, event.content))

    def _judge_step(self, part: Part, step: Step) -> StepJudged:
        assert self._session is not None
        return StepJudged(part, self._too_late() or self._session.step(part, step))

    def judged(self, *, wait: bool = False) -> Iterator[StepJudged]:
        """Yield the verdicts that are new, in order; those that are missing too if `wait`."""
        while self._asked and (wait or self._asked[0].done()):
            yield self._asked.popleft().result()

    def judge_reply(self, reply: str, reference: str | None) -> ReplyOutcome:
        assert self._session is not None
        if reference is None:
            return self._session.reply(reply, None)
        return self._too_late() or self._session.reply(reply, reference)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self._session is not None:
            self._session.close()

    def _too_late(self) -> Unscorable | None:
        if not self._halt.is_set():
            return None
        return STOPPED_FIRST if self._halt.is_stopped else LATE_FIRST
