"""Label probabilities, read from one position: how a judge in this process judges.

Each label is one token, so one forward pass gives the probability of each, and no text has to be
parsed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from compeer_core.backends.protocol import (
    Answers,
    CandidateQuestions,
    Message,
    interview,
    with_question,
)
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.prefix_scoring import (
    NotAChainError,
    Plan,
    Work,
    plan_candidate,
    score_plans,
)
from compeer_core.backends.transformers_.sequence_state import Encoded, SequenceState
from compeer_core.errors import BackendError, CompeerError
from compeer_core.logs import brief, trace_of

logger = logging.getLogger(__name__)


class TransformersScoringSession:
    """One conversation with a judge. See `compeer_core.backends.protocol.ScoringSession`.

    A question without an answer is replaced by the next one, so two wordings of a question (or two
    orders of the replies) can be tried on the same history.

    Each question costs one forward pass over the new tokens: the chat template renders the whole
    conversation again, and the cache of the common prefix is reused. So the model always reads
    exactly what the template writes, even if a template changes earlier turns.
    """

    def __init__(
        self, scorer: "TransformersScorer", messages: Sequence[Message], state: SequenceState
    ) -> None:
        self._scorer = scorer
        self._chat = scorer.chat
        self._messages = list(messages)
        self.state = state
        self._prefix = len(state.ids)
        self._question: list[Message] | None = None
        self._failure: BackendError | None = None

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        return self._chat.owner.call(lambda: self._ask(text, labels))

    def answer(self, label: str) -> None:
        if self._question is None:
            raise BackendError(f"{self._scorer.name}: there is no question to answer")
        self._messages = [*self._question, Message("assistant", (label,))]
        self._question = None

    def close(self) -> None:
        state, self.state = self.state, SequenceState(self.state.encoded, self.state.adapter)
        try:
            self._chat.owner.submit(lambda: self._chat.stored.put(state, self._prefix))
        except BackendError:
            state.reset()

    def read_prefix(self) -> None:
        """Read the messages before the first question. Runs on the owner thread."""
        try:
            self._chat.run(self.state, 1)
        except Exception as error:  # noqa: BLE001  (the first question raises it again)
            logger.warning(
                "%s failed while reading the conversation: %s", self._scorer.name, trace_of(error)
            )
            self.state.reset()

    def _ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        self._scorer.label_tokens(labels)
        messages = with_question(self._messages, text)
        try:
            encoded = self._chat.encode(messages, like=self.state.encoded)
            self._scorer.check_length(encoded, text)
            self.state.set_prompt(encoded)
            probabilities = self._scorer.probabilities(self.state, labels)
        except CompeerError:
            raise
        except Exception as error:
            self.state.reset()
            raise BackendError(f"{self._scorer.name} failed: {brief(error)}") from error
        self._question = messages
        return probabilities


class TransformersScorer:
    """A judge in this process. See `compeer_core.backends.protocol.LabelScorer`."""

    def __init__(
        self, name: str, chat: ChatModel, adapter: str | None, release: Callable[[], None]
    ) -> None:
        self.name = name
        self.reserved = chat.reserved
        self.chat = chat
        self.adapter = adapter
        self._release = release
        self.work = Work()
        """Cost of `score_candidates` so far."""

    def check_labels(self, labels: Sequence[str]) -> None:
        self.chat.owner.call(lambda: self.label_tokens(labels))

    def label_tokens(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Return the token of each label at the beginning of an assistant's turn.

        Runs on the owner thread. Raises as `check_labels` does.
        """
        return self.chat.label_tokens(labels)

    def probabilities(self, state: SequenceState, labels: Sequence[str]) -> tuple[float, ...]:
        """Return the probability of each label after a state. Runs on the owner thread."""
        tokens = list(self.label_tokens(labels))
        outputs = self.chat.run(state, 1, logits=True)
        return tuple(torch.softmax(outputs.logits[0][0, tokens].float(), dim=-1).tolist())

    def check_length(self, encoded: Encoded, text: str) -> None:
        """Check that a conversation that ends with `text` fits into the context.

        Raises:
            InputError: It does not (code "message_too_long").
        """
        limit = self.chat.limit
        if limit is not None and len(encoded.ids) >= limit:
            raise self.chat.too_long(text, len(encoded.ids), limit - 1)

    def open(self, messages: Sequence[Message]) -> TransformersScoringSession:
        def begin() -> TransformersScoringSession:
            # Read ahead: the first question continues these tokens, and few of them change.
            encoded = self.chat.encode(messages, reply=False)
            self.check_length(encoded, messages[-1].text if messages else "")
            return TransformersScoringSession(self, messages, self._begun(encoded))

        session = self.chat.owner.call(begin)
        self.chat.owner.submit(session.read_prefix)
        return session

    def score_candidates(
        self, messages: Sequence[Message], candidates: Sequence[CandidateQuestions]
    ) -> list[Answers | CompeerError]:
        """See `compeer_core.backends.protocol.BatchLabelScorer` and `prefix_scoring`."""
        if not candidates:
            return []
        done = self.chat.owner.call(lambda: self._score_on_owner_thread(messages, candidates))
        return [
            self._score_one_by_one(messages, candidates[number]) if result is None else result
            for number, result in enumerate(done)
        ]

    def _score_on_owner_thread(
        self, messages: Sequence[Message], candidates: Sequence[CandidateQuestions]
    ) -> list[Answers | CompeerError | None]:
        """Runs on the owner thread. None stands for a candidate that has to be scored question by question."""
        results: list[Answers | CompeerError | None] = [None] * len(candidates)
        plans: dict[int, Plan] = {}
        encoded: Encoded | None = None
        for number, candidate in enumerate(candidates):
            try:
                plan, trunk = plan_candidate(
                    self.chat, messages, candidate, self.label_tokens, like=encoded
                )
                encoded = encoded or trunk
                self.check_length(trunk, messages[-1].text if messages else "")
            except NotAChainError:
                continue
            except CompeerError as error:
                results[number] = error
            else:
                plans[number] = plan
        if plans and encoded is not None:
            state = self._begun(encoded)
            self._score_plans(plans, encoded, state, results)
            self.chat.stored.put(state, state.read)
        return results

    def _begun(self, encoded: Encoded) -> SequenceState:
        state = SequenceState(encoded, self.adapter)
        state.copy_from(self.chat.stored)
        return state

    def _score_plans(
        self,
        plans: Mapping[int, Plan],
        encoded: Encoded,
        state: SequenceState,
        results: list[Answers | CompeerError | None],
    ) -> None:
        """Score the plans, in halves if all at once fail, to isolate the faulty candidate."""
        drafts = {number: list(plan.tokens) for number, plan in plans.items()}
        try:
            answers = score_plans(self.chat, list(plans.values()), encoded, state, self.work)
        except Exception as error:  # noqa: BLE001  (stored for the candidate)
            state.reset()
            if len(plans) == 1:
                [number] = plans
                failure = BackendError(f"{self.name} failed: {brief(error)}")
                failure.__cause__ = error
                results[number] = failure
                return
            logger.warning("%s failed on %d at once: %s", self.name, len(plans), trace_of(error))
            for number, plan in plans.items():
                plan.tokens[:] = drafts[number]
            numbers = list(plans)
            for half in (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]):
                self._score_plans({n: plans[n] for n in half}, encoded, state, results)
            return
        for number, answer in zip(plans, answers, strict=True):
            results[number] = answer

    def _score_one_by_one(
        self, messages: Sequence[Message], candidate: CandidateQuestions
    ) -> Answers | CompeerError:
        try:
            return interview(self.open(messages), candidate)
        except CompeerError as error:
            return error

    def close(self) -> None:
        """Release the model. May be called twice."""
        self._release()
