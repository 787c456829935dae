"""The benchmark baseline: a judge that processes the whole conversation again for every verdict.

This is how a reward function works that calls a chat model once per question.
"""

from collections.abc import Sequence
from functools import partial

from compeer_core.backends.protocol import Message, ScoringSession, with_question
from compeer_core.backends.transformers_.prefix_scoring import Work
from compeer_core.backends.transformers_.scoring import TransformersScorer
from compeer_core.backends.transformers_.sequence_state import SequenceState
from compeer_core.errors import BackendError


class NaiveScorer:
    """Wraps a local judge: the same probabilities, without shared computation.

    Attributes:
        work: Forward passes and tokens so far.
    """

    def __init__(self, scorer: TransformersScorer, work: Work | None = None) -> None:
        self.name = scorer.name
        self.reserved = scorer.reserved
        self.work = work or Work()
        self._scorer = scorer

    def check_labels(self, labels: Sequence[str]) -> None:
        self._scorer.check_labels(labels)

    def open(self, messages: Sequence[Message]) -> ScoringSession:
        return _Session(self._scorer, messages, self.work)

    def close(self) -> None:
        """Do nothing: the wrapped scorer owns the model."""


class _Session:
    """See `compeer_core.backends.protocol.ScoringSession`."""

    def __init__(self, scorer: TransformersScorer, messages: Sequence[Message], work: Work) -> None:
        self._scorer = scorer
        self._messages = list(messages)
        self._work = work
        self._question: list[Message] | None = None

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        self._question = with_question(self._messages, text)
        return self._scorer.chat.owner.call(partial(self._scored, self._question, text, labels))

    def _scored(
        self, messages: Sequence[Message], text: str, labels: Sequence[str]
    ) -> tuple[float, ...]:
        encoded = self._scorer.chat.encode(messages)
        self._scorer.check_length(encoded, text)
        self._work.passes += 1
        self._work.tokens += len(encoded.ids)
        return self._scorer.probabilities(SequenceState(encoded, self._scorer.adapter), labels)

    def answer(self, label: str) -> None:
        if self._question is None:
            raise BackendError(f"{self._scorer.name}: answer() was called before ask()")
        self._messages = [*self._question, Message("assistant", (label,))]
        self._question = None

    def close(self) -> None:
        pass
