"""Requests in flight: how questions become texts, many at a time, whatever goes wrong.

Two things can fail, and they are different.

- The text is of no use (half a JSON, the wrong language). It is asked for again with another seed,
  `tries` times in all. That is how it is, and it is written down: the next start does not ask again.
- No text comes (429, 5xx, time-out, lost connection). The same request is sent again, with the same
  seed, up to `retries` more times, later each time and not before `Retry-After` says. If that does
  not help, the question has no answer today; nothing is written down, and the next start asks it.

A fault that no waiting cures (wrong key, address or model) ends the work, and so do `IN_A_ROW`
questions without an answer one after the other.

A text depends on its question and its seed alone where an endpoint writes it. A checkpoint in this
process writes batches, and there the last bit of a number depends on the batch, so batches are cut
the same way each time: from blocks at fixed places in the list of questions, texts that have to be
written again first. Tries that are known from an earlier start take their places, so a run that was
interrupted makes the same batches as one that was not.
"""

import logging
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Generator as Yielding
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from compeer_core.backends.protocol import Message
from compeer_core.errors import BackendError, CompeerError, EndpointError, Fault, InputError
from training.cer.requests.generators import Generator, GeneratorSettings, Prompt, Written
from training.cer.requests.journal import Try
from training.cer.requests.seeding import seed_for
from training.stages import StoppedEarly

logger = logging.getLogger(__name__)

Check = Callable[[str, str], str | None]
"""Takes a question's key and the text; returns None if the text is usable, else why not, in a few
words that can be counted ("half a JSON", "wrong language"). It must be picklable: a function of a
module, or a frozen dataclass with `__call__`."""

IN_A_ROW = 20
"""Questions that may go without an answer one after the other before the work ends."""
LONGEST_BACKOFF_SECONDS = 30.0
LONGEST_HOLD_SECONDS = 600.0
"""An endpoint that asks for more than this wants us to come back another day."""
AHEAD = 2
"""Questions handed to the threads, for each thread: one that it works on and one that waits."""
WINDOW = 64
"""Answers, for each thread, that may wait for an earlier one."""
BATCHES_OF_A_BLOCK = 8
"""So that texts that are written again share batches."""
LOOK_UP_SECONDS = 0.2


@dataclass(frozen=True)
class Question:
    """What a generator is asked. The key is unique in its journal and stable between runs."""

    key: str
    messages: tuple[Message, ...]
    seed: int


class BudgetSpentError(CompeerError):
    """As many requests as allowed were sent. What was answered is kept; start again to go on."""


class Allowance(Protocol):
    """Says how many more requests may be sent."""

    def take(self, count: int = 1) -> None:
        """Count requests that are about to be sent.

        Raises:
            BudgetSpentError: There are not as many left; nothing is counted.
        """
        ...


@dataclass(frozen=True)
class Task:
    """A question, and what came of it in earlier starts."""

    question: Question
    asked: str
    """Hash of the question."""
    known: tuple[Try, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a question by now."""

    key: str
    tries: tuple[Try, ...]
    """All of them, known ones included."""
    unanswered: str | None = None
    """Why no text came, where none did."""


@dataclass
class Tally:
    """What was sent. Thread-safe."""

    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, count: int) -> None:
        with self.lock:
            self.requests += count

    def failed(self, reason: str) -> None:
        with self.lock:
            self.faults[reason] += 1


class Gate:
    """Lets requests pass one by one: as often as the rate allows, as many as the budget does."""

    def __init__(self, requests_per_minute: float | None, allowance: Allowance) -> None:
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._allowance = allowance
        self._lock = threading.Lock()
        self._next = 0.0

    def enter(self, closing: threading.Event, count: int = 1) -> None:
        """Wait for one's turn.

        Raises:
            BudgetSpentError: The budget is spent.
            ClosedError: It was closed before one's turn came.
        """
        while True:
            with self._lock:
                now = time.monotonic()
                wait = self._next - now
                if wait <= 0:
                    self._allowance.take(count)
                    self._next = now + self._interval * count
                    return
            if closing.wait(wait):
                raise ClosedError
            # The next one may have been held off meanwhile, or somebody else was faster.

    def hold(self, seconds: float) -> None:
        """Let nobody pass for a while."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


class ClosedError(CompeerError):
    """No further requests are sent."""


@dataclass
class Course:
    """What requests of one set of questions share."""

    settings: GeneratorSettings
    check: Check
    gate: Gate
    generator: Callable[[], Generator]
    """Opens it, or returns the one that is open: a checkpoint is not loaded if all is known."""
    keep: Callable[[Sequence[Try]], None]
    """Is called with the tries of a request, or of a batch, as soon as they are made."""
    tally: Tally = field(default_factory=Tally)
    stopping: Callable[[], bool] = lambda: False
    """Whether a person wants the work to stop."""
    closing: threading.Event = field(default_factory=threading.Event)
    """No further requests; those that were sent are waited for."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Drop everything."""

    @property
    def tries(self) -> int:
        """How many texts a question may cost."""
        exact = self.settings.in_process and self.settings.temperature == 0
        return 1 if exact else self.settings.tries

    def look_up(self) -> None:
        """See whether to go on.

        Raises:
            StoppedEarly: A person wants the work to stop.
        """
        if self.stopping():
            raise StoppedEarly("stopped; what was answered is kept, start again to go on")

    def end(self) -> None:
        """Drop everything that is still on its way."""
        self.closing.set()
        self.stop.set()

    def looked_at(self, task: Task, number: int, written: Written) -> Try:
        """Check a text."""
        key = task.question.key
        problem = self.check(key, written.text)
        text = written.text if problem is None else None
        return Try(
            key=key,
            asked=task.asked,
            number=number,
            text=text,
            problem=problem,
            tokens=written.tokens,
        )


def settled(tries: Sequence[Try], limit: int) -> bool:
    """Whether a question needs no further try: a text is usable, or there were enough."""
    return any(one.text is not None for one in tries) or len(tries) >= limit


def answered(course: Course, tasks: Iterable[Task]) -> Yielding[Outcome, None, None]:
    """Yield what comes of each task, in their order.

    Raises:
        CompeerError: The work had to end. What was sent before was waited for and kept.
    """
    try:
        if not course.settings.in_process:
            yield from _in_threads(course, tasks)
            return
        for block in blocks(tasks, course.settings):
            yield from _in_batches(course, block)
    finally:
        course.end()


def blocks(tasks: Iterable[Task], settings: GeneratorSettings) -> Iterator[list[Task]]:
    """Cut tasks into blocks at fixed places."""
    size = settings.in_flight * BATCHES_OF_A_BLOCK
    block: list[Task] = []
    for task in tasks:
        block.append(task)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


class Row:
    """Counts questions that went without an answer one after the other."""

    def __init__(self) -> None:
        self._length = 0

    def add(self, outcome: Outcome, author: str) -> None:
        """Take in the next outcome.

        Raises:
            BackendError: That makes too many.
        """
        self._length = 0 if outcome.unanswered is None else self._length + 1
        if self._length >= IN_A_ROW:
            raise BackendError(
                f"{author}: {IN_A_ROW} questions in a row got no answer, the last because it "
                f"{outcome.unanswered}; what was answered is kept: start again when it works"
            )


# --- one by one, in threads ----------------------------------------------------------------------


def _in_threads(course: Course, tasks: Iterable[Task]) -> Iterator[Outcome]:
    """Keep as many requests in flight as allowed, and yield in order.

    A slow request does not hold up the others until `WINDOW` answers wait for it.
    """
    threads = course.settings.in_flight
    coming = iter(tasks)
    begun: deque[Future[Outcome]] = deque()
    arrivals: queue.SimpleQueue[Future[Outcome]] = queue.SimpleQueue()
    underway = 0
    row = Row()
    exhausted = False
    pool = ThreadPoolExecutor(threads, thread_name_prefix="asking")
    try:
        while True:
            while not exhausted and underway < AHEAD * threads and len(begun) < WINDOW * threads:
                task = next(coming, None)
                if task is None:
                    exhausted = True
                elif settled(task.known, course.tries):
                    begun.append(_known(task))
                else:
                    future = pool.submit(_ask, course, task)
                    begun.append(future)
                    future.add_done_callback(arrivals.put)
                    underway += 1
            if not begun:
                return
            # Look at what has arrived, and wait for something only if there is nothing to yield.
            for future in _arrived(course, arrivals, wait=not begun[0].done()):
                underway -= 1
                row.add(future.result(), course.settings.author)
            while begun and begun[0].done():
                yield begun.popleft().result()
                if underway < threads and not exhausted:
                    break  # first give the threads something to do
    except CompeerError:
        course.closing.set()
        pool.shutdown(cancel_futures=True)  # what was sent is paid for: wait, and keep it
        raise
    finally:
        course.end()  # before the threads are waited for
        pool.shutdown(cancel_futures=True)


def _known(task: Task) -> "Future[Outcome]":
    future: Future[Outcome] = Future()
    future.set_result(Outcome(task.question.key, task.known))
    return future


def _arrived(
    course: Course, arrivals: "queue.SimpleQueue[Future[Outcome]]", *, wait: bool
) -> "Iterator[Future[Outcome]]":
    while True:
        course.look_up()
        try:
            yield arrivals.get(block=wait, timeout=LOOK_UP_SECONDS)
        except queue.Empty:
            if not wait:
                return
        else:
            wait = False


def _ask(course: Course, task: Task) -> Outcome:
    """Ask one question until its text is usable, or there were enough tries. Runs in a thread."""
    tries = list(task.known)
    while not settled(tries, course.tries):
        number = len(tries) + 1
        prompt = Prompt(task.question.messages, _seed(task.question, number))
        written = _text(course, prompt)
        if isinstance(written, str):
            return Outcome(task.question.key, tuple(tries), unanswered=written)
        made = course.looked_at(task, number, written)
        course.keep([made])
        tries.append(made)
    return Outcome(task.question.key, tuple(tries))


def _text(course: Course, prompt: Prompt) -> Written | str:
    """A text, or why none came."""
    settings = course.settings
    for failures in range(settings.retries + 1):
        course.gate.enter(course.closing)
        course.tally.sent(1)
        written = course.generator().write([prompt], course.stop)[0]
        if course.stop.is_set():
            raise ClosedError  # whatever has been read by now is not whole
        if isinstance(written, Written):
            return written
        reason = written.reason if isinstance(written, EndpointError) else str(written)
        course.tally.failed(reason)
        wait = _wait(course, written, failures)
        if wait is None or failures == settings.retries:
            return reason
        if course.closing.wait(wait):
            raise ClosedError
    raise AssertionError("a loop of at least one turn has returned")


def _wait(course: Course, error: CompeerError, failures: int) -> float | None:
    """How long to wait before the request is sent again; None if that is of no use."""
    settings = course.settings
    backoff = min(settings.backoff_seconds * 2.0**failures, LONGEST_BACKOFF_SECONDS)
    backoff *= random.uniform(0.5, 1.0)  # so that requests that failed together do not return so
    if isinstance(error, InputError):
        return None
    if not isinstance(error, EndpointError):
        return backoff
    if error.fault is Fault.SETTINGS:
        raise error
    if error.fault is Fault.REQUEST:
        return None
    asked_for = error.wait_seconds or 0.0
    if asked_for > LONGEST_HOLD_SECONDS:
        raise BackendError(
            f"{settings.author} {error.reason} and asks to be left alone for {asked_for:.0f} s; "
            "what was answered is kept: start again then"
        )
    if asked_for:
        course.gate.hold(asked_for)
    return max(backoff, asked_for)


def _seed(question: Question, number: int) -> int:
    """The seed of a try: the question's own for the first."""
    return question.seed if number == 1 else seed_for(question.seed, "try", str(number))


# --- in batches ----------------------------------------------------------------------------------


def _in_batches(course: Course, block: Sequence[Task]) -> Iterator[Outcome]:
    """Write a block in batches, and yield in order."""
    size = course.settings.in_flight
    tries: dict[int, list[Try]] = {place: [] for place in range(len(block))}
    unanswered: dict[int, str] = {}
    waiting = deque(range(len(block)))
    following = 0
    while waiting:
        course.look_up()
        batch = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        # A try that is known takes its place in the batch, so the next batch is what it would be.
        missing = [place for place in batch if len(block[place].known) <= len(tries[place])]
        made = _write(course, [(block[place], len(tries[place]) + 1) for place in missing])
        new = dict(zip(missing, made, strict=True))
        again = []
        for place in batch:
            one = new[place] if place in new else block[place].known[len(tries[place])]
            if isinstance(one, str):
                unanswered[place] = one
                continue
            tries[place].append(one)
            if not settled(tries[place], course.tries):
                again.append(place)
        waiting.extendleft(reversed(again))
        while following < len(block) and (not waiting or following < min(waiting)):
            task = block[following]
            yield Outcome(task.question.key, tuple(tries[following]), unanswered.get(following))
            following += 1


def _write(course: Course, rows: Sequence[tuple[Task, int]]) -> list[Try | str]:
    """Write the next try of each row; a string says why there is none."""
    if not rows:
        return []
    course.gate.enter(course.closing, len(rows))
    course.tally.sent(len(rows))
    prompts = [
        Prompt(task.question.messages, _seed(task.question, number)) for task, number in rows
    ]
    texts = course.generator().write(prompts, course.stop)
    if course.stop.is_set():
        raise ClosedError
    made: list[Try | str] = []
    for (task, number), text in zip(rows, texts, strict=True):
        if isinstance(text, Written):
            made.append(course.looked_at(task, number, text))
            continue
        reason = text.code if isinstance(text, InputError) else str(text)
        course.tally.failed(reason)
        made.append(reason)
    if kept := [one for one in made if isinstance(one, Try)]:
        course.keep(kept)
    return made
