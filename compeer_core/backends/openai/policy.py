"""A policy behind an OpenAI-compatible endpoint: vLLM, SGLang, llama.cpp, Ollama, or hosted.

One streamed request per turn. `compeer_core.backends.openai.client` has what all requests share:
retries, time limits, the key, error messages. A stream that ends without a finish reason counts as
broken.
"""

import asyncio
import json
import queue
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from openai import AsyncStream
from openai._legacy_response import LegacyAPIResponse

from compeer_core.backends.feed import TextFeed
from compeer_core.backends.openai.client import (
    ChatRequest,
    Endpoint,
    LimitedStream,
    LostAnswerError,
    chat_messages,
    content_type,
    is_error,
    text_of,
    thinking_fields,
)
from compeer_core.backends.openai.settings import KEY_VARIABLES, Patience
from compeer_core.backends.protocol import Message, Sampling
from compeer_core.errors import BackendError, Fault

__all__ = ["KEY_VARIABLES", "OpenAIBackend", "OpenAICompletion", "Patience"]

STOP_POLL_SECONDS = 0.02
USAGE_SECONDS = 2.0
"""How long to wait for the token count after the last text."""


class OpenAIBackend(Endpoint):
    """A policy: one model of one endpoint."""

    reserved: tuple[str, ...] = ()
    can_write = False

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> "OpenAICompletion":
        return OpenAICompletion(self, _request(self.name, messages, sampling), sampling, stop)


class OpenAICompletion:
    """One turn, as it arrives."""

    def __init__(
        self,
        backend: OpenAIBackend,
        body: dict[str, Any],
        sampling: Sampling,
        stop: threading.Event,
    ) -> None:
        self._stop = stop
        self._request = _StreamedRequest(backend, body, sampling.max_new_tokens)
        self._feed = TextFeed(self._arriving())
        self._ended = False
        self._running = backend.start(self._request.run())
        self._running.add_done_callback(self._request.finish)

    def generate(self, until: str | None = None) -> Iterator[str]:
        return self._feed.take(until)

    def write(self, text: str) -> None:
        raise BackendError("text cannot be written into the turn of a model behind an endpoint")

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def tokens(self) -> int:
        return self._request.tokens

    def close(self) -> None:
        self._running.cancel()

    def _arriving(self) -> Iterator[str]:
        while not self._stop.is_set():
            try:
                arrival = self._request.arrivals.get(timeout=STOP_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(arrival, str):
                yield arrival
                continue
            self._ended = True
            if arrival.error is not None:
                raise arrival.error
            return
        self.close()


@dataclass(frozen=True)
class _End:
    """The last item to arrive."""

    error: BaseException | None = None


class _StreamedRequest(ChatRequest):
    """A turn that arrives in chunks."""

    def __init__(self, backend: OpenAIBackend, body: dict[str, Any], budget: int) -> None:
        super().__init__(backend, body)
        self.arrivals: queue.SimpleQueue[str | _End] = queue.SimpleQueue()
        self._budget = budget
        self._chunks = 0
        self._usage: int | None = None

    @property
    def tokens(self) -> int:
        return self._chunks if self._usage is None else self._usage

    def finish(self, running: "Future[None]") -> None:
        """Tell the reader that nothing more will arrive, and why."""
        self.arrivals.put(_End(None if running.cancelled() else running.exception()))

    async def read(self, response: LegacyAPIResponse[Any], limit: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        try:
            async with aclosing(_chunks(response)) as chunks:
                async for chunk in chunks:
                    self._add(chunk)
                    if self.has_begun or self.is_finished:
                        wait = USAGE_SECONDS if self.is_finished else self._patience.between_seconds
                        limit.reschedule(clock() + wait)
                    if self._chunks >= self._budget:  # the server ignores max_tokens
                        self.is_finished = True
                        return
        except UnicodeDecodeError as error:
            self.fail("sent text that is not UTF-8", cause=error)
        except ValueError as error:
            self.fail("sent something that is not JSON", cause=error)
        if not self.is_finished:
            self._read_last_line(response)

    def _read_last_line(self, response: LegacyAPIResponse[Any]) -> None:
        """Finish an answer whose last event gave no reason, by what the SDK does not report."""
        stream = response.http_response.stream
        line = stream.last_line if isinstance(stream, LimitedStream) else ""
        if line.startswith("{"):  # some servers put a bare error into the stream
            with suppress(json.JSONDecodeError):
                if is_error(json.loads(line)):
                    self.fail_with_reported_error()
        if not (self.has_begun and line == "data: [DONE]"):
            raise LostAnswerError("ended its answer before it was complete")
        self.is_finished = True

    def _add(self, chunk: Any) -> None:
        if is_error(chunk):
            self.fail_with_reported_error()
        usage = chunk.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._usage = usage["completion_tokens"]
        choices = chunk.get("choices")
        if not choices:
            return
        text, finish_reason = self._read_choice(choices)
        if text:
            self._chunks += 1
            self.has_begun = True
            self.arrivals.put(text)
        if finish_reason == "content_filter" and not self._chunks:
            self.fail("withheld its reply (content filter)", fault=Fault.REQUEST)
        self.is_finished = self.is_finished or finish_reason is not None

    def _read_choice(self, choices: Any) -> tuple[str, str | None]:
        """Return the new text and the finish reason, if any."""
        try:
            choice = choices[0]
            # A server that does not stream sends the whole message in one piece.
            message = choice.get("delta") or choice.get("message") or {}
            return text_of(message.get("content")), choice.get("finish_reason")
        except (AttributeError, LookupError, TypeError) as error:
            self.fail("sent a chunk in an unknown form", cause=error)


async def _chunks(response: LegacyAPIResponse[Any]) -> AsyncGenerator[Any]:
    """Yield the JSON of each chunk, or of the one answer of a server that does not stream.

    The JSON is taken as it is: the SDK's `ChatCompletionChunk` would accept malformed chunks.
    """
    if content_type(response) == "application/json":
        yield json.loads(await response.http_response.aread())
        return
    async with response.parse(to=AsyncStream[object]) as stream:
        async for chunk in stream:
            yield chunk


def _request(model: str, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": chat_messages(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.repetition_penalty != 1.0:  # an extension of vLLM, SGLang and others
        body["repetition_penalty"] = sampling.repetition_penalty
    return body | thinking_fields(sampling.thinking)
