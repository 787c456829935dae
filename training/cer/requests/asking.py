"""Questions to a generator, many at a time, each answered once whatever happens.

```python
asker = Asker(settings, folder, Budget(10_000), LocalEngine())
for answer in asker.ask(questions, usable, label="filter"):
    ...
```

`training.cer.requests.request_dispatch` is how questions become texts; here is what makes it last. Every text is
written to a journal (`training.cer.requests.journal`) before anybody sees it, so a run that is killed asks
only what it had not heard yet, and its answers are those of a run that was not. On Ray Data the
requests come from the workers, in blocks, and the journal stays with whoever asks: it is written
block by block, and holds the same tries.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Generator as Yielding
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from compeer_core.config import FrozenModel
from compeer_core.errors import CompeerError
from compeer_core.images import Image
from training.cer.requests.engines import Engine, RayEngine
from training.cer.requests.generators import (
    Generator,
    GeneratorSettings,
    open_generator,
    reserved_tokens,
)
from training.cer.requests.journal import Journal, Try
from training.cer.requests.request_dispatch import (
    Allowance,
    BudgetSpentError,
    Check,
    Course,
    Gate,
    Outcome,
    Question,
    Row,
    Tally,
    Task,
    answered,
    blocks,
)
from training.common.interrupts import StopRequest
from training.common.progress import track

__all__ = [
    "Answer",
    "Asker",
    "Budget",
    "BudgetSpentError",
    "Check",
    "Counts",
    "Estimate",
    "Question",
    "estimate",
]


class Answer(FrozenModel):
    """What came of a question."""

    key: str
    text: str | None
    """None where there is no usable text."""
    problem: str | None = None
    """Why there is none."""
    tries: int
    """Texts that were looked at. Fewer than allowed where no text came at all: such a question is
    asked again by the next start."""


class Counts(FrozenModel):
    """What became of the questions so far.

    All but `unanswered`, `requests` and `faults` are the same whether a run was interrupted or not.
    """

    asked: int = 0
    """Questions whose answer is known, from the journal or from the generator."""
    answered: int = 0
    """Those with a usable text."""
    retried: Mapping[str, int] = {}
    """Unusable texts that were followed by another try, by reason."""
    failed: Mapping[str, int] = {}
    """Questions for which no text was usable, by the last one's reason."""
    tokens: int = 0
    """Written by the generator, in all tries."""
    unanswered: Mapping[str, int] = {}
    """Questions to which no text came, by reason: the next start asks them again."""
    requests: int = 0
    """Sent since this start, repeated ones included."""
    faults: Mapping[str, int] = {}
    """Requests since this start that got no text, by reason."""


class Budget:
    """How many requests a run may send, over all of its askers. Thread-safe.

    In process, a request is a row of a batch, and a batch that the budget does not cover is not
    begun.
    """

    def __init__(self, max_requests: int | None = None) -> None:
        self.max_requests = max_requests
        self.spent = 0
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> None:
        """Count requests that are about to be sent.

        Raises:
            BudgetSpentError: There are not as many left; nothing is counted.
        """
        with self._lock:
            if self.max_requests is not None and self.spent + count > self.max_requests:
                raise BudgetSpentError(
                    f"the budget of {self.max_requests} requests is spent ({self.spent} were sent);"
                    " what was answered is kept, and the next start goes on from there"
                )
            self.spent += count


class Asker:
    """Asks one generator, and remembers its answers in a folder of journals."""

    def __init__(
        self,
        settings: GeneratorSettings,
        journal_folder: Path,
        budget: Budget | None = None,
        engine: Engine | None = None,
        *,
        stopping: StopRequest | None = None,
    ) -> None:
        """Get ready; nothing is loaded or sent before the first question.

        Args:
            settings: The generator.
            journal_folder: Where answers are kept, a file for each label and author.
            budget: Shared with the other askers of a run; None is without end.
            engine: Where requests come from: this process (None), or the workers of a `RayEngine`,
                each of which opens a generator of its own.
            stopping: Ends the work, once what was sent has come back, with `StoppedEarly`.

        Raises:
            ConfigError: The source of the generator cannot be read.
        """
        self.settings = settings
        self.name = settings.author
        """What records call whoever wrote."""
        self._folder = journal_folder
        self._budget = budget or Budget()
        self._engine = engine
        self._stopping = stopping
        self._generator: Generator | None = None
        self._opening = threading.Lock()
        # One gate for all that is asked: the rate is the endpoint's.
        self._gate = Gate(settings.requests_per_minute, self._budget)
        self._totals: dict[str, int] = Counter()
        self._reasons: dict[str, Counter[str]] = {
            name: Counter() for name in ("retried", "failed", "unanswered")
        }
        self._tally = Tally()

    @cached_property
    def reserved(self) -> tuple[str, ...]:
        """The model's special tokens, for `compeer_core.prompts.neutralise`."""
        return reserved_tokens(self.settings)

    @property
    def counts(self) -> Counts:
        """What became of the questions of all labels so far."""
        reasons = {name: dict(sorted(counter.items())) for name, counter in self._reasons.items()}
        faults = dict(sorted(self._tally.faults.items()))
        return Counts(**self._totals, **reasons, requests=self._tally.requests, faults=faults)

    def ask(
        self, questions: Iterable[Question], check: Check, *, label: str, total: int | None = None
    ) -> Iterator[Answer]:
        """Yield an answer to each question, in their order.

        Memory does not grow with the texts: it holds the questions in flight, the answers that wait
        for an earlier one, and some 300 bytes for each question that has been answered.

        Args:
            questions: Read a little ahead of the answers.
            check: Says whether a text is usable.
            label: What is asked, in two or three words: for the bar of progress, and the journal's
                name. Questions of one label have keys of their own.
            total: How many questions there are, if that is known.

        Raises:
            ConfigError: The journal was made under other settings.
            BudgetSpentError: The budget is spent.
            StoppedEarly: A person wanted to stop.
            BackendError: The generator cannot be used, or failed too often in a row.
        """
        with self._journal(label) as journal:
            tasks = (self._task(journal, question) for question in questions)
            course = Course(
                settings=self.settings,
                check=check,
                gate=self._gate,
                generator=self._opened,
                keep=journal.append,
                tally=self._tally,
                stopping=lambda: self._stopping is not None and self._stopping.requested,
            )
            if isinstance(self._engine, RayEngine):
                outcomes = self._from_workers(self._engine, course, tasks)
            else:
                outcomes = answered(course, tasks)
            try:
                for outcome in track(outcomes, label, total=total):
                    yield self._answer(outcome, course.tries)
            finally:
                outcomes.close()  # before the journal is: threads may be writing to it

    def close(self) -> None:
        """Free the generator. May be called twice."""
        with self._opening:
            generator, self._generator = self._generator, None
        if generator is not None:
            generator.close()

    def _opened(self) -> Generator:
        with self._opening:
            if self._generator is None:
                self._generator = open_generator(self.settings)
            return self._generator

    def _journal(self, label: str) -> Journal:
        name = re.sub(r"[^\w.\-]+", "-", f"{label}.{self.name}")
        return Journal(self._folder / f"{name}.jsonl", self.settings.made_under)

    def _task(self, journal: Journal, question: Question) -> Task:
        asked = _hash(question)
        # What was asked under this key before data, a prompt or the seed changed answers nothing.
        known = tuple(one for one in journal.of(question.key) if one.asked == asked)
        return Task(question, asked, known)

    def _answer(self, outcome: Outcome, limit: int) -> Answer:
        tries = outcome.tries
        text = next((one.text for one in tries if one.text is not None), None)
        problem = None
        followed = tries[:-1]
        if text is None and outcome.unanswered is not None:
            problem, followed = outcome.unanswered, tries
            self._reasons["unanswered"][problem] += 1
        elif text is None:
            problem = tries[-1].problem or ""
            self._reasons["failed"][problem] += 1
        self._reasons["retried"].update(one.problem for one in followed if one.problem is not None)
        self._totals["asked"] += 1
        self._totals["answered"] += text is not None
        self._totals["tokens"] += sum(one.tokens for one in tries)
        return Answer(key=outcome.key, text=text, problem=problem, tries=len(tries))

    # --- on Ray Data ---------------------------------------------------------------------------

    def _from_workers(
        self, engine: RayEngine, course: Course, tasks: Iterable[Task]
    ) -> Yielding[Outcome, None, None]:
        rate = self.settings.requests_per_minute
        limit = self._budget.max_requests
        with engine.allowance(None if limit is None else limit - self._budget.spent) as allowance:
            work = _Work(
                settings=self.settings,
                check=course.check,
                requests_per_minute=None if rate is None else rate / engine.workers,
                allowance=allowance,
            )
            row = Row()
            reports = replace(engine, block=1).map(work, blocks(tasks, self.settings))
            failure: CompeerError | None = None
            for report in reports:
                for tries in report.made:
                    course.keep(tries)
                self._tally.sent(report.requests)
                self._tally.faults.update(report.faults)
                self._budget.spent += report.requests
                if failure is not None:
                    continue
                try:
                    if report.error is not None:
                        raise report.error
                    for outcome in report.outcomes:
                        row.add(outcome, self.name)
                        course.look_up()
                        yield outcome
                except CompeerError as error:
                    # No worker sends anything more, but what others have made meanwhile is kept.
                    failure = error
                    allowance.close()
            if failure is not None:
                raise failure


@dataclass(frozen=True)
class _Report:
    """What a worker made of a block."""

    outcomes: Sequence[Outcome]
    made: Sequence[Sequence[Try]]
    """The new tries, as they belong together."""
    requests: int
    faults: Mapping[str, int]
    error: CompeerError | None


@dataclass(frozen=True)
class _Work:
    """Asks blocks in a worker. Errors are brought home, together with what was made before."""

    settings: GeneratorSettings
    check: Check
    requests_per_minute: float | None
    allowance: Allowance

    def __call__(self, tasks: Iterator[list[Task]]) -> Iterator[_Report]:
        gate = Gate(self.requests_per_minute, self.allowance)
        for block in tasks:
            made: list[Sequence[Try]] = []
            course = Course(
                settings=self.settings,
                check=self.check,
                gate=gate,
                generator=lambda: _opened_here(self.settings),
                keep=made.append,
            )
            outcomes: list[Outcome] = []
            error = None
            try:
                outcomes.extend(answered(course, block))
            except CompeerError as caught:
                error = caught
            tally = course.tally
            yield _Report(outcomes, made, tally.requests, dict(tally.faults), error)


@lru_cache(maxsize=1)
def _opened_here(settings: GeneratorSettings) -> Generator:
    """The generator of a worker process, which lives as long as the process."""
    return open_generator(settings)


def _hash(question: Question) -> str:
    """What a question is known by: its messages, pictures included, and its seed."""
    content = [
        [
            message.role,
            *(part if isinstance(part, str) else [_digest(part.data)] for part in message.content),
        ]
        for message in question.messages
    ]
    return _digest(json.dumps([content, question.seed]).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# --- what it would cost --------------------------------------------------------------------------

CHARACTERS_OF_A_TOKEN = 4.0
"""Latin script, a rule of thumb; English in the tokenizers of today's models has 4 to 4.5."""
CHARACTERS_OF_A_WIDE_TOKEN = 1.5
"""Chinese, Japanese and Korean: 1 to 1.8."""
PIXELS_OF_A_TOKEN = 28 * 28
"""Of a picture, as Qwen2.5-VL counts."""
TOKENS_OF_A_MESSAGE = 5
"""What a chat template writes around it."""


class Estimate(FrozenModel):
    """What questions would cost if each were answered at the first try."""

    requests: int
    input_tokens: int
    """Roughly: from the number of characters and pixels."""
    output_tokens: int
    """At most: no answer is longer than `max_new_tokens`."""
    price: float | None
    """At most, in the currency of the settings; None where they have no prices."""

    def __str__(self) -> str:
        price = "no prices are set" if self.price is None else f"at most {self.price:.2f}"
        return (
            f"{self.requests} requests, about {self.input_tokens} tokens read, "
            f"at most {self.output_tokens} written, {price}"
        )


def estimate(questions: Iterable[Question], settings: GeneratorSettings) -> Estimate:
    """Estimate what questions would cost. Nothing is sent."""
    requests = 0
    read = 0.0
    for question in questions:
        requests += 1
        for message in question.messages:
            read += TOKENS_OF_A_MESSAGE
            read += sum(_tokens(part, settings.sees_images) for part in message.content)
    written = requests * settings.max_new_tokens
    price = None
    if (
        settings.price_per_million_input is not None
        or settings.price_per_million_output is not None
    ):
        price = (
            read * (settings.price_per_million_input or 0.0)
            + written * (settings.price_per_million_output or 0.0)
        ) / 1e6
    return Estimate(requests=requests, input_tokens=round(read), output_tokens=written, price=price)


def _tokens(part: str | Image, sees_images: bool) -> float:
    if not isinstance(part, str):
        return part.width * part.height / PIXELS_OF_A_TOKEN if sees_images else 0.0
    wide = sum(character >= "\u2e80" for character in part)
    return wide / CHARACTERS_OF_A_WIDE_TOKEN + (len(part) - wide) / CHARACTERS_OF_A_TOKEN
