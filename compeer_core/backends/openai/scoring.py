"""A judge behind an OpenAI-compatible endpoint.

One request per question, with the whole conversation so far. What the candidates for one turn share
stands at the beginning, so a server with prefix caching (vLLM, SGLang) reads it once.

A verdict is read in one of two ways:

``logprobs``
    One token at temperature 0, and the log-probabilities of the 20 likeliest: exact, cheap, with a
    probability for every label (`verdicts.first_token`). The probabilities are those before any
    restriction of the output. A restriction to the labels (`structured_outputs`,
    `allowed_token_ids`) would make every answer look like a verdict, so none is asked for.
``parsed``
    The judge writes a short judgement and ends with its verdict (`verdicts.written_verdict`). For
    models that think before they decide, and for servers that tell no log-probabilities: where a
    server refuses them, this way is taken from then on, and a warning says so.

An answer that holds no verdict is an error, which a `Judge` turns into `Unscorable`.

The tokenizer of an endpoint is not visible. A label need not be one token for it; it is enough that
no other label of the question begins with the same one, which every answer shows anew.
"""

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from typing import Any, Never

from openai._legacy_response import LegacyAPIResponse

from compeer_core.backends.openai.client import (
    ChatRequest,
    Endpoint,
    LostAnswerError,
    chat_messages,
    is_error,
    text_of,
)
from compeer_core.backends.openai.settings import MAX_WRITTEN_TOKENS, Patience, Verdicts
from compeer_core.backends.openai.verdicts import (
    Listed,
    first_token,
    indistinct,
    probability_of,
    written_verdict,
)
from compeer_core.backends.protocol import (
    Answers,
    CandidateQuestions,
    Message,
    Question,
    with_question,
)
from compeer_core.errors import (
    BackendError,
    CompeerError,
    ConfigError,
    EndpointError,
    Fault,
    InputError,
)
from compeer_core.prompts import verdict_request

logger = logging.getLogger(__name__)

JUDGE_PATIENCE = Patience(turn_seconds=120.0)
TOP_LOGPROBS = 20
"""As many as OpenAI and vLLM (by default) tell."""
MOST_AT_ONCE = 8
SAMPLES_TEMPERATURE = 0.7
NO_VERDICT = "gave no verdict that can be read"


class OpenAIScorer(Endpoint):
    """A judge at an endpoint. See `LabelScorer` and `BatchLabelScorer` in `backends.protocol`."""

    reserved: tuple[str, ...] = ()

    def __init__(
        self,
        url: str,
        model: str,
        patience: Patience = JUDGE_PATIENCE,
        *,
        verdicts: Verdicts = "logprobs",
        language: str = "en",
        samples: int = 1,
        max_written_tokens: int = MAX_WRITTEN_TOKENS,
        most_at_once: int = MOST_AT_ONCE,
        seed: int | None = 0,
    ) -> None:
        """Name an endpoint; nothing is sent yet.

        Args:
            url: The base that chat/completions is below.
            model: The name by which the endpoint knows the model.
            patience: Time limits.
            verdicts: How a verdict is read.
            language: Of the request for a verdict, where it is parsed; a language of the prompts.
            samples: Judgements that are written for a question. One is written at temperature 0, and
                its verdict has the probability 1: all that is known is which label it names. Several
                are written at temperature 0.7, and a label's probability is its share of those that
                could be read, which must be at least half.
            max_written_tokens: Budget of a written judgement. One that is cut off there has no
                verdict.
            most_at_once: Requests that run at the same time.
            seed: Sent with every request; the further samples count up from it. None sends none.

        Raises:
            ConfigError: The address is none, or holds a password.
        """
        super().__init__(url, model, patience)
        self.language = language
        self.samples = samples
        self.max_written_tokens = max_written_tokens
        self.most_at_once = most_at_once
        self.seed = seed
        self.verdicts: Verdicts = verdicts
        """How verdicts are read; changes where the server tells no log-probabilities."""
        self._gate: asyncio.Semaphore | None = None

    def check_labels(self, labels: Sequence[str]) -> None:
        """Make sure that labels are Latin words, and that none begins with another.

        Nothing is asked of the endpoint: which tokens it has for them shows in its answers.
        """
        unfit = [repr(label) for label in labels if not (label.isascii() and label.isalpha())]
        if unfit:
            raise ConfigError(f"{self.name}: {', '.join(unfit)} must be one Latin word each")
        pairs = [f"{other!r} begins with {one!r}" for one, other in indistinct(labels)]
        if pairs:
            raise ConfigError(f"{self.name}: verdicts cannot be told apart: {', '.join(pairs)}")

    def open(self, messages: Sequence[Message]) -> "OpenAIScoringSession":
        return OpenAIScoringSession(self, messages)

    def ask(self, messages: Sequence[Message], question: Question) -> tuple[float, ...]:
        """Return how probable each label is as the answer to a question after these messages.

        Raises:
            InputError: The conversation is longer than the model reads ("message_too_long").
            BackendError: The endpoint failed, or its answer is no verdict.
        """
        return self.call(self._probabilities(messages, question))

    def score_candidates(
        self, messages: Sequence[Message], candidates: Sequence[CandidateQuestions]
    ) -> list[Answers | CompeerError]:
        """Hold candidates side by side, each chain in its order.

        A question that fails is empty in the `Answers`, and those behind it are not asked. Only a
        conversation that is too long stands there as an error: whoever asks knows what to leave out.
        """

        async def all_of_them() -> list[Answers | CompeerError]:
            return await asyncio.gather(
                *(self._scored(list(messages), candidate) for candidate in candidates)
            )

        return self.call(all_of_them())

    def close(self) -> None:
        super().close()
        self._gate = None  # it belonged to the loop that has ended

    # --- in the endpoint's thread ----------------------------------------------------------------

    async def _scored(
        self, messages: list[Message], candidate: CandidateQuestions
    ) -> Answers | CompeerError:
        chain: list[tuple[float, ...]] = []
        for question in candidate.chain:
            given = await self._given(messages, question)
            if isinstance(given, InputError):
                return given
            if not given:
                break
            chain.append(given)
            likeliest = max(range(len(given)), key=given.__getitem__)
            said = Message("assistant", (question.labels[likeliest],))
            messages = [*with_question(messages, question.text), said]
        else:
            ends = await asyncio.gather(
                *(self._given(messages, question) for question in candidate.ends)
            )
            too_long = next((end for end in ends if isinstance(end, InputError)), None)
            answered = tuple(end for end in ends if not isinstance(end, InputError))
            return too_long or Answers(tuple(chain), answered)
        unanswered: list[tuple[float, ...]] = [()] * (len(candidate.chain) - len(chain))
        return Answers((*chain, *unanswered), ((),) * len(candidate.ends))

    async def _given(
        self, messages: Sequence[Message], question: Question
    ) -> tuple[float, ...] | InputError:
        """The probabilities, none where the question failed."""
        try:
            return await self._probabilities(messages, question)
        except InputError as error:
            return error
        except CompeerError as error:
            logger.warning("judge %s left a question unanswered: %s", self.name, error)
            return ()

    async def _probabilities(
        self, messages: Sequence[Message], question: Question
    ) -> tuple[float, ...]:
        if self.verdicts == "parsed":
            return await self._from_words(messages, question)
        try:
            return await self._from_first_token(messages, question)
        except _NoLogprobsError:
            given = await self._from_words(messages, question)
        # Only now: a server may have refused for another reason, and would have done so again.
        if self.verdicts == "logprobs":
            self.verdicts = "parsed"
            logger.warning(
                "%s tells no log-probabilities; the verdicts of %s are parsed from what it writes",
                self.address,
                self.name,
            )
        return given

    async def _from_first_token(
        self, messages: Sequence[Message], question: Question
    ) -> tuple[float, ...]:
        answer = await self._answer(
            with_question(messages, question.text),
            {"max_tokens": 1, "temperature": 0.0, "logprobs": True, "top_logprobs": TOP_LOGPROBS},
            self.seed,
        )
        found = first_token(answer.listed(), question.labels)
        if not found.is_readable:
            logger.info(
                "%s: the labels hold %.3f of the first token, and %.3f belongs to two of them",
                self.address,
                found.covered,
                found.ambiguous,
            )
            self._raise_no_verdict()
        return found.probabilities

    async def _from_words(
        self, messages: Sequence[Message], question: Question
    ) -> tuple[float, ...]:
        labels = question.labels
        request = verdict_request(labels, self.language)
        asked = with_question(messages, f"{question.text}\n\n{request}")
        options = {
            "max_tokens": self.max_written_tokens,
            "temperature": 0.0 if self.samples == 1 else SAMPLES_TEMPERATURE,
        }
        seeds = [None if self.seed is None else self.seed + n for n in range(self.samples)]
        answers = await asyncio.gather(
            *(self._answer(asked, options, seed) for seed in seeds), return_exceptions=True
        )
        read_by_judge = [message.text for message in messages if message.role == "user"]
        judged = "\n".join([*read_by_judge, question.text])
        counts = dict.fromkeys(labels, 0)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            verdict = written_verdict(answer.written(), labels, judged)
            if verdict is not None:
                counts[verdict] += 1
        readable = sum(counts.values())
        if not readable or 2 * readable < self.samples:
            self._raise_no_verdict()
        return tuple(counts[label] / readable for label in labels)

    async def _answer(
        self, messages: Sequence[Message], options: dict[str, Any], seed: int | None
    ) -> "_WholeRequest":
        body = {
            "model": self.name,
            "messages": chat_messages(messages),
            "stream": False,
            **options,
        }
        if seed is not None:
            body["seed"] = seed
        # What is written comes in one piece, so the first sign of life is the last.
        limit = None if "logprobs" in options else self.patience.turn_seconds
        if self._gate is None:
            self._gate = asyncio.Semaphore(self.most_at_once)
        async with self._gate:
            request = _WholeRequest(self, body, limit)
            await request.run()
        return request

    def _raise_no_verdict(self) -> Never:
        raise EndpointError(f"the model {self.name!r} {NO_VERDICT}", NO_VERDICT, Fault.REQUEST)


class OpenAIScoringSession:
    """One conversation with a judge. See `ScoringSession` in `backends.protocol`."""

    def __init__(self, scorer: OpenAIScorer, messages: Sequence[Message]) -> None:
        self._scorer = scorer
        self._messages = list(messages)
        self._asked: str | None = None

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        self._asked = None
        given = self._scorer.ask(self._messages, Question(text, tuple(labels)))
        self._asked = text
        return given

    def answer(self, label: str) -> None:
        """Let the judge have given this answer. Of a written judgement only the verdict stays."""
        if self._asked is None:
            raise BackendError(f"{self._scorer.name}: there is no question to answer")
        asked = with_question(self._messages, self._asked)
        self._messages = [*asked, Message("assistant", (label,))]
        self._asked = None

    def close(self) -> None:
        """Nothing is held."""


class _NoLogprobsError(Exception):
    """The server tells no log-probabilities."""


class _WholeRequest(ChatRequest):
    """An answer that comes in one piece."""

    def __init__(self, endpoint: Endpoint, body: dict[str, Any], limit: float | None) -> None:
        super().__init__(endpoint, body, limit)
        self._choice: dict[str, Any] = {}

    async def read(self, response: LegacyAPIResponse[Any], limit: asyncio.Timeout) -> None:
        try:
            content = json.loads(response.http_response.content)
        except (ValueError, RecursionError) as error:
            raise LostAnswerError("sent something that is not JSON") from error
        if is_error(content):
            self.fail_with_reported_error()
        try:
            [choice, *_] = content["choices"]
            if choice.get("finish_reason") == "content_filter":
                self.fail("withheld its answer (content filter)", fault=Fault.REQUEST)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.fail("sent an answer in an unknown form", cause=error)
        self._choice = choice

    def check_refusal(self, complaint: str) -> None:
        if "logprobs" in self._body and re.search("logprob", complaint, re.I):
            raise _NoLogprobsError

    def raise_too_long(self, status: int) -> Never:
        name = self._endpoint.name
        sentence = f"the model {name!r} cannot read a conversation of this length ({status})"
        raise InputError(sentence, "message_too_long")

    def listed(self) -> list[Listed]:
        """The likeliest tokens of the first place.

        Raises:
            _NoLogprobsError: There is an answer, but no list.
            EndpointError: The list has an unknown form.
        """
        try:
            places = (self._choice.get("logprobs") or {}).get("content") or []
            if not places:
                if self._text():
                    raise _NoLogprobsError
                return []
            chosen = places[0]
            listed = [_listed(one) for one in chosen.get("top_logprobs") or []]
            if all(one.token != chosen["token"] for one in listed):
                listed.append(_listed(chosen))  # some servers list the others only
            if sum(one.probability for one in listed) > 1.05:
                raise ValueError("together more than 1")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.fail("sent log-probabilities in an unknown form", cause=error)
        return listed

    def written(self) -> str:
        """What the judge wrote; nothing if it was cut off."""
        try:
            return "" if self._choice.get("finish_reason") == "length" else self._text()
        except (AttributeError, LookupError, TypeError) as error:
            self.fail("sent an answer in an unknown form", cause=error)

    def _text(self) -> str:
        return text_of((self._choice.get("message") or {}).get("content"))


def _listed(one: dict[str, Any]) -> Listed:
    if not isinstance(one["token"], str):
        raise TypeError("a token is a text")
    return Listed(one["token"], probability_of(one["logprob"]))
