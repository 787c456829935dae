"""A language model behind an endpoint says whether a judge's verdicts go together.

COMPEER asks GPT-4o so; its prompt is not public, ours is ``compeer_core/prompts/consistency.*.md``.
The model reads the turn and the verdicts, not whose they are, and answers one JSON object.

Two things can go wrong, and they are counted apart. An answer may be of no use (half a JSON, more
than the object): it is asked for again, `tries` times in all, then the question is given up. Or no
answer comes, however often the endpoint is tried (`compeer_core.backends.openai.client.Patience`): then
nothing is written down, and the next start asks again. A fault that no waiting cures ends the work,
and so do `IN_A_ROW` questions without an answer one after the other.

Answers are kept in a file by what was asked, so nothing is asked twice. The key of the endpoint comes
from the environment and is never written.
"""

import hashlib
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from pydantic import StrictBool, ValidationError

from compeer_core.backends.openai.policy import OpenAIBackend, Patience
from compeer_core.backends.protocol import Message, Sampling
from compeer_core.config import FrozenModel
from compeer_core.errors import BackendError, CompeerError, ConfigError, EndpointError, Fault
from compeer_core.registry import SourceKind, parse_source
from training.common.progress import track
from training.data.samples import read_records

_log = logging.getLogger(__name__)

IN_A_ROW = 20
"""Questions that may go without an answer one after the other before the work ends."""
MAX_ANSWER_TOKENS = 300
"""Room for a model that thinks aloud before its object, whose answer is then of no use."""
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")


class Answer(FrozenModel):
    """What came of a question, as a line of the file."""

    asked: str
    """Hash of the model's name and the question."""
    consistent: bool | None
    """None where no answer was of use."""
    problems: tuple[str, ...] = ()
    """Why each answer that was of no use was not."""


class _Object(FrozenModel):
    consistent: StrictBool


@dataclass
class Counts:
    """What became of the questions of this start."""

    asked: int = 0
    known: int = 0
    """Answered by an earlier start."""
    retried: Counter[str] = field(default_factory=Counter)
    """Answers of no use, by reason."""
    given_up: int = 0
    """Questions to which no answer was of use, earlier starts included."""
    unanswered: Counter[str] = field(default_factory=Counter)
    """Questions to which none came, by reason."""


class Assessor:
    """Asks one model, a few questions at a time."""

    def __init__(
        self,
        source: str,
        path: Path,
        *,
        in_flight: int = 8,
        tries: int = 3,
        patience: Patience | None = None,
    ) -> None:
        """Get ready; nothing is sent yet.

        Args:
            source: ``openai:URL#MODEL``.
            path: The file of answers; what is there already is not asked again.
            in_flight: Questions at a time.
            tries: Answers that a question may cost.
            patience: With the endpoint.

        Raises:
            ConfigError: The source is no endpoint, or the file holds something else.
        """
        self._source = assessor_source(source)
        self._path = path
        self._in_flight = in_flight
        self._tries = tries
        self._patience = patience
        self.counts = Counts()

    def ask(self, questions: Iterable[str]) -> dict[str, bool]:
        """Return the answers that there are, by question.

        Raises:
            BackendError: The endpoint cannot be used, or failed too often in a row.
        """
        wanted = {self._hash(question): question for question in dict.fromkeys(questions)}
        found = {each.asked: each for each in self._kept() if each.asked in wanted}
        self.counts.known += len(found)
        new = {asked: question for asked, question in wanted.items() if asked not in found}
        if new:
            with closing(OpenAIBackend(*self._source, self._patience)) as backend:
                for answer in self._answers(backend, new):
                    found[answer.asked] = answer
        self.counts.given_up += sum(each.consistent is None for each in found.values())
        return {
            wanted[each.asked]: each.consistent
            for each in found.values()
            if each.consistent is not None
        }

    def _kept(self) -> Iterator[Answer]:
        if self._path.exists():
            drop_truncated_line(self._path)
            yield from read_records(self._path, Answer)

    def _answers(self, backend: OpenAIBackend, new: dict[str, str]) -> Iterator[Answer]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        silent = 0
        with (
            self._path.open("a", encoding="utf-8") as file,
            ThreadPoolExecutor(self._in_flight, "assessor") as pool,
        ):
            try:
                asking = _in_flight(
                    pool,
                    (partial(self._one, backend, *item, stop) for item in new.items()),
                    2 * self._in_flight,
                )
                for came in track(asking, "consistency", total=len(new), unit="questions"):
                    self.counts.asked += 1
                    if isinstance(came, Answer):
                        silent = 0
                        self.counts.retried.update(came.problems)
                        file.write(came.model_dump_json() + "\n")
                        file.flush()
                        yield came
                        continue
                    reason = came.reason if isinstance(came, EndpointError) else "failed"
                    self.counts.unanswered[reason] += 1
                    silent += 1
                    if isinstance(came, EndpointError) and came.fault is Fault.SETTINGS:
                        raise came
                    if silent >= IN_A_ROW:
                        raise BackendError(
                            f"{silent} questions in a row went without an answer ({reason}); what "
                            "was answered is kept, and the next start goes on from there"
                        ) from came
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                backend.close()

    def _one(
        self, backend: OpenAIBackend, asked: str, question: str, stop: threading.Event
    ) -> Answer | CompeerError:
        problems: list[str] = []
        for number in range(self._tries):
            # The same question again would get the same answer from a greedy model.
            sampling = Sampling(
                temperature=0.7 if number else 0.0, max_new_tokens=MAX_ANSWER_TOKENS, seed=number
            )
            try:
                with closing(backend.open([Message("user", (question,))], sampling, stop)) as turn:
                    text = "".join(turn.generate())
            except CompeerError as error:
                return error
            try:
                return Answer(asked=asked, consistent=read_answer(text), problems=tuple(problems))
            except ValueError as error:
                problems.append(str(error))
        return Answer(asked=asked, consistent=None, problems=tuple(problems))

    def _hash(self, question: str) -> str:
        return hashlib.sha256(f"{self._source[1]}\n{question}".encode()).hexdigest()[:24]


def assessor_source(source: str) -> tuple[str, str]:
    """Return the URL and the model of an endpoint.

    Raises:
        ConfigError: The source is none.
    """
    where = parse_source(source)
    if where.kind is not SourceKind.ENDPOINT:
        raise ConfigError(f"assessor: {source!r} is no endpoint; write openai:URL#MODEL")
    return where.location, where.model


def read_answer(text: str) -> bool:
    """Return what an answer says.

    Raises:
        ValueError: It is not the one object that was asked for; the message says why.

    Example:
        >>> read_answer('{"consistent": false}')
        False
    """
    bare = _FENCE.sub("", text.strip())
    try:
        return _Object.model_validate(json.loads(bare)).consistent
    except ValidationError as error:
        raise ValueError("another object") from error
    except json.JSONDecodeError as error:
        raise ValueError("half a JSON" if bare.startswith("{") else "no JSON") from error


def drop_truncated_line(path: Path) -> None:
    """Cut off the end of a file of lines that was being written when its writer was killed."""
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _in_flight(
    pool: ThreadPoolExecutor, work: Iterator[Callable[[], Answer | CompeerError]], most: int
) -> Iterator[Answer | CompeerError]:
    """Yield results as they come, with at most so many handed to the pool."""
    running: set[Future[Answer | CompeerError]] = set()
    while True:
        running |= {pool.submit(each) for each in islice(work, most - len(running))}
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for each in done:
            yield each.result()
