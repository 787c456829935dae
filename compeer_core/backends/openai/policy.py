"""A policy behind an OpenAI-compatible endpoint: vLLM, SGLang, llama.cpp, Ollama, or hosted.

One request per turn with `stream: true`, read as server-sent events. What goes for every request
(tries, time limits, the key, what errors say) is in `compeer_core.backends.openai.client`. A stream that
ends without saying so is taken for what it is: broken.
"""

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx

from compeer_core.backends.feed import TextFeed
from compeer_core.backends.openai.client import (
    KEY_VARIABLES,
    Endpoint,
    Exchange,
    Patience,
    chat_messages,
)
from compeer_core.backends.protocol import Message, Sampling
from compeer_core.errors import BackendError

__all__ = ["KEY_VARIABLES", "OpenAIBackend", "OpenAICompletion", "Patience"]

LOOK_AT_STOP_SECONDS = 0.02
USAGE_SECONDS = 2.0
"""How long the count of tokens is waited for after the last text."""
LAST_BYTES_SECONDS = 0.2
"""How long the end of the body is waited for after the mark that the stream is done."""
MAX_LINE_BYTES = 1 << 20


class OpenAIBackend(Endpoint):
    """One model of one endpoint, as a writer."""

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
        self._exchange = _StreamedExchange(backend, body, sampling.max_new_tokens)
        self._feed = TextFeed(self._arriving())
        self._ended = False
        self._running = backend.start(self._exchange.run())
        self._running.add_done_callback(self._exchange.finish)

    def generate(self, until: str | None = None) -> Iterator[str]:
        return self._feed.take(until)

    def write(self, text: str) -> None:
        raise BackendError("a model behind an endpoint does not let text be written into its turn")

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def tokens(self) -> int:
        return self._exchange.tokens

    def close(self) -> None:
        self._running.cancel()

    def _arriving(self) -> Iterator[str]:
        while not self._stop.is_set():
            try:
                arrived = self._exchange.arrivals.get(timeout=LOOK_AT_STOP_SECONDS)
            except queue.Empty:
                continue
            if isinstance(arrived, str):
                yield arrived
                continue
            self._ended = True
            if arrived.error is not None:
                raise arrived.error
            return
        self.close()


@dataclass(frozen=True)
class _End:
    """The last thing to arrive."""

    error: BaseException | None = None


class _StreamedExchange(Exchange):
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
        """Tell the reader that nothing more will come, and why."""
        self.arrivals.put(_End(None if running.cancelled() else running.exception()))

    async def read(self, response: httpx.Response, limit: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        done = False
        async for data in self._events(response):
            if done:
                continue
            if data == "[DONE]":
                # Only the end of the body is left. Who reads it may use the connection again.
                done = self.is_finished = True
                limit.reschedule(clock() + LAST_BYTES_SECONDS)
                continue
            self._take(data)
            wait = USAGE_SECONDS if self.is_finished else self._patience.between_seconds
            limit.reschedule(clock() + wait)
            if self._chunks >= self._budget:  # a server that knows no budget
                self.is_finished = True
                return
        if not self.is_finished:
            self.try_again("ended its answer before it was complete")

    async def _events(self, response: httpx.Response) -> AsyncIterator[str]:
        """The data of each server-sent event; see the HTML standard, "Server-sent events"."""
        data: list[str] = []
        async for line in self._lines(response):
            if not line:
                if data:
                    yield "\n".join(data)
                data = []
            elif line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif line.startswith("{"):  # some servers put a bare error into the stream
                yield line
        if data:
            yield "\n".join(data)

    async def _lines(self, response: httpx.Response) -> AsyncIterator[str]:
        # Not httpx's aiter_lines: it also splits at U+2028, which may stand within a JSON string.
        rest = b""
        async for block in response.aiter_bytes():
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                self.fail("sent a line without end")
            for line in lines:
                yield self._decoded(line)
        if rest:
            yield self._decoded(rest)

    def _decoded(self, line: bytes) -> str:
        try:
            return line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            self.fail("sent text that is not UTF-8", cause=error)

    def _take(self, data: str) -> None:
        """Take in one chunk of the completion."""
        try:
            chunk = json.loads(data)
        except ValueError as error:
            self.fail("sent something that is not JSON", cause=error)
        if not isinstance(chunk, dict) or chunk.get("error") or chunk.get("object") == "error":
            self.fail("reported an error in mid-reply" if self._chunks else "reported an error")
        usage = chunk.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._usage = usage["completion_tokens"]
        choices = chunk.get("choices")
        if not choices:
            return
        text, reason = self._choice(choices)
        if text:
            self._chunks += 1
            self.has_begun = True
            self.arrivals.put(text)
        if reason == "content_filter" and not self._chunks:
            self.fail("withheld its reply (content filter)")
        self.is_finished = self.is_finished or reason is not None

    def _choice(self, choices: Any) -> tuple[str, str | None]:
        """The new text, and why the turn ended, if it did."""
        try:
            choice = choices[0]
            # A server that does not stream sends the whole message in one piece.
            said = choice.get("delta") or choice.get("message") or {}
            content = said.get("content") or ""
            reason = choice.get("finish_reason")
            if isinstance(content, str):
                return content, reason
            return "".join(part.get("text") or "" for part in content), reason
        except (AttributeError, LookupError, TypeError) as error:
            self.fail("sent a chunk in an unknown form", cause=error)


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
    return body
