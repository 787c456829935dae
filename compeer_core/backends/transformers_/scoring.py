"""Probabilities of labels, read from one position: how a judge in this process judges.

Each label is one token, so a single forward pass tells how likely each of them is, and nothing that
a judge writes has to be parsed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from compeer_core.backends.protocol import Answers, Interview, Message, with_question
from compeer_core.backends.transformers_.error_text import brief
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.prefix_scoring import (
    NotAChainError,
    Plan,
    Work,
    answer_all,
    plan_interview,
)
from compeer_core.backends.transformers_.sequence_state import Encoded, Shelf, Track
from compeer_core.errors import BackendError, CompeerError
from compeer_core.logs import trace_of

logger = logging.getLogger(__name__)


class TransformersScoringSession:
    """One conversation with a judge. See `compeer_core.backends.protocol.ScoringSession`.

    A question that was not answered is withdrawn by the next one, so that two wordings of a
    question (or two orders of the candidates) can be tried on the same history.

    Each question costs one forward pass over the tokens that are new: the whole conversation is
    rendered by the chat template and turned into tokens again, and the cache is kept as far as they
    are the same. So the model always sees exactly what the template writes, also where a template
    changes earlier turns.
    """

    def __init__(
        self, scorer: "TransformersScorer", messages: Sequence[Message], track: Track
    ) -> None:
        self._scorer = scorer
        self._chat = scorer.chat
        self._messages = list(messages)
        self.track = track
        self._asked: list[Message] | None = None
        self._failure: BackendError | None = None

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        return self._chat.owner.call(lambda: self._ask(text, labels))

    def answer(self, label: str) -> None:
        if self._asked is None:
            raise BackendError(f"{self._scorer.name}: nothing was asked")
        self._messages = [*self._asked, Message("assistant", (label,))]
        self._asked = None

    def close(self) -> None:
        track, self.track = self.track, Track(self.track.encoded, self.track.adapter)
        try:
            self._chat.owner.submit(lambda: self._scorer.shelf.put(track))
        except BackendError:
            track.reset()

    def read_prefix(self) -> None:
        """Let the model read what is known before the first question. Runs on the owner thread."""
        try:
            self._chat.run(self.track, 1)
        except Exception as error:  # noqa: BLE001  (the first question meets it again)
            logger.warning("%s failed while it read: %s", self._scorer.name, trace_of(error))
            self.track.reset()

    def _ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        self._scorer.label_tokens(labels)
        asked = with_question(self._messages, text)
        try:
            encoded = self._chat.encode(asked, like=self.track.encoded)
            self._scorer.check_length(encoded, text)
            self.track.become(encoded)
            found = self._scorer.probabilities(self.track, labels)
        except CompeerError:
            raise
        except Exception as error:
            self.track.reset()
            raise BackendError(f"{self._scorer.name} failed: {brief(error)}") from error
        self._asked = asked
        return found


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
        self.shelf = Shelf()
        self.work = Work()
        """What interviews have cost so far."""

    def check_labels(self, labels: Sequence[str]) -> None:
        self.chat.owner.call(lambda: self.label_tokens(labels))

    def label_tokens(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Return the token with which an assistant's turn begins that is this label.

        Runs on the owner thread. Raises as `check_labels` does.
        """
        return self.chat.label_tokens(labels)

    def probabilities(self, track: Track, labels: Sequence[str]) -> tuple[float, ...]:
        """Return how probable each label is behind what a track holds. Runs on the owner thread."""
        tokens = list(self.label_tokens(labels))
        outputs = self.chat.run(track, 1, logits=True)
        return tuple(torch.softmax(outputs.logits[0][0, tokens].float(), dim=-1).tolist())

    def check_length(self, encoded: Encoded, text: str) -> None:
        """Make sure that the model can read a conversation whose last text is this one.

        Raises:
            InputError: It cannot (code "message_too_long").
        """
        limit = self.chat.limit
        if limit is not None and len(encoded.ids) >= limit:
            raise self.chat.too_long(text, len(encoded.ids), limit - 1)

    def open(self, messages: Sequence[Message]) -> TransformersScoringSession:
        def begin() -> TransformersScoringSession:
            # Read ahead: the first question is appended to these tokens, and few of them change.
            encoded = self.chat.encode(messages, reply=False)
            self.check_length(encoded, messages[-1].text if messages else "")
            return TransformersScoringSession(
                self, messages, self.shelf.take(encoded, self.adapter)
            )

        session = self.chat.owner.call(begin)
        self.chat.owner.submit(session.read_prefix)
        return session

    def interview(
        self, messages: Sequence[Message], interviews: Sequence[Interview]
    ) -> list[Answers | CompeerError]:
        """See `compeer_core.backends.protocol.InterviewScorer`; how: `interviews`."""
        if not interviews:
            return []
        done = self.chat.owner.call(lambda: self._interviewed(messages, interviews))
        return [
            self._asked_naively(messages, interviews[number]) if result is None else result
            for number, result in enumerate(done)
        ]

    def _interviewed(
        self, messages: Sequence[Message], interviews: Sequence[Interview]
    ) -> list[Answers | CompeerError | None]:
        """Runs on the owner thread. None stands for an interview that has to be held naively."""
        results: list[Answers | CompeerError | None] = [None] * len(interviews)
        plans: dict[int, Plan] = {}
        encoded: Encoded | None = None
        for number, interview in enumerate(interviews):
            try:
                plan, trunk = plan_interview(
                    self.chat, messages, interview, self.label_tokens, like=encoded
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
            track = self.shelf.take(encoded, self.adapter)
            self._answer(plans, encoded, track, results)
            self.shelf.put(track)
        return results

    def _answer(
        self,
        plans: Mapping[int, Plan],
        encoded: Encoded,
        track: Track,
        results: list[Answers | CompeerError | None],
    ) -> None:
        """Answer the plans, in halves where all at once fail: a failure is then one candidate's."""
        drafts = {number: list(plan.tokens) for number, plan in plans.items()}
        try:
            answers = answer_all(self.chat, list(plans.values()), encoded, track, self.work)
        except Exception as error:  # noqa: BLE001  (told to the candidate)
            track.reset()
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
                self._answer({n: plans[n] for n in half}, encoded, track, results)
            return
        for number, answer in zip(plans, answers, strict=True):
            results[number] = answer

    def _asked_naively(
        self, messages: Sequence[Message], interview: Interview
    ) -> Answers | CompeerError:
        try:
            session = self.open(messages)
            try:
                chain = []
                for asked in interview.chain:
                    chain.append(session.ask(asked.text, asked.labels))
                    likeliest = max(range(len(asked.labels)), key=chain[-1].__getitem__)
                    session.answer(asked.labels[likeliest])
                ends = [session.ask(asked.text, asked.labels) for asked in interview.ends]
            finally:
                session.close()
        except CompeerError as error:
            return error
        return Answers(tuple(chain), tuple(ends))

    def close(self) -> None:
        """Let go of the model. May be called twice."""
        self.shelf.clear()
        self._release()
