"""An LLM behind an endpoint assesses whether a judge's verdicts are consistent.

COMPEER uses GPT-4o for this; its prompt is not public, ours is ``compeer_core/prompts/consistency.*.md``.
The LLM sees the turn and the verdicts, not the judge's name, and answers with a JSON object.

Two kinds of failures are counted separately. An invalid answer (truncated JSON, extra text) is requested
again, up to `tries` times, then the question is given up. If there is no answer despite the endpoint's
retries (`compeer_core.backends.openai.client.Patience`), nothing is stored and the next run asks again.
Permanent errors and `IN_A_ROW` consecutive unanswered questions abort the work.

Answers are stored in a file by a hash of the question, so no question is asked twice. The API key comes
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
from training.common.jsonl import drop_truncated_line
from training.common.progress import track
from training.data.records import read_records

_log = logging.getLogger(__name__)

IN_A_ROW = 20
"""Maximum number of consecutive unanswered questions."""
MAX_ANSWER_TOKENS = 300
"""Enough to recognise (and reject) an LLM that reasons before its JSON object."""
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")


class Answer(FrozenModel):
    """The outcome of a question; a line of the file."""

    asked: str
    """Hash of the model's name and the question."""
    consistent: bool | None
    """None if no answer was valid."""
    problems: tuple[str, ...] = ()
    """The reason why each invalid answer was rejected."""


class _Object(FrozenModel):
    consistent: StrictBool


@dataclass
class Counts:
    """Counts of the questions of this run, by outcome."""

    asked: int = 0
    known: int = 0
    """Answered in an earlier run."""
    retried: Counter[str] = field(default_factory=Counter)
    """Invalid answers, by reason."""
    given_up: int = 0
    """Questions without a valid answer, including earlier runs."""
    unanswered: Counter[str] = field(default_factory=Counter)
    """Questions without any answer, by reason."""


class Assessor:
    """Sends questions to an LLM, several at a time."""

    def __init__(
        self,
        source: str,
        path: Path,
        *,
        in_flight: int = 8,
        tries: int = 3,
        patience: Patience | None = None,
    ) -> None:
        """Create an assessor; nothing is sent yet.

        Args:
            source: ``openai:URL#MODEL``.
            path: File of the answers; stored questions are not asked again.
            in_flight: Number of concurrent requests.
            tries: Maximum number of answers per question.
            patience: Retry settings of the endpoint.

        Raises:
            ConfigError: The source is not an endpoint.
        """
        self._source = assessor_source(source)
        self._path = path
        self._in_flight = in_flight
        self._tries = tries
        self._patience = patience
        self.counts = Counts()

    def ask(self, questions: Iterable[str]) -> dict[str, bool]:
        """Return the valid answers, by question.

        Raises:
            BackendError: The endpoint cannot be used, or failed too often in a row.
            ConfigError: The file contains something else.
        """
        by_hash = {self._hash(question): question for question in dict.fromkeys(questions)}
        answers = {each.asked: each for each in self._stored() if each.asked in by_hash}
        self.counts.known += len(answers)
        new = {key: question for key, question in by_hash.items() if key not in answers}
        if new:
            with closing(OpenAIBackend(*self._source, self._patience)) as backend:
                for answer in self._request(backend, new):
                    answers[answer.asked] = answer
        self.counts.given_up += sum(each.consistent is None for each in answers.values())
        return {
            by_hash[each.asked]: each.consistent
            for each in answers.values()
            if each.consistent is not None
        }

    def _stored(self) -> Iterator[Answer]:
        if self._path.exists():
            drop_truncated_line(self._path)
            yield from read_records(self._path, Answer)

    def _request(self, backend: OpenAIBackend, new: dict[str, str]) -> Iterator[Answer]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        unanswered = 0
        with (
            self._path.open("a", encoding="utf-8") as file,
            ThreadPoolExecutor(self._in_flight, "assessor") as pool,
        ):
            try:
                outcomes = _run_concurrently(
                    pool,
                    (partial(self._ask_one, backend, *item, stop) for item in new.items()),
                    2 * self._in_flight,
                )
                for outcome in track(outcomes, "consistency", total=len(new), unit="questions"):
                    self.counts.asked += 1
                    if isinstance(outcome, Answer):
                        unanswered = 0
                        self.counts.retried.update(outcome.problems)
                        file.write(outcome.model_dump_json() + "\n")
                        file.flush()
                        yield outcome
                        continue
                    reason = outcome.reason if isinstance(outcome, EndpointError) else "failed"
                    self.counts.unanswered[reason] += 1
                    unanswered += 1
                    if isinstance(outcome, EndpointError) and outcome.fault is Fault.SETTINGS:
                        raise outcome
                    if unanswered >= IN_A_ROW:
                        raise BackendError(
                            f"{unanswered} questions in a row got no answer ({reason}); the other "
                            "answers are saved: run the same command again to continue"
                        ) from outcome
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                backend.close()

    def _ask_one(
        self, backend: OpenAIBackend, key: str, question: str, stop: threading.Event
    ) -> Answer | CompeerError:
        problems: list[str] = []
        for number in range(self._tries):
            # Greedy decoding would repeat the invalid answer.
            sampling = Sampling(
                temperature=0.7 if number else 0.0, max_new_tokens=MAX_ANSWER_TOKENS, seed=number
            )
            try:
                with closing(backend.open([Message("user", (question,))], sampling, stop)) as turn:
                    text = "".join(turn.generate())
            except CompeerError as error:
                return error
            try:
                return Answer(asked=key, consistent=read_answer(text), problems=tuple(problems))
            except ValueError as error:
                problems.append(str(error))
        return Answer(asked=key, consistent=None, problems=tuple(problems))

    def _hash(self, question: str) -> str:
        return hashlib.sha256(f"{self._source[1]}\n{question}".encode()).hexdigest()[:24]


def assessor_source(source: str) -> tuple[str, str]:
    """Return the URL and the model of an endpoint.

    Raises:
        ConfigError: The source is not an endpoint.
    """
    parsed = parse_source(source)
    if parsed.kind is not SourceKind.ENDPOINT:
        raise ConfigError(f"assessor: {source!r} is not an endpoint; write openai:URL#MODEL")
    return parsed.location, parsed.model


def read_answer(text: str) -> bool:
    """Parse an answer.

    Raises:
        ValueError: It is not exactly the requested JSON object; the message says why.

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
        raise ValueError("incomplete JSON" if bare.startswith("{") else "no JSON") from error


def _run_concurrently(
    pool: ThreadPoolExecutor, jobs: Iterator[Callable[[], Answer | CompeerError]], limit: int
) -> Iterator[Answer | CompeerError]:
    """Yield results as they complete, with at most `limit` jobs submitted at a time."""
    running: set[Future[Answer | CompeerError]] = set()
    while True:
        running |= {pool.submit(job) for job in islice(jobs, limit - len(running))}
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()
