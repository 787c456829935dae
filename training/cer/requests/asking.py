"""Asks a generator many questions at a time, and each one once, however often a run is killed.

```python
asker = Asker(settings, folder, Budget(10_000))
for answer in asker.ask(questions, usable, label="filter"):
    ...
```

`training.cer.requests.request_dispatch` turns questions into texts. Each text is stored
(`training.cer.requests.response_store`) before it is yielded, so a killed run asks only what is not
stored yet, and gives the answers of an uninterrupted one. On Ray Data the workers send the
requests, block by block, and this process stores their texts.
"""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Generator as Yielding
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from compeer_core.config import FrozenModel
from compeer_core.errors import CompeerError
from training.cer.requests.engines import Engine, RayEngine
from training.cer.requests.generators import (
    BatchGenerator,
    GeneratorSettings,
    open_generator,
    reserved_tokens,
)
from training.cer.requests.request_dispatch import (
    Allowance,
    BudgetSpentError,
    Check,
    Dispatch,
    Meter,
    Outcome,
    Question,
    Streak,
    Task,
    blocks,
    outcomes,
)
from training.cer.requests.response_store import FILE_NAME, Attempt, ResponseStore
from training.common.interrupts import StopRequest
from training.common.progress import track

__all__ = ["Answer", "Asker", "Budget", "BudgetSpentError", "Check", "Counts", "Question"]


class Answer(FrozenModel):
    """The answer to a question."""

    key: str
    text: str | None
    """None if there is no usable text."""
    problem: str | None = None
    """Why there is none."""
    tries: int
    """Texts that were checked. Fewer than allowed if a request got no text at all: the next start
    asks such a question again."""


class Counts(FrozenModel):
    """How the questions so far ended.

    Only `unanswered`, `requests` and `faults` depend on whether a run was interrupted.
    """

    asked: int = 0
    """Questions that ended, by stored attempts or new ones."""
    answered: int = 0
    """Those with a usable text."""
    retried: Mapping[str, int] = {}
    """Unusable texts that were followed by another attempt, by reason."""
    failed: Mapping[str, int] = {}
    """Questions without a usable text, by the reason of the last attempt."""
    tokens: int = 0
    """Tokens written in all attempts."""
    unanswered: Mapping[str, int] = {}
    """Questions whose last request got no text, by reason; the next start asks them again."""
    requests: int = 0
    """Requests of this start, retries included."""
    faults: Mapping[str, int] = {}
    """Requests of this start that got no text, by reason."""


class Budget:
    """How many requests a run may send, over all of its askers. Thread-safe.

    In process, a request is a row of a batch, and a batch that exceeds the budget is not started.
    """

    def __init__(self, max_requests: int | None = None) -> None:
        self.max_requests = max_requests
        self.spent = 0
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> None:
        """See `Allowance.take`."""
        with self._lock:
            if self.max_requests is not None and self.spent + count > self.max_requests:
                raise BudgetSpentError(
                    f"the budget of {self.max_requests} requests is spent ({self.spent} were sent);"
                    " answers so far are stored, start again to resume"
                )
            self.spent += count


class Asker:
    """Asks one generator, and stores its answers in a folder."""

    def __init__(
        self,
        settings: GeneratorSettings,
        folder: Path,
        budget: Budget | None = None,
        engine: Engine | None = None,
        *,
        stopping: StopRequest | None = None,
    ) -> None:
        """Prepare; nothing is loaded or sent before the first question.

        Args:
            settings: The generator.
            folder: Where answers are stored; several askers may share it.
            budget: Shared with the other askers of a run; None is unlimited.
            engine: Where requests come from: this process (None), or the workers of a `RayEngine`,
                each with a generator of its own.
            stopping: Ends the work with `StoppedEarly` once requests in flight have returned.

        Raises:
            ConfigError: The source of the generator cannot be parsed.
        """
        self.settings = settings
        self.name = settings.author
        """The author's name in records."""
        self._folder = folder
        self._budget = budget or Budget()
        self._engine = engine
        self._stopping = stopping
        self._generator: BatchGenerator | None = None
        self._opening = threading.Lock()
        # One meter for all questions: the rate is a limit of the endpoint.
        self._meter = Meter(settings.requests_per_minute, self._budget)
        self._totals: Counter[str] = Counter()
        self._reasons: dict[str, Counter[str]] = {
            name: Counter() for name in ("retried", "failed", "unanswered")
        }

    @cached_property
    def reserved(self) -> tuple[str, ...]:
        """The model's special tokens, for `compeer_core.prompts.neutralise`."""
        return reserved_tokens(self.settings)

    @property
    def counts(self) -> Counts:
        """How the questions of all labels ended so far."""
        reasons = {**self._reasons, "faults": self._meter.faults}
        by_reason = {name: dict(sorted(counter.items())) for name, counter in reasons.items()}
        return Counts(**self._totals, **by_reason, requests=self._meter.requests)

    def ask(
        self, questions: Iterable[Question], check: Check, *, label: str, total: int | None = None
    ) -> Iterator[Answer]:
        """Yield an answer to each question, in order.

        Memory holds the questions in flight, and answers that wait for an earlier one.

        Args:
            questions: Read slightly ahead of the answers.
            check: Decides whether a text is usable.
            label: What the questions are about, in two or three words, for the progress bar.
                Questions of different labels are different, whatever their keys.
            total: The number of questions, if known.

        Raises:
            BudgetSpentError: The budget is spent.
            StoppedEarly: The user wants to stop.
            BackendError: The generator cannot be used, or failed too often in a row.
        """
        with ResponseStore(self._folder / FILE_NAME) as store:
            dispatch = Dispatch(
                settings=self.settings,
                check=check,
                meter=self._meter,
                save=store.add,
                generator=self._open,
                is_stopping=lambda: self._stopping is not None and self._stopping.requested,
            )
            tasks = (self._task(store, label, question) for question in questions)
            if isinstance(self._engine, RayEngine):
                results = self._from_workers(self._engine, dispatch, tasks)
            else:
                results = outcomes(dispatch, tasks)
            try:
                for outcome in track(results, label, total=total):
                    yield self._answer(outcome)
            finally:
                results.close()  # before the store is closed: requests may be in flight

    def close(self) -> None:
        """Free the generator. May be called twice."""
        with self._opening:
            generator, self._generator = self._generator, None
        if generator is not None:
            generator.close()

    def _open(self) -> BatchGenerator:
        with self._opening:
            if self._generator is None:
                self._generator = open_generator(self.settings)
            return self._generator

    def _task(self, store: ResponseStore, label: str, question: Question) -> Task:
        # Another label, prompt, seed or setting gives another hash: such a question is asked anew.
        request = request_hash(self.settings, label, question)
        return Task(question, request, store.attempts(request))

    def _answer(self, outcome: Outcome) -> Answer:
        attempts = outcome.attempts
        text = next((attempt.text for attempt in attempts if attempt.text is not None), None)
        problem = None
        followed = attempts[:-1]
        if text is None and outcome.unanswered is not None:
            problem, followed = outcome.unanswered, attempts
            self._reasons["unanswered"][problem] += 1
        elif text is None:
            problem = attempts[-1].problem or ""
            self._reasons["failed"][problem] += 1
        problems = (attempt.problem for attempt in followed)
        self._reasons["retried"].update(reason for reason in problems if reason is not None)
        self._totals["asked"] += 1
        self._totals["answered"] += text is not None
        self._totals["tokens"] += sum(attempt.tokens for attempt in attempts)
        return Answer(key=outcome.key, text=text, problem=problem, tries=len(attempts))

    # --- on Ray Data ---------------------------------------------------------------------------

    def _from_workers(
        self, engine: RayEngine, dispatch: Dispatch, tasks: Iterable[Task]
    ) -> Yielding[Outcome, None, None]:
        rate = self.settings.requests_per_minute
        limit = self._budget.max_requests
        with engine.allowance(None if limit is None else limit - self._budget.spent) as allowance:
            work = _BlockWork(
                settings=self.settings,
                check=dispatch.check,
                requests_per_minute=None if rate is None else rate / engine.workers,
                allowance=allowance,
            )
            streak = Streak(self.name)
            failure: CompeerError | None = None
            for report in replace(engine, block=1).map(work, blocks(tasks, self.settings)):
                dispatch.save(report.saved)
                self._meter.add(report.requests, report.faults)
                self._budget.spent += report.requests
                if failure is not None:
                    continue
                try:
                    if report.error is not None:
                        raise report.error
                    for outcome in report.outcomes:
                        streak.add(outcome)
                        dispatch.raise_if_stopping()
                        yield outcome
                except CompeerError as error:
                    # Workers send nothing more, but texts that they have already are stored.
                    failure = error
                    allowance.close()
            if failure is not None:
                raise failure


@dataclass(frozen=True)
class _BlockReport:
    """The results of a block."""

    outcomes: Sequence[Outcome]
    saved: Sequence[Attempt]
    """New attempts, also of questions without an outcome."""
    requests: int
    faults: Mapping[str, int]
    error: CompeerError | None


@dataclass(frozen=True)
class _BlockWork:
    """Answers blocks of questions in a worker. An error is returned with all texts before it."""

    settings: GeneratorSettings
    check: Check
    requests_per_minute: float | None
    allowance: Allowance

    def __call__(self, tasks: Iterator[list[Task]]) -> Iterator[_BlockReport]:
        for block in tasks:
            saved: list[Attempt] = []
            meter = Meter(self.requests_per_minute, self.allowance)
            dispatch = Dispatch(
                settings=self.settings,
                check=self.check,
                meter=meter,
                save=saved.extend,
                generator=lambda: _worker_generator(self.settings),
            )
            results: list[Outcome] = []
            error = None
            try:
                results.extend(outcomes(dispatch, block))
            except CompeerError as caught:
                error = caught
            yield _BlockReport(results, saved, meter.requests, dict(meter.faults), error)


@lru_cache(maxsize=1)
def _worker_generator(settings: GeneratorSettings) -> BatchGenerator:
    """The generator of a worker process, open as long as the process lives."""
    return open_generator(settings)


def request_hash(settings: GeneratorSettings, label: str, question: Question) -> str:
    """Return 128 bits, as hex, that depend on all that decides the texts of a question."""
    values: list[Any] = [settings.made_under, label, question.key, question.seed]
    for message in question.messages:
        values.append(message.role)
        for part in message.content:
            text = part if isinstance(part, str) else hashlib.sha256(part.data).hexdigest()
            values.append([type(part).__name__, text])
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
