"""The connection to an OpenAI-compatible endpoint, on the official `openai` SDK.

The SDK sends `POST .../chat/completions`, retries after 408, 409, 429, 5xx and lost connections,
obeys `Retry-After` and decodes server-sent events. This module adds what a demo for many visitors
needs around it:

- **Servers differ.** A `ChatRequest` drops an option that a server rejects (`stream_options`,
  `seed` ...), and the `Endpoint` remembers it (`Dialect`).
- **Time limits follow the text**, not the socket: a server that sends keep-alive comments and no
  text is given up all the same (`Patience`).
- **A lost answer** is requested again until its first text has been passed on.
- **Requests run in the endpoint's own thread**, in an event loop: cancelling one there closes its
  connection at once, wherever it waits.
- **Errors carry neither the address nor the server's words**: visitors see them, and servers repeat
  what they were sent. The log has the address.

The API key comes from the environment (`COMPEER_API_KEY`, else `OPENAI_API_KEY`) and goes nowhere
but into the request's header. Importing the SDK takes about a second, so this package is imported
where an endpoint is used (`settings` does not need it).
"""

import asyncio
import concurrent.futures
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Never, TypeVar

import httpx2
import openai
from openai._legacy_response import LegacyAPIResponse

from compeer_core.backends.openai.settings import KEY_VARIABLES, Patience
from compeer_core.backends.protocol import Message
from compeer_core.errors import BackendError, ConfigError, EndpointError, Fault

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

NO_KEY = "none"
"""Given to the SDK, which demands a key, where none is set; it is not sent."""

OPTIONAL_FIELDS = ("stream_options", "repetition_penalty", "seed", "top_p", "temperature")
"""Fields that a request can do without if the server rejects them."""

FEWER_LOGPROBS = 5
"""`top_logprobs` for servers that refuse more; older ones stop there."""

UNSUPPORTED = re.compile(
    r"unsupported|not support|unknown|unrecogni|unexpected|extra|not permitted|not allowed", re.I
)
TOO_LONG = re.compile(r"context.{0,20}(length|window|size)|too long", re.I)
PASSING_STATUSES = frozenset({408, 409, 429})
"""Refusals that another try may cure, besides those from 500 on: the SDK repeats such requests."""
NO_MODEL = re.compile(r"model_not_found|model\b.{0,80}(not exist|not found)", re.I)
QUOTA_SPENT = re.compile(r"insufficient_quota|insufficient.{0,10}(credit|balance|fund)", re.I)
"""Marks a 429 that no waiting will cure."""

MAX_ANSWER_BYTES = 1 << 24
LAST_LINE_BYTES = 4096
"""How much of the end of an answer is looked at for what the SDK does not report."""
RESEND_SECONDS = 0.2
"""Pause before a lost answer is requested again."""


@dataclass(frozen=True)
class Dialect:
    """How a server's requests differ from the full protocol."""

    dropped: frozenset[str] = frozenset()
    """Fields that it rejects."""
    renamed_budget: bool = False
    """It expects max_completion_tokens instead of max_tokens."""
    fewer_logprobs: bool = False
    """It lists at most `FEWER_LOGPROBS` tokens per position."""

    def apply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request as this server accepts it."""
        accepted = {name: value for name, value in body.items() if name not in self.dropped}
        if self.renamed_budget:
            accepted["max_completion_tokens"] = accepted.pop("max_tokens")
        if self.fewer_logprobs and "top_logprobs" in accepted:
            accepted["top_logprobs"] = min(FEWER_LOGPROBS, accepted["top_logprobs"])
        return accepted

    def after_rejection(self, body: Mapping[str, Any], complaint: str) -> "Dialect | None":
        """Return the dialect to try next, or None if the rejection teaches nothing.

        Args:
            body: The full request.
            complaint: The server's answer to it in this dialect.
        """
        if "max_completion_tokens" in complaint and not self.renamed_budget:
            return replace(self, renamed_budget=True)
        sent = self.apply(body)
        if "logprobs" in complaint and sent.get("top_logprobs", 0) > FEWER_LOGPROBS:
            return replace(self, fewer_logprobs=True)
        present = [field for field in OPTIONAL_FIELDS if field in sent]
        named = [field for field in present if field in complaint]
        if named and UNSUPPORTED.search(complaint):
            return replace(self, dropped=self.dropped | {named[0]})
        if "stream_options" in present:  # the usual suspect if the server names no field
            return replace(self, dropped=self.dropped | {"stream_options"})
        return None


def thinking_fields(thinking: bool | None) -> dict[str, Any]:
    """Return the field of a request that sets `Sampling.thinking`: an extension of vLLM and SGLang.

    It is never left out for a server that rejects it, since another model would be measured.
    """
    return {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}


class Endpoint:
    """One model of one endpoint, its SDK client, and the thread that both live in."""

    def __init__(self, url: str, model: str, patience: Patience | None = None) -> None:
        """Name an endpoint; nothing is sent yet.

        Args:
            url: The base URL above chat/completions, for example http://localhost:8000/v1.
            model: The model's name at the endpoint.
            patience: Time limits.

        Raises:
            ConfigError: `url` is not a URL or contains a password, or `model` is empty.
        """
        self.name = model
        self.patience = patience or Patience()
        self.address = _address(url, model)
        self.dialect = Dialect()
        """What the endpoint is known to accept."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: openai.AsyncOpenAI | None = None

    def close(self) -> None:
        """Cancel running requests and end the thread. May be called twice."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Run a coroutine in the endpoint's thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=f"endpoint {self.name}", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the endpoint's thread and wait for its result.

        Raises:
            BackendError: `close` was called meanwhile. Errors of the coroutine are raised too.
        """
        running = self.start(coroutine)
        try:
            return running.result()
        except concurrent.futures.CancelledError as error:
            raise BackendError(f"the model {self.name!r} was closed") from error
        finally:
            running.cancel()  # if the wait itself was interrupted, by Ctrl-C

    def client(self) -> openai.AsyncOpenAI:
        """Return the SDK's client. Call it in the endpoint's thread only."""
        if self._client is None:
            self._client = self._new_client()
        return self._client

    @staticmethod
    def omitted_headers(client: openai.AsyncOpenAI) -> dict[str, openai.Omit]:
        """Return the headers that the SDK would fill from the environment, and that nobody asked for."""
        names = ["OpenAI-Organization", "OpenAI-Project"]
        return dict.fromkeys(
            [*names, "Authorization"] if client.api_key == NO_KEY else names, openai.omit
        )

    def _new_client(self) -> openai.AsyncOpenAI:
        keys = (os.environ.get(variable, "").strip() for variable in KEY_VARIABLES)
        key = next(filter(None, keys), None)
        base = str(self.address.copy_with(query=None)).removesuffix("/chat/completions")
        # Every limit but this one is measured on the text, see `Patience`.
        limits = openai.Timeout(None, connect=self.patience.connect_seconds)
        return openai.AsyncOpenAI(
            api_key=key or NO_KEY,
            base_url=base,
            default_query=dict(self.address.params),
            timeout=limits,
            max_retries=self.patience.tries - 1,
            http_client=openai.DefaultAsyncHttpxClient(
                timeout=limits, follow_redirects=False, event_hooks={"response": [self._inspect]}
            ),
        )

    async def _inspect(self, response: httpx2.Response) -> None:
        """Limit the size of an answer, and forbid retries that cannot help."""
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = LimitedStream(response.stream, self.name)
        status = response.status_code
        if status not in PASSING_STATUSES and status < 500:
            return
        wait_seconds = _retry_after(response.headers.get("retry-after", "")) or 0.0
        is_hopeless = wait_seconds > self.patience.retry_seconds
        if status == httpx2.codes.TOO_MANY_REQUESTS:
            await response.aread()
            is_hopeless = is_hopeless or QUOTA_SPENT.search(response.text) is not None
        if is_hopeless:
            response.headers["x-should-retry"] = "false"

    async def _shut_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None


class LimitedStream(httpx2.AsyncByteStream):
    """The body of an answer, up to `MAX_ANSWER_BYTES`."""

    def __init__(self, stream: httpx2.AsyncByteStream, model: str) -> None:
        self._stream = stream
        self._model = model
        self._end = b""

    @property
    def last_line(self) -> str:
        """The last line so far: the SDK reports neither `[DONE]` nor a line that is not an event."""
        lines = self._end.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for block in self._stream:
            received += len(block)
            self._end = (self._end + block)[-LAST_LINE_BYTES:]
            if received > MAX_ANSWER_BYTES:
                reason = f"sent more than {MAX_ANSWER_BYTES >> 20} MiB"
                raise EndpointError(f"the model {self._model!r} {reason}", reason)
            yield block

    async def aclose(self) -> None:
        await self._stream.aclose()


class LostAnswerError(Exception):
    """An answer ended before it was complete; the same request may succeed."""


class ChatRequest(ABC):
    """One request until its answer is complete: dialects, time limits, lost answers.

    It runs in the endpoint's thread. Subclasses read the answer.
    """

    has_begun = False
    """Part of the answer was passed on. It cannot be taken back, so the request is not resent."""
    is_finished = False
    """The answer is complete, whatever may still arrive."""

    def __init__(
        self, endpoint: Endpoint, body: dict[str, Any], first_seconds: float | None = None
    ) -> None:
        """Prepare a request.

        Args:
            endpoint: Where it goes.
            body: The full request; fields that the endpoint rejects are dropped when it is sent.
            first_seconds: Another limit instead of `Patience.first_text_seconds`.
        """
        self._endpoint = endpoint
        self._patience = endpoint.patience
        self._first_seconds = first_seconds or self._patience.first_text_seconds
        self._dialect = endpoint.dialect
        self._body = body
        self._tries = 0

    @abstractmethod
    async def read(self, response: LegacyAPIResponse[Any], limit: asyncio.Timeout) -> None:
        """Read an answer; `limit` ends the wait for it and may be rescheduled."""

    def check_refusal(self, complaint: str) -> None:  # noqa: B027  # a hook
        """Handle a refusal that this kind of request understands, by raising."""

    def raise_too_long(self, status: int) -> Never:
        """Report a conversation that is longer than the model's context."""
        what = f"cannot take a conversation of this length ({status}); begin a new one"
        self.fail(what, fault=Fault.REQUEST)

    async def run(self) -> None:
        """Send the request until it is answered.

        Raises:
            EndpointError: It was not answered.
        """
        limit = asyncio.timeout(self._first_seconds)
        try:
            async with asyncio.timeout(self._patience.turn_seconds), limit:
                while not await self._is_answered(limit):
                    pass  # in another dialect, or after a lost answer
        except TimeoutError as error:
            if self.is_finished:  # only the token count is missing
                return
            what = "took too long"
            if limit.expired():
                what = "fell silent in mid-reply" if self.has_begun else "did not answer in time"
            self.fail(f"{what}; try again", cause=error)

    def fail(
        self,
        what: str,
        *,
        cause: BaseException | None = None,
        fault: Fault = Fault.PASSING,
        reason: str | None = None,
        wait_seconds: float | None = None,
    ) -> Never:
        """Give up. `what` completes the sentence that begins with the model's name."""
        logger.warning("%s: %s", self._endpoint.address, what)
        raise EndpointError(
            f"the model {self._endpoint.name!r} {what}",
            reason or what.partition(";")[0],
            fault,
            wait_seconds,
        ) from cause

    async def _is_answered(self, limit: asyncio.Timeout) -> bool:
        tries = self._tries
        try:
            await self._send(limit)
        except openai.APIStatusError as error:
            self._tries += _tries_of(error)
            dialect = self._next_dialect(error)
            if dialect is None:
                self._refused(error)
            self._dialect, self._tries = dialect, 0
            return False
        except openai.APIConnectionError as error:
            self._tries = tries + _tries_of(error)
            await self._wait_to_resend("cannot be reached", error)
        except LostAnswerError as error:
            await self._wait_to_resend(str(error), error)
        except openai.APIError as error:
            self.fail_with_reported_error(error)
        else:
            return True
        return self.is_finished

    async def _send(self, limit: asyncio.Timeout) -> None:
        endpoint = self._endpoint
        body = self._dialect.apply(self._body)
        client = endpoint.client()
        if self._tries:
            client = client.with_options(max_retries=self._patience.tries - self._tries - 1)
        response = await client.chat.completions.with_raw_response.create(
            model=body.pop("model"),
            messages=body.pop("messages"),
            stream=body.pop("stream"),
            extra_body=body,  # as it is: servers take fields that the SDK does not name
            extra_headers=endpoint.omitted_headers(client),
        )
        self._tries += 1 + response.retries_taken
        if self._dialect != endpoint.dialect:
            logger.warning("%s: requests now use %s", endpoint.address, self._dialect)
            endpoint.dialect = self._dialect
        if content_type(response) == "text/html":
            await response.http_response.aclose()
            what = "answered with a web page; check the URL up to /v1"
            self.fail(what, fault=Fault.SETTINGS)
        await self.read(response, limit)

    def fail_with_reported_error(self, cause: BaseException | None = None) -> Never:
        """Give up after the server put an error into its answer."""
        where = " in mid-reply" if self.has_begun else ""
        self.fail(f"reported an error{where}", cause=cause)

    async def _wait_to_resend(self, sentence: str, cause: BaseException) -> None:
        if self.is_finished:
            return
        if self.has_begun:
            self.fail("lost the connection in mid-reply; try again", cause=cause)
        if self._tries >= self._patience.tries:
            self._fail_for_now(sentence, cause)
        await asyncio.sleep(RESEND_SECONDS)

    def _fail_for_now(
        self, sentence: str, cause: BaseException, wait_seconds: float | None = None
    ) -> Never:
        tries = "once" if self._tries == 1 else f"{self._tries} times"
        self.fail(
            f"{sentence}, tried {tries}; try again in a minute",
            cause=cause,
            reason=sentence,
            wait_seconds=wait_seconds,
        )

    def _next_dialect(self, error: openai.APIStatusError) -> Dialect | None:
        """Return the dialect to try after a refusal, if another one may help."""
        complaint = error.response.text
        is_clear = TOO_LONG.search(complaint) or NO_MODEL.search(complaint)
        if error.status_code not in {400, 422} or is_clear:
            return None
        return self._dialect.after_rejection(self._body, complaint)

    def _refused(self, error: openai.APIStatusError) -> Never:
        status, complaint = error.status_code, error.response.text
        if status == 402 or (status == 429 and QUOTA_SPENT.search(complaint)):
            what = f"refuses the request because the account's credit is spent ({status})"
            self.fail(what, fault=Fault.SETTINGS)
        if status in PASSING_STATUSES or status >= 500:
            sentence = "is overloaded" if status == 429 else "has a fault"
            wait_seconds = _retry_after(error.response.headers.get("retry-after", ""))
            self._fail_for_now(f"{sentence} ({status})", error, wait_seconds)
        if status == 413 or TOO_LONG.search(complaint):
            self.raise_too_long(status)
        self.check_refusal(complaint)
        if status in {401, 403}:
            what = f"does not accept the key ({status}); set {' or '.join(KEY_VARIABLES)}"
            self.fail(what, fault=Fault.SETTINGS)
        if status == 404 or NO_MODEL.search(complaint):
            what = f"is not known at this address ({status}); check the name, and the URL up to /v1"
            self.fail(what, fault=Fault.SETTINGS)
        self.fail(f"rejects the request ({status})", fault=Fault.REQUEST)


def content_type(response: LegacyAPIResponse[Any]) -> str:
    """Return the media type of an answer, without parameters."""
    return str(response.headers.get("content-type", "")).partition(";")[0].strip()


def is_error(content: Any) -> bool:
    """Return whether a server's JSON is an error, or not even an object."""
    return (
        not isinstance(content, dict)
        or bool(content.get("error"))
        or content.get("object") == "error"
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, nothing, or a list of parts.

    Raises:
        AttributeError, TypeError: It is something else.
    """
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or ())


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the protocol has them, images as data URLs."""
    return [_message(message) for message in messages]


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


def _address(url: str, model: str) -> httpx2.URL:
    try:
        address = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{url!r} is not a URL ({error})") from error
    if address.scheme not in {"http", "https"} or not address.host:
        raise ConfigError(f"{url!r} is not a URL; write http://HOST:PORT/v1#MODEL")
    if address.userinfo:
        raise ConfigError(
            f"the URL at {address.host} contains a password; put the key into {KEY_VARIABLES[0]}"
        )
    if not model:
        raise ConfigError(f"{url!r} names no model; write {url}#MODEL")
    path = address.path.rstrip("/").removesuffix("/chat/completions")
    return address.copy_with(path=f"{path}/chat/completions", fragment=None)


def _tries_of(error: openai.APIStatusError | openai.APIConnectionError) -> int:
    """Return how often the SDK sent the request that failed."""
    return 1 + int(error.request.headers.get("x-stainless-retry-count", 0))


def _retry_after(value: str) -> float | None:
    """Return the seconds to wait by a Retry-After header, which has seconds or a date."""
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        date = parsedate_to_datetime(value)
        aware = date if date.tzinfo else date.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)).total_seconds())
    return None
