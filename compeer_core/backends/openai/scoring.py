"""A judge behind an OpenAI-compatible endpoint.

One request per question, with the whole conversation so far. The common prefix of the candidates for
a turn comes first, so a server with prefix caching (vLLM, SGLang) reads it once.

There are two ways to read a verdict:

``logprobs``
    One token at temperature 0, with the log-probabilities of the top 20: exact, cheap, and with a
    probability for every label (`verdicts.first_token`). The output is not constrained to the labels
    (`structured_outputs`, `allowed_token_ids`): every answer would then look like a verdict.
``parsed``
    The judge writes a short judgement that ends with its verdict (`verdicts.written_verdict`). For
    models that reason before they decide, and for servers without log-probabilities: if a server
    refuses them, the scorer switches to this way and logs a warning.

An answer without a verdict is an error, which a `Judge` turns into `Unscorable`.

The tokenizer of an endpoint is unknown. A label need not be one token for it, if no other label of the
question begins with the same token; every answer is checked for this.
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
"""The maximum of OpenAI and (by default) vLLM."""
MAX_CONCURRENT = 8
SAMPLES_TEMPERATURE = 0.7
NO_VERDICT = "gave no readable verdict"


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
        max_concurrent: int = MAX_CONCURRENT,
        seed: int | None = 0,
    ) -> None:
        """Name an endpoint; nothing is sent yet.

        Args:
            url: The base URL above chat/completions.
            model: The model's name at the endpoint.
            patience: Time limits.
            verdicts: How a verdict is read.
            language: Of the request for a parsed verdict; a language of the prompts.
            samples: Written judgements per question. A single one is sampled at temperature 0, and its
                verdict gets probability 1. Several are sampled at temperature 0.7, and a label's
                probability is its share of the readable ones, which must be at least half.
            max_written_tokens: Budget of a written judgement. A truncated one has no verdict.
            max_concurrent: Concurrent requests.
            seed: Sent with every request; further samples count up from it. None sends none.

        Raises:
            ConfigError: `url` is not a URL or contains a password, or `model` is empty.
        """
        super().__init__(url, model, patience)
        self.language = language
        self.samples = samples
        self.max_written_tokens = max_written_tokens
        self.max_concurrent = max_concurrent
        self.seed = seed
        self.verdicts: Verdicts = verdicts
        """How verdicts are read; becomes "parsed" if the server returns no log-probabilities."""
        self._gate: asyncio.Semaphore | None = None

    def check_labels(self, labels: Sequence[str]) -> None:
        """Check that labels are Latin words, and that none begins with another.

        The endpoint is not called: its answers show how it tokenizes them.
        """
        unfit = [repr(label) for label in labels if not (label.isascii() and label.isalpha())]
        if unfit:
            raise ConfigError(f"{self.name}: {', '.join(unfit)} must be one Latin word each")
        pairs = [f"{label!r} begins with {prefix!r}" for prefix, label in indistinct(labels)]
        if pairs:
            raise ConfigError(f"{self.name}: verdicts cannot be distinguished: {', '.join(pairs)}")

    def open(self, messages: Sequence[Message]) -> "OpenAIScoringSession":
        return OpenAIScoringSession(self, messages)

    def ask(self, messages: Sequence[Message], question: Question) -> tuple[float, ...]:
        """Return the probability of each label as the answer to a question after these messages.

        Raises:
            InputError: The conversation exceeds the model's context ("message_too_long").
            BackendError: The endpoint failed, or its answer has no verdict.
        """
        return self.call(self._probabilities(messages, question))

    def score_candidates(
        self, messages: Sequence[Message], candidates: Sequence[CandidateQuestions]
    ) -> list[Answers | CompeerError]:
        """Score candidates concurrently, each chain in its order.

        A failed question is empty in the `Answers`, and later ones are not asked. Only a conversation
        that is too long is returned as an error: the caller can shorten it.
        """

        async def all_of_them() -> list[Answers | CompeerError]:
            return await asyncio.gather(
                *(self._scored(list(messages), candidate) for candidate in candidates)
            )

        return self.call(all_of_them())

    def close(self) -> None:
        super().close()
        self._gate = None  # it belonged to the loop that was closed

    # --- in the endpoint's thread ----------------------------------------------------------------

    async def _scored(
        self, messages: list[Message], candidate: CandidateQuestions
    ) -> Answers | CompeerError:
        chain: list[tuple[float, ...]] = []
        for question in candidate.chain:
            probabilities = await self._probabilities_or_nothing(messages, question)
            if isinstance(probabilities, InputError):
                return probabilities
            if not probabilities:
                break
            chain.append(probabilities)
            best = max(range(len(probabilities)), key=probabilities.__getitem__)
            answer = Message("assistant", (question.labels[best],))
            messages = [*with_question(messages, question.text), answer]
        else:
            ends = await asyncio.gather(
                *(self._probabilities_or_nothing(messages, each) for each in candidate.ends)
            )
            too_long = next((end for end in ends if isinstance(end, InputError)), None)
            answered = tuple(end for end in ends if not isinstance(end, InputError))
            return too_long or Answers(tuple(chain), answered)
        unanswered: list[tuple[float, ...]] = [()] * (len(candidate.chain) - len(chain))
        return Answers((*chain, *unanswered), ((),) * len(candidate.ends))

    async def _probabilities_or_nothing(
        self, messages: Sequence[Message], question: Question
    ) -> tuple[float, ...] | InputError:
        """Return the probabilities, or an empty tuple if the question failed."""
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
            return await self._from_text(messages, question)
        try:
            return await self._from_first_token(messages, question)
        except _NoLogprobsError:
            probabilities = await self._from_text(messages, question)
        # Only now: the server may have refused for another reason, and then fails again.
        if self.verdicts == "logprobs":
            self.verdicts = "parsed"
            logger.warning(
                "%s returns no log-probabilities; verdicts of %s are now parsed from its text",
                self.address,
                self.name,
            )
        return probabilities

    async def _from_first_token(
        self, messages: Sequence[Message], question: Question
    ) -> tuple[float, ...]:
        answer = await self._answer(
            with_question(messages, question.text),
            {"max_tokens": 1, "temperature": 0.0, "logprobs": True, "top_logprobs": TOP_LOGPROBS},
            self.seed,
        )
        first = first_token(answer.listed(), question.labels)
        if not first.is_readable:
            logger.info(
                "%s: the labels have probability %.3f in the first token, %.3f is ambiguous",
                self.address,
                first.covered,
                first.ambiguous,
            )
            self._raise_no_verdict()
        return first.probabilities

    async def _from_text(
        self, messages: Sequence[Message], question: Question
    ) -> tuple[float, ...]:
        labels = question.labels
        request = verdict_request(labels, self.language)
        prompt = with_question(messages, f"{question.text}\n\n{request}")
        options = {
            "max_tokens": self.max_written_tokens,
            "temperature": 0.0 if self.samples == 1 else SAMPLES_TEMPERATURE,
        }
        seeds = [None if self.seed is None else self.seed + n for n in range(self.samples)]
        answers = await asyncio.gather(
            *(self._answer(prompt, options, seed) for seed in seeds), return_exceptions=True
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
        # A written judgement comes in one piece, so its first text is its last.
        limit = None if "logprobs" in options else self.patience.turn_seconds
        if self._gate is None:
            self._gate = asyncio.Semaphore(self.max_concurrent)
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
        self._question: str | None = None

    def ask(self, text: str, labels: Sequence[str]) -> tuple[float, ...]:
        self._question = None
        probabilities = self._scorer.ask(self._messages, Question(text, tuple(labels)))
        self._question = text
        return probabilities

    def answer(self, label: str) -> None:
        """Record this answer. Of a written judgement only the verdict stays."""
        if self._question is None:
            raise BackendError(f"{self._scorer.name}: there is no question to answer")
        prompt = with_question(self._messages, self._question)
        self._messages = [*prompt, Message("assistant", (label,))]
        self._question = None

    def close(self) -> None:
        """Do nothing: there are no resources."""


class _NoLogprobsError(Exception):
    """The server returns no log-probabilities."""


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
        """Return the most probable tokens of the first position.

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
            listed = [_listed(each) for each in chosen.get("top_logprobs") or []]
            if all(each.token != chosen["token"] for each in listed):
                listed.append(_listed(chosen))  # some servers list only the others
            if sum(each.probability for each in listed) > 1.05:
                raise ValueError("probabilities add up to more than 1")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.fail("sent log-probabilities in an unknown form", cause=error)
        return listed

    def written(self) -> str:
        """Return the judge's text; empty if it was truncated."""
        try:
            return "" if self._choice.get("finish_reason") == "length" else self._text()
        except (AttributeError, LookupError, TypeError) as error:
            self.fail("sent an answer in an unknown form", cause=error)

    def _text(self) -> str:
        return text_of((self._choice.get("message") or {}).get("content"))


def _listed(entry: dict[str, Any]) -> Listed:
    if not isinstance(entry["token"], str):
        raise TypeError("a token must be a string")
    return Listed(entry["token"], probability_of(entry["logprob"]))
