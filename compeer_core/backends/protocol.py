"""What a model must offer, whichever way it runs.

Two interfaces, by what the caller needs: a `Backend` writes text (a policy), a `LabelScorer` says
how probable each of a few words is as the next one (a judge). Both take the same `Message` records
and leave the chat template to the model they stand for.

A backend is used from several threads; whatever its model needs in the way of one owner thread is
its own business.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from compeer_core.errors import CompeerError
from compeer_core.messages import Message

__all__ = [
    "Answers",
    "Backend",
    "BatchLabelScorer",
    "CandidateQuestions",
    "Completion",
    "LabelScorer",
    "Message",
    "Question",
    "Sampling",
    "ScoringSession",
    "with_question",
]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most probable token; must not be negative.
        top_p: Sample from the smallest set of tokens that holds this much probability, in (0, 1].
        repetition_penalty: 1 is off; above 1, tokens already written become less probable.
        max_new_tokens: Budget of one turn, over all its parts.
        seed: None draws a fresh one.

    Raises:
        ValueError: A value is out of its range.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")


class Completion(Protocol):
    """One assistant turn while it is written. It keeps its cache between two parts."""

    def generate(self, until: str | None = None) -> Iterator[str]:
        """Yield new text, up to and including the first ``until`` in it.

        Ends as well at the end of the turn, when the budget of tokens is spent and when the caller
        sets the stop event. Special tokens are not part of the text.

        Raises:
            BackendError: The model or the endpoint failed; what was yielded before stands.
        """
        ...

    def write(self, text: str) -> None:
        """Put text into the turn as if the model had written it.

        Raises:
            BackendError: This backend cannot (`Backend.can_write` is False).
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the turn is over: the model ended it, or the budget is spent."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens generated so far; chunks, where an endpoint reports no usage."""
        ...

    def close(self) -> None:
        """Free what the turn holds. May be called twice, and from another thread."""
        ...


class Backend(Protocol):
    """A model that writes."""

    @property
    def name(self) -> str:
        """What logs and errors call it."""
        ...

    @property
    def reserved(self) -> tuple[str, ...]:
        """Its special tokens, which no visitor's text may contain (`prompts.neutralise`)."""
        ...

    @property
    def can_write(self) -> bool:
        """Whether `Completion.write` works."""
        ...

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> Completion:
        """Begin the assistant turn that follows the messages.

        Raises:
            BackendError: The model cannot be loaded or the endpoint cannot be reached.
        """
        ...

    def close(self) -> None:
        """Free the model. May be called twice."""
        ...


class ScoringSession(Protocol):
    """One conversation with a judge, in which questions and answers take turns."""

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        """Return how probable each label is as the answer to a question.

        The first question is appended to the last user message of the prefix; each later one opens
        a user message of its own, after the `answer` to the one before. A question without an
        answer leaves no trace: the next one takes its place.

        Args:
            text: The question.
            labels: The possible answers, each one token (`LabelScorer.check_labels`).

        Returns:
            One probability per label, in their order, renormalised over the labels: the sum is 1.

        Raises:
            BackendError: The model or the endpoint failed, or gave no probability for a label.
        """
        ...

    def answer(self, label: str) -> None:
        """Let the judge have given this answer to the question asked last."""
        ...

    def close(self) -> None:
        """Free what the conversation holds. May be called twice."""
        ...


@dataclass(frozen=True)
class Question:
    """A question to a judge, and the words it may answer with."""

    text: str
    labels: tuple[str, ...]


def with_question(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the conversation with one more question: the first ends the message before it."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "user":
        return [*messages[:-1], replace(last, content=(*last.content, text))]
    return [*messages, Message("user", (text,))]


@dataclass(frozen=True)
class CandidateQuestions:
    """Questions about one candidate.

    Attributes:
        chain: Asked one after another; the most probable label of each stays as its answer.
        ends: Each asked after the chain, as if it were the only one there.
    """

    chain: tuple[Question, ...]
    ends: tuple[Question, ...]


@dataclass(frozen=True)
class Answers:
    """Label probabilities for each question of a candidate.

    Each tuple sums to 1, or is empty: that question could not be answered, and so neither could
    those after it.
    """

    chain: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]


class LabelScorer(Protocol):
    """A model that judges by choosing between words."""

    @property
    def name(self) -> str:
        """What logs and errors call it."""
        ...

    @property
    def reserved(self) -> tuple[str, ...]:
        """Its special tokens, which no judged text may contain (`prompts.neutralise`)."""
        ...

    def check_labels(self, labels: Sequence[str]) -> None:
        """Make sure that every label is one token, and no two are the same token.

        Raises:
            ConfigError: Some are not; the message names every one of them.
        """
        ...

    def open(self, messages: Sequence[Message]) -> ScoringSession:
        """Begin a conversation with a prefix that ends before the first question's text."""
        ...

    def close(self) -> None:
        """Free the model. May be called twice."""
        ...


@runtime_checkable
class BatchLabelScorer(LabelScorer, Protocol):
    """A `LabelScorer` that can judge many candidates at once."""

    def score_candidates(
        self, messages: Sequence[Message], candidates: Sequence[CandidateQuestions]
    ) -> list[Answers | CompeerError]:
        """Score candidates whose questions all follow the same messages.

        The result is what `open`, `ask` and `answer` would give, one candidate after another. An
        error of one candidate stands in its place and does not affect the others.
        """
        ...
