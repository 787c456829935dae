"""Interfaces of models, however they run.

A `Backend` generates text (a policy); a `LabelScorer` returns the probabilities of a few words as the
next one (a judge). Both accept `Message` records and apply the model's chat template themselves.

Backends are thread-safe; one whose model needs an owner thread has its own.
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
    """Sampling parameters.

    Attributes:
        temperature: 0 is greedy; must not be negative.
        top_p: Nucleus sampling: the probability of the candidate set, in (0, 1].
        repetition_penalty: 1 is off; above 1, earlier tokens become less probable.
        max_new_tokens: Budget of one turn, over all its parts.
        seed: None uses a random one.
        exact_quotations: Whether reasoning steps can quote only what a message contains. Only for
            checkpoints in this process; others ignore it.
        fresh_sentences: Whether a reply can contain no short sentence that the supporter has said
            before. Only for checkpoints in this process; others ignore it.
        thinking: The `enable_thinking` of the chat template of a reasoning model. None leaves it to
            the template.

    Raises:
        ValueError: A value is out of its range.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    seed: int | None = None
    exact_quotations: bool = False
    fresh_sentences: bool = False
    thinking: bool | None = None

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
    """One assistant turn while it is generated. The cache is kept between parts."""

    def generate(self, until: str | None = None) -> Iterator[str]:
        """Yield new text, up to and including the first ``until`` in it.

        Also ends at the end of the turn, when the token budget is spent, and when the stop event is
        set. Special tokens are not part of the text.

        Raises:
            BackendError: The model or the endpoint failed; text yielded before remains valid.
        """
        ...

    def write(self, text: str) -> None:
        """Append text to the turn as if the model had generated it.

        Raises:
            BackendError: The backend does not support it (`Backend.can_write` is False).
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether the model ended the turn, or the budget is spent."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens generated so far; chunks, if an endpoint reports no usage."""
        ...

    def close(self) -> None:
        """Free the turn's resources. May be called twice, and from another thread."""
        ...


class Backend(Protocol):
    """A model that generates text."""

    @property
    def name(self) -> str:
        """Its name in logs and errors."""
        ...

    @property
    def reserved(self) -> tuple[str, ...]:
        """Its control tokens, which untrusted text must not contain (`prompts.neutralise`)."""
        ...

    @property
    def can_write(self) -> bool:
        """Whether `Completion.write` is supported."""
        ...

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> Completion:
        """Begin the assistant's turn after the messages.

        Raises:
            BackendError: The model cannot be loaded or the endpoint cannot be reached.
        """
        ...

    def close(self) -> None:
        """Free the model. May be called twice."""
        ...


class ScoringSession(Protocol):
    """One conversation with a judge, of questions and answers."""

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        """Return the probability of each label as the answer to a question.

        The first question is appended to the last user message of the prefix; later ones are user
        messages of their own, after the `answer` to the previous one. The next question replaces a
        question without an answer.

        Args:
            text: The question.
            labels: The possible answers, each one token (`LabelScorer.check_labels`).

        Returns:
            One probability per label, in order, renormalised to a sum of 1.

        Raises:
            BackendError: The model or the endpoint failed, or returned no probability.
        """
        ...

    def answer(self, label: str) -> None:
        """Record this answer to the last question."""
        ...

    def close(self) -> None:
        """Free the conversation's resources. May be called twice."""
        ...


@dataclass(frozen=True)
class Question:
    """A question to a judge, and the allowed answers."""

    text: str
    labels: tuple[str, ...]


def with_question(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the conversation with a question appended, to a last user message if there is one."""
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


def interview(session: ScoringSession, candidate: CandidateQuestions) -> Answers:
    """Ask a candidate's questions one after the other, and close the session.

    Raises:
        CompeerError: See `ScoringSession.ask`.
    """
    chain: list[tuple[float, ...]] = []
    try:
        for question in candidate.chain:
            chain.append(session.ask(question.text, question.labels))
            likeliest = max(range(len(question.labels)), key=chain[-1].__getitem__)
            session.answer(question.labels[likeliest])
        ends = [session.ask(question.text, question.labels) for question in candidate.ends]
    finally:
        session.close()
    return Answers(tuple(chain), tuple(ends))


class LabelScorer(Protocol):
    """A model that scores words as answers."""

    @property
    def name(self) -> str:
        """Its name in logs and errors."""
        ...

    @property
    def reserved(self) -> tuple[str, ...]:
        """Its control tokens, which judged text must not contain (`prompts.neutralise`)."""
        ...

    def check_labels(self, labels: Sequence[str]) -> None:
        """Check that every label is one token, and that no two are the same token.

        Raises:
            ConfigError: Some are not; the message names them.
        """
        ...

    def open(self, messages: Sequence[Message]) -> ScoringSession:
        """Begin a conversation with the messages before the first question."""
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
