"""Turns questions into texts: many requests at a time, whatever goes wrong.

Two kinds of failure are kept apart.

- The text is unusable (incomplete JSON, the wrong language). The question is asked again with another
  seed, up to `tries` times in all. Each attempt is stored, so the next start does not repeat it.
- There is no text (429, 5xx, time-out, lost connection). The same request is sent again with the
  same seed, up to `retries` times. If that fails too, the question stays unanswered: nothing is
  stored, and the next start asks it again.

Errors that no retry can cure (wrong key, address or model) end the work, and so do `STREAK`
unanswered questions in a row.

The text of an endpoint depends on the question and its seed alone. A checkpoint in this process
writes in batches, and there the last bits of a number depend on the batch. Batches are therefore
always cut in the same way: from blocks of fixed size, second attempts first. Stored attempts take
their places in the batch, so a resumed run forms the batches of an uninterrupted one.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Generator as Yielding
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from compeer_core.backends.protocol import Message
from compeer_core.errors import BackendError, CompeerError, InputError
from training.cer.requests.engines import cut
from training.cer.requests.generators import BatchGenerator, GeneratorSettings, Prompt, Written
from training.cer.requests.response_store import Attempt
from training.cer.requests.seeding import seed_for
from training.stages import StoppedEarly

Check = Callable[[str, str], str | None]
"""Takes a question's key and a text. Returns None if the text is usable, else the reason in a few
words that can be counted ("incomplete JSON", "wrong language"). Must be picklable: a module's function,
or a frozen dataclass with `__call__`."""

STREAK = 20
"""Unanswered questions in a row that end the work."""
AHEAD = 2
"""Questions read ahead for each request in flight: the one that runs and one that waits."""
WINDOW = 64
"""Answers, for each request in flight, that may wait for an earlier one."""
BATCHES_PER_BLOCK = 8
"""Enough for second attempts to share batches."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Question:
    """What a generator is asked. The key is unique under its label and the same in every run."""

    key: str
    messages: tuple[Message, ...]
    seed: int

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of the n-th attempt; only the first one uses the question's own seed."""
        seed = self.seed if number == 1 else seed_for(self.seed, "try", str(number))
        return Prompt(self.messages, seed)


@dataclass(frozen=True)
class Task:
    """A question and its stored attempts."""

    question: Question
    request: str
    """Hash by which the attempts are stored."""
    stored: tuple[Attempt, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """All attempts at a question, stored ones included."""

    key: str
    attempts: tuple[Attempt, ...]
    unanswered: str | None = None
    """Why the last request got no text, if it got none."""


class BudgetSpentError(CompeerError):
    """The allowed number of requests has been sent. Answers are stored; start again to resume."""


class NotAnsweredError(CompeerError):
    """A request got no text; the message is the reason, in words that can be counted."""


class ClosedError(CompeerError):
    """No further requests are sent."""


class Allowance(Protocol):
    """A limit on the number of requests."""

    def take(self, count: int = 1) -> None:
        """Count requests that are about to be sent.

        Raises:
            BudgetSpentError: Fewer are left; nothing is counted.
        """
        ...


class Meter:
    """Spaces requests to the allowed rate, and counts them and their failures. Thread-safe."""

    def __init__(self, requests_per_minute: float | None, allowance: Allowance) -> None:
        self.requests = 0
        self.faults: Counter[str] = Counter()
        """Requests that got no text, by reason."""
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._allowance = allowance
        self._lock = threading.Lock()
        self._next = 0.0

    def admit(self, count: int = 1) -> float:
        """Return 0 and count requests that may be sent now, else the seconds to wait.

        Raises:
            BudgetSpentError: The budget is spent.
        """
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return self._next - now
            self._allowance.take(count)
            self._next = now + self._interval * count
            self.requests += count
            return 0.0

    def hold(self, seconds: float) -> None:
        """Admit nothing for a while."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)

    def failed(self, reason: str) -> None:
        """Count a request that got no text."""
        self.add(0, {reason: 1})

    def add(self, requests: int, faults: Mapping[str, int]) -> None:
        """Count requests that were admitted elsewhere, and failures by reason."""
        with self._lock:
            self.requests += requests
            self.faults.update(faults)


@dataclass
class Dispatch:
    """What the requests for one sequence of questions share."""

    settings: GeneratorSettings
    check: Check
    meter: Meter
    save: Callable[[Sequence[Attempt]], None]
    """Stores new attempts. Called before their outcome is yielded."""
    generator: Callable[[], BatchGenerator]
    """Opens the checkpoint, or returns the open one: none is loaded if all answers are stored."""
    is_stopping: Callable[[], bool] = lambda: False
    """Whether the user wants to stop."""

    @property
    def max_attempts(self) -> int:
        """How many texts a question may cost."""
        greedy = self.settings.in_process and self.settings.temperature == 0
        return 1 if greedy else self.settings.tries

    def is_settled(self, attempts: Sequence[Attempt]) -> bool:
        """Whether a text is usable, or no attempt is left."""
        return len(attempts) >= self.max_attempts or any(
            attempt.text is not None for attempt in attempts
        )

    def checked(self, task: Task, number: int, written: Written) -> Attempt:
        """Check a text; the attempt holds it only if it is usable."""
        key = task.question.key
        problem = self.check(key, written.text)
        text = written.text if problem is None else None
        return Attempt(task.request, number, key, text, problem, written.tokens)

    def raise_if_stopping(self) -> None:
        """Raise `StoppedEarly` if the user wants to stop."""
        if self.is_stopping():
            raise StoppedEarly("stopped; answers so far are stored, start again to resume")


def outcomes(dispatch: Dispatch, tasks: Iterable[Task]) -> Yielding[Outcome, None, None]:
    """Yield the outcome of each task, in order.

    Raises:
        CompeerError: The work had to end. Requests in flight were awaited and their texts stored.
    """
    if dispatch.settings.is_endpoint:
        yield from _from_endpoint(dispatch, tasks)
        return
    for block in blocks(tasks, dispatch.settings):
        yield from _from_batches(dispatch, block)


def blocks(tasks: Iterable[Task], settings: GeneratorSettings) -> Iterator[list[Task]]:
    """Cut tasks into blocks of fixed size."""
    return cut(tasks, settings.in_flight * BATCHES_PER_BLOCK)


class Streak:
    """Counts unanswered questions in a row."""

    def __init__(self, author: str) -> None:
        self._author = author
        self._length = 0

    def add(self, outcome: Outcome) -> None:
        """Count an outcome; raise `BackendError` if the streak is too long."""
        self._length = 0 if outcome.unanswered is None else self._length + 1
        if self._length >= STREAK:
            raise BackendError(
                f"{self._author}: {STREAK} questions in a row got no answer (last reason: "
                f"{outcome.unanswered}); answers so far are stored, start again when it works"
            )


# --- an endpoint: requests one by one, many at a time ---------------------------------------------


def _from_endpoint(dispatch: Dispatch, tasks: Iterable[Task]) -> Iterator[Outcome]:
    """Keep `in_flight` requests running; a slow one blocks the rest only when `WINDOW` is full."""
    in_flight = dispatch.settings.in_flight
    unread: Iterator[Task] = iter(tasks)
    for task in unread:
        if not dispatch.is_settled(task.stored):
            unread = itertools.chain([task], unread)
            break
        dispatch.raise_if_stopping()
        yield Outcome(task.question.key, task.stored)
    else:
        return
    from training.cer.requests.endpoint_requests import EndpointRequests  # the SDK loads slowly

    window: deque[Future[Outcome]] = deque()
    is_exhausted = False
    streak = Streak(dispatch.settings.author)
    with EndpointRequests(dispatch, AHEAD * in_flight) as requests:
        while True:
            dispatch.raise_if_stopping()
            requests.raise_failure()
            while not is_exhausted and len(window) < WINDOW * in_flight and requests.has_room():
                if (following := next(unread, None)) is None:
                    is_exhausted = True
                elif dispatch.is_settled(following.stored):
                    window.append(Future())
                    window[-1].set_result(Outcome(following.question.key, following.stored))
                else:
                    window.append(requests.submit(following))
            if not window:
                return
            if window[0].done():
                requests.raise_failure()
                outcome = window.popleft().result()
                streak.add(outcome)
                yield outcome
            else:
                requests.wait(POLL_SECONDS)


# --- a checkpoint in this process, or a script: batches -------------------------------------------


def _from_batches(dispatch: Dispatch, block: Sequence[Task]) -> Iterator[Outcome]:
    """Write the texts of a block in batches."""
    attempts: list[list[Attempt]] = [[] for _ in block]
    unanswered: dict[int, str] = {}
    waiting = deque(range(len(block)))
    following = 0
    while waiting:
        batch = [waiting.popleft() for _ in range(min(dispatch.settings.in_flight, len(waiting)))]
        # A stored attempt keeps its place in the batch, so that later batches are the same.
        missing = [i for i in batch if len(block[i].stored) <= len(attempts[i])]
        rows = [(block[i], len(attempts[i]) + 1) for i in missing]
        written = dict(zip(missing, _write(dispatch, rows), strict=True))
        again = []
        for i in batch:
            result = written[i] if i in written else block[i].stored[len(attempts[i])]
            if isinstance(result, str):
                unanswered[i] = result
                continue
            attempts[i].append(result)
            if not dispatch.is_settled(attempts[i]):
                again.append(i)
        waiting.extendleft(reversed(again))
        while following < len(block) and (not waiting or following < min(waiting)):
            key = block[following].question.key
            yield Outcome(key, tuple(attempts[following]), unanswered.get(following))
            following += 1


def _write(dispatch: Dispatch, rows: Sequence[tuple[Task, int]]) -> list[Attempt | str]:
    """Make the n-th attempt of each row; a string says why a row has none."""
    if not rows:
        return []
    dispatch.raise_if_stopping()
    while (wait := dispatch.meter.admit(len(rows))) > 0:
        time.sleep(min(wait, POLL_SECONDS))
        dispatch.raise_if_stopping()
    texts = dispatch.generator().write([task.question.prompt(number) for task, number in rows])
    results: list[Attempt | str] = []
    for (task, number), text in zip(rows, texts, strict=True):
        if isinstance(text, Written):
            results.append(dispatch.checked(task, number, text))
        else:
            results.append(text.code if isinstance(text, InputError) else str(text))
            dispatch.meter.failed(str(results[-1]))
    dispatch.save([result for result in results if isinstance(result, Attempt)])
    return results
