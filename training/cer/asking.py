"""Questions to a generator, many at a time, each answered once whatever happens."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from compeer_core.backends.protocol import Message
from compeer_core.config import FrozenModel
from compeer_core.errors import CompeerError
from training.cer.engines import Engine
from training.cer.generators import GeneratorSettings

Check = Callable[[str, str], str | None]
"""Takes a question's key and the text; returns None if the text is usable, else why not, in a few
words that can be counted ("half a JSON", "wrong language"). It must be picklable: a function of a
module, or a frozen dataclass with `__call__`."""


@dataclass(frozen=True)
class Question:
    """What a generator is asked. The key is unique in its journal and stable between runs."""

    key: str
    messages: tuple[Message, ...]
    seed: int


class Answer(FrozenModel):
    """What came of a question."""

    key: str
    text: str | None
    """None where there is no usable text."""
    problem: str | None = None
    """Why there is none."""
    tries: int
    """Texts that were looked at."""


class Counts(FrozenModel):
    """What became of the questions so far.

    All but `requests` and `faults` are the same whether a run was interrupted or not.
    """

    asked: int = 0
    """Questions whose answer is known, from the journal or from the generator."""
    answered: int = 0
    """Those with a usable text."""
    retried: Mapping[str, int] = {}
    """Unusable texts that were followed by another try, by reason."""
    failed: Mapping[str, int] = {}
    """Questions without a usable text, by reason."""
    tokens: int = 0
    """Written by the generator, in all tries."""
    requests: int = 0
    """Sent since this start, repeated ones included."""
    faults: Mapping[str, int] = {}
    """Requests since this start that got no text, by reason."""


class BudgetSpentError(CompeerError):
    """As many requests as allowed were sent. What was answered is kept; start again to go on."""


class Budget:
    """How many requests a run may send, over all of its askers. Thread-safe."""

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
                    f"the budget of {self.max_requests} requests is spent; what was answered is "
                    "kept, and the next start goes on from there"
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
    ) -> None:
        self.settings = settings

    @property
    def name(self) -> str:
        """The author that records name."""
        return self.settings.author

    @property
    def reserved(self) -> tuple[str, ...]:
        """The model's special tokens, for `compeer_core.prompts.neutralise`."""
        raise NotImplementedError

    @property
    def counts(self) -> Counts:
        raise NotImplementedError

    def ask(
        self,
        questions: Iterable[Question],
        check: Check,
        *,
        label: str,
        total: int | None = None,
    ) -> Iterator[Answer]:
        """Yield an answer to each question, in their order."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the generator. May be called twice."""
