"""A judge as it is asked without any care: the whole conversation is read anew for every verdict.

So works a reward function that calls a chat model for each question, and what benchmarks compare with.
"""

from collections.abc import Sequence

from compeer_core.backends.protocol import Message, Question, ScoringSession, with_question
from compeer_core.backends.transformers_.prefix_scoring import Work
from compeer_core.backends.transformers_.scoring import TransformersScorer
from compeer_core.backends.transformers_.sequence_state import SequenceState
from compeer_core.errors import BackendError


def read_anew(
    scorer: TransformersScorer, messages: Sequence[Message], question: Question, work: Work
) -> tuple[float, ...]:
    """Return how probable each label of a question is, the conversation read from its beginning.

    Args:
        scorer: The judge.
        messages: The conversation, the question included.
        question: Whose labels are looked at.
        work: Counts the pass and its tokens.
    """

    def read() -> tuple[float, ...]:
        encoded = scorer.chat.encode(messages)
        scorer.check_length(encoded, question.text)
        work.passes += 1
        work.tokens += len(encoded.ids)
        return scorer.probabilities(SequenceState(encoded, scorer.adapter), question.labels)

    return scorer.chat.owner.call(read)


class NaiveScorer:
    """A judge in this process that shares nothing. It says what the one it stands on says.

    Attributes:
        work: What it has read so far.
    """

    def __init__(self, scorer: TransformersScorer) -> None:
        self.name = scorer.name
        self.reserved = scorer.reserved
        self.work = Work()
        self._scorer = scorer

    def check_labels(self, labels: Sequence[str]) -> None:
        self._scorer.check_labels(labels)

    def open(self, messages: Sequence[Message]) -> ScoringSession:
        return _Talk(self._scorer, messages, self.work)

    def close(self) -> None:
        """Nothing: the model belongs to the scorer that was given."""


class _Talk:
    """See `compeer_core.backends.protocol.ScoringSession`."""

    def __init__(self, scorer: TransformersScorer, messages: Sequence[Message], work: Work) -> None:
        self._scorer = scorer
        self._messages = list(messages)
        self._work = work
        self._asked: list[Message] | None = None

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        self._asked = with_question(self._messages, text)
        return read_anew(self._scorer, self._asked, Question(text, tuple(labels)), self._work)

    def answer(self, label: str) -> None:
        if self._asked is None:
            raise BackendError(f"{self._scorer.name}: nothing was asked")
        self._messages = [*self._asked, Message("assistant", (label,))]
        self._asked = None

    def close(self) -> None:
        pass
