"""A policy behind an OpenAI-compatible endpoint: vLLM, SGLang, llama.cpp, Ollama, or hosted.

One request per turn, `POST .../chat/completions` with `stream: true`, read as server-sent events.
Servers differ in what they accept and in how they fail, so this module

- leaves out an option that a server rejects (`stream_options`, `seed` ...), and remembers it;
- tries again after 408, 429, 5xx and lost connections, but only until the first text has come,
  not more often than `Patience` says, and as late as `Retry-After` asks for;
- takes a stream that ends without saying so for what it is: broken.

A running request lives in an event loop of the backend's own thread: cancelling it there closes the
connection at once, wherever it waits, which a blocking read would not allow.

The key comes from the environment (`COMPEER_API_KEY`, else `OPENAI_API_KEY`) and goes nowhere but
into the header of the request. Errors carry no address and nothing a server says, since visitors
see them and servers repeat what they were sent; the log has the address.
"""

import asyncio
import json
import logging
import os
import queue
import random
import re
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Never

import httpx

from compeer_core.backends.feed import TextFeed
from compeer_core.backends.protocol import Message, Sampling
from compeer_core.errors import BackendError, ConfigError, EndpointError, Fault

logger = logging.getLogger(__name__)

KEY_VARIABLES = ("COMPEER_API_KEY", "OPENAI_API_KEY")
"""Where the key is looked for, the first that is set."""

CAN_BE_LEFT_OUT = ("stream_options", "repetition_penalty", "seed", "top_p", "temperature")
"""What a request can do without, if the server will not have it."""

NOT_KNOWN = re.compile(
    r"unsupported|not support|unknown|unrecogni|unexpected|extra|not permitted|not allowed", re.I
)
TOO_LONG = re.compile(r"context.{0,20}(length|window|size)|too long", re.I)
NO_MODEL = re.compile(r"model_not_found|model\b.{0,80}(not exist|not found)", re.I)
NOTHING_LEFT = re.compile(r"insufficient_quota|insufficient.{0,10}(credit|balance|fund)", re.I)
"""What a 429 says that no waiting will cure."""

LOOK_AT_STOP_SECONDS = 0.02
USAGE_SECONDS = 2.0
"""How long the count of tokens is waited for after the last text."""
MAX_LINE_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16


@dataclass(frozen=True)
class Patience:
    """How long a turn may take in which phase, and how often it is tried."""

    connect_seconds: float = 10.0
    first_text_seconds: float = 60.0
    """From a request to its first sign of life."""
    between_seconds: float = 30.0
    """From one sign of life to the next."""
    turn_seconds: float = 300.0
    """For all of it."""
    tries: int = 4
    retry_seconds: float = 30.0
    """No try begins later than this after the first one."""
    backoff_seconds: float = 0.5
    """Before the second try; doubled for each further one, with up to half taken off at random."""


class OpenAIBackend:
    """One model of one endpoint."""

    reserved: tuple[str, ...] = ()
    can_write = False

    def __init__(self, url: str, model: str, patience: Patience | None = None) -> None:
        """Name an endpoint; nothing is sent yet.

        Args:
            url: The base that chat/completions is below, for example http://localhost:8000/v1.
            model: The name by which the endpoint knows the model.
            patience: Time limits.

        Raises:
            ConfigError: The address is none, or holds a password.
        """
        self.name = model
        self.patience = patience or Patience()
        self.endpoint = _endpoint(url, model)
        self.dialect = Dialect()
        """What the endpoint is known to accept."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: httpx.AsyncClient | None = None

    def open(
        self, messages: Sequence[Message], sampling: Sampling, stop: threading.Event
    ) -> "OpenAICompletion":
        return OpenAICompletion(self, _request(self.name, messages, sampling), sampling, stop)

    def close(self) -> None:
        """Cut what still runs, and end the thread."""
        with self._lock:
            loop, thread, client = self._loop, self._thread, self._client
            self._loop = self._thread = self._client = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_shut_down(client), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "Future[None]":
        """Run a coroutine in the backend's thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=f"endpoint {self.name}", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def client(self) -> httpx.AsyncClient:
        """The connections. Only to be asked for in the backend's thread."""
        if self._client is None:
            # Every other limit is ours, see `Patience`.
            limits = httpx.Timeout(None, connect=self.patience.connect_seconds)
            # As many at a time as are asked for: whoever asks knows how many the endpoint takes.
            pool = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = httpx.AsyncClient(timeout=limits, limits=pool, headers=_key_header())
        return self._client


@dataclass(frozen=True)
class Dialect:
    """In what a server departs from the full request."""

    left_out: frozenset[str] = frozenset()
    """Options it will not have."""
    renamed_budget: bool = False
    """It says max_completion_tokens for max_tokens."""

    def speak(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request in this dialect."""
        spoken = {name: value for name, value in body.items() if name not in self.left_out}
        if self.renamed_budget:
            spoken["max_completion_tokens"] = spoken.pop("max_tokens")
        return spoken

    def after(self, body: Mapping[str, Any], complaint: str) -> "Dialect | None":
        """A dialect to try next, or None if there is nothing to learn from a rejection.

        Args:
            body: The full request.
            complaint: What the server said to it in this dialect.
        """
        if "max_completion_tokens" in complaint and not self.renamed_budget:
            return replace(self, renamed_budget=True)
        present = [option for option in CAN_BE_LEFT_OUT if option in self.speak(body)]
        named = [option for option in present if option in complaint]
        if named and NOT_KNOWN.search(complaint):
            return replace(self, left_out=self.left_out | {named[0]})
        if "stream_options" in present:  # the likeliest, where the server does not say
            return replace(self, left_out=self.left_out | {"stream_options"})
        return None


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
        self._exchange = _Exchange(backend, body, sampling.max_new_tokens)
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


class _TransientError(Exception):
    """A try failed in a way that may pass."""

    def __init__(self, sentence: str, wait_seconds: float | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.wait_seconds = wait_seconds


class _Exchange:
    """What happens in the backend's thread: request, retries, reading."""

    def __init__(self, backend: OpenAIBackend, body: dict[str, Any], budget: int) -> None:
        self.arrivals: queue.SimpleQueue[str | _End] = queue.SimpleQueue()
        self._backend = backend
        self._patience = backend.patience
        self._dialect = backend.dialect
        self._body = body
        self._budget = budget
        self._chunks = 0
        self._usage: int | None = None
        self._finished = False

    @property
    def tokens(self) -> int:
        return self._chunks if self._usage is None else self._usage

    def finish(self, running: "Future[None]") -> None:
        """Tell the reader that nothing more will come, and why."""
        self.arrivals.put(_End(None if running.cancelled() else running.exception()))

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(self._patience.turn_seconds):
                for number in range(1, self._patience.tries + 1):
                    try:
                        await self._try_once()
                        return
                    except _TransientError as problem:
                        if self._chunks:
                            self._fail("lost the connection in mid-reply; try again", cause=problem)
                        wait = self._wait_before(number + 1, problem)
                        late = clock() - started + wait > self._patience.retry_seconds
                        if late or number == self._patience.tries:
                            tries = "once" if number == 1 else f"{number} times"
                            what = f"{problem.sentence}, tried {tries}; try again in a minute"
                            self._fail(
                                what,
                                cause=problem,
                                reason=problem.sentence,
                                wait_seconds=problem.wait_seconds,
                            )
                        logger.info("%s: try %d failed", self._backend.endpoint, number)
                        await asyncio.sleep(wait)
        except TimeoutError as error:
            self._fail("took too long; try again", cause=error)

    def _wait_before(self, number: int, problem: _TransientError) -> float:
        backoff = self._patience.backoff_seconds * 2.0 ** (number - 2) * random.uniform(0.5, 1.0)
        return max(backoff, problem.wait_seconds or 0.0)

    async def _try_once(self) -> None:
        limit = asyncio.timeout(self._patience.first_text_seconds)
        try:
            async with limit:
                await self._request(limit)
        except TimeoutError as error:
            if self._finished:  # only the count of tokens is missing
                return
            if not limit.expired():
                raise
            what = "fell silent in mid-reply" if self._chunks else "did not begin to answer in time"
            self._fail(f"{what}; try again", cause=error)
        except httpx.TransportError as error:
            if self._finished:
                return
            raise _TransientError("cannot be reached") from error
        except httpx.HTTPError as error:
            self._fail("answered with something that is not HTTP", cause=error)

    async def _request(self, limit: asyncio.Timeout) -> None:
        backend = self._backend
        while True:
            body = self._dialect.speak(self._body)
            async with backend.client.stream("POST", backend.endpoint, json=body) as response:
                if response.status_code == httpx.codes.OK:
                    if self._dialect != backend.dialect:
                        logger.warning("%s is spoken to with %s", backend.endpoint, self._dialect)
                        backend.dialect = self._dialect
                    await self._read(response, limit)
                    return
                complaint = await _beginning(response)
                if response.status_code not in {400, 422} or TOO_LONG.search(complaint):
                    self._refused(response, complaint)
                following = self._dialect.after(self._body, complaint)
                if following is None:
                    self._refused(response, complaint)
                self._dialect = following

    def _refused(self, response: httpx.Response, complaint: str) -> Never:
        status = response.status_code
        if status == 402 or (status == 429 and NOTHING_LEFT.search(complaint)):
            self._fail(f"says that nothing is left to pay with ({status})", fault=Fault.SETTINGS)
        if status in {408, 429} or status >= 500:
            sentence = "has too much to do" if status == 429 else "has a fault"
            wait = _retry_after(response.headers.get("retry-after", ""))
            raise _TransientError(f"{sentence} ({status})", wait)
        if status in {401, 403}:
            what = f"does not accept the key ({status}); set {' or '.join(KEY_VARIABLES)}"
            self._fail(what, fault=Fault.SETTINGS)
        if status == 404 or NO_MODEL.search(complaint):
            what = f"is not known at this address ({status}); check the name, and the URL up to /v1"
            self._fail(what, fault=Fault.SETTINGS)
        if status == 413 or TOO_LONG.search(complaint):
            what = f"cannot take a conversation of this length ({status}); begin a new one"
            self._fail(what, fault=Fault.REQUEST)
        self._fail(f"rejects the request ({status})", fault=Fault.REQUEST)

    def _fail(
        self,
        what: str,
        *,
        cause: BaseException | None = None,
        fault: Fault = Fault.PASSING,
        reason: str | None = None,
        wait_seconds: float | None = None,
    ) -> Never:
        logger.warning("%s: %s", self._backend.endpoint, what)
        raise EndpointError(
            f"the model {self._backend.name!r} {what}",
            reason or what.partition(";")[0],
            fault,
            wait_seconds,
        ) from cause

    # --- reading -------------------------------------------------------------------------------

    async def _read(self, response: httpx.Response, limit: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if kind == "text/html":
            what = "answered with a web page; check the URL up to /v1"
            self._fail(what, fault=Fault.SETTINGS)
        async for data in self._events(response):
            if data == "[DONE]":
                return
            self._take(data)
            wait = USAGE_SECONDS if self._finished else self._patience.between_seconds
            limit.reschedule(clock() + wait)
            if self._chunks >= self._budget:  # a server that knows no budget
                self._finished = True
                return
        if not self._finished:
            raise _TransientError("ended its answer before it was complete")

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
                self._fail("sent a line without end")
            for line in lines:
                yield self._decoded(line)
        if rest:
            yield self._decoded(rest)

    def _decoded(self, line: bytes) -> str:
        try:
            return line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            self._fail("sent text that is not UTF-8", cause=error)

    def _take(self, data: str) -> None:
        """Take in one chunk of the completion."""
        try:
            chunk = json.loads(data)
        except ValueError as error:
            self._fail("sent something that is not JSON", cause=error)
        if not isinstance(chunk, dict) or chunk.get("error") or chunk.get("object") == "error":
            self._fail("reported an error in mid-reply" if self._chunks else "reported an error")
        usage = chunk.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._usage = usage["completion_tokens"]
        choices = chunk.get("choices")
        if not choices:
            return
        text, reason = self._choice(choices)
        if text:
            self._chunks += 1
            self.arrivals.put(text)
        if reason == "content_filter" and not self._chunks:
            self._fail("withheld its reply (content filter)")
        self._finished = self._finished or reason is not None

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
            self._fail("sent a chunk in an unknown form", cause=error)


# --- the parts of a request ----------------------------------------------------------------------


def _endpoint(url: str, model: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is not a URL ({error})") from error
    if address.scheme not in {"http", "https"} or not address.host:
        raise ConfigError(f"{url!r} is not a URL; write http://HOST:PORT/v1#MODEL")
    if address.userinfo:
        raise ConfigError(
            f"the URL at {address.host} holds a password; put the key into {KEY_VARIABLES[0]}"
        )
    if not model:
        raise ConfigError(f"{url!r} names no model; write {url}#MODEL")
    path = address.path.rstrip("/").removesuffix("/chat/completions")
    return address.copy_with(path=f"{path}/chat/completions", fragment=None)


def _key_header() -> dict[str, str]:
    keys = (os.environ.get(variable, "").strip() for variable in KEY_VARIABLES)
    key = next(filter(None, keys), None)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _request(model: str, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in messages],
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


def _message(message: Message) -> dict[str, Any]:
    if all(isinstance(part, str) for part in message.content):
        return {"role": message.role, "content": message.text}
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.data_url()}}
        for part in message.content
    ]
    return {"role": message.role, "content": parts}


def _retry_after(value: str) -> float | None:
    """Seconds to wait by a Retry-After header, which holds seconds or a date."""
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        date = parsedate_to_datetime(value)
        aware = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)).total_seconds())
    return None


async def _beginning(response: httpx.Response) -> str:
    """The beginning of an error's body."""
    body = b""
    async for block in response.aiter_bytes():
        body += block
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES].decode(errors="replace")


async def _shut_down(client: httpx.AsyncClient | None) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    if client is not None:
        await client.aclose()
