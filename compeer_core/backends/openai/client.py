"""What a policy and a judge behind an OpenAI-compatible endpoint have in common.

Every request is `POST .../chat/completions`. Servers differ in what they accept and in how they
fail, so an `Exchange`

- leaves out an option that a server rejects (`stream_options`, `seed` ...), and remembers it;
- tries again after 408, 429, 5xx and lost connections, but only until the first text has come,
  not more often than `Patience` says, and as late as `Retry-After` asks for.

A running request lives in an event loop of the endpoint's own thread: cancelling it there closes the
connection at once, wherever it waits, which a blocking read would not allow.

The key comes from the environment (`COMPEER_API_KEY`, else `OPENAI_API_KEY`) and goes nowhere but
into the header of the request. Errors carry no address and nothing a server says, since visitors
see them and servers repeat what they were sent; the log has the address.
"""

import asyncio
import concurrent.futures
import logging
import os
import random
import re
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Never, TypeVar

import httpx

from compeer_core.backends.protocol import Message
from compeer_core.errors import BackendError, ConfigError, EndpointError, Fault

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

KEY_VARIABLES = ("COMPEER_API_KEY", "OPENAI_API_KEY")
"""Where the key is looked for, the first that is set."""

CAN_BE_LEFT_OUT = ("stream_options", "repetition_penalty", "seed", "top_p", "temperature")
"""What a request can do without, if the server will not have it."""

FEWER_LOGPROBS = 5
"""What is asked for where a server refuses more; older servers stop there."""

NOT_KNOWN = re.compile(
    r"unsupported|not support|unknown|unrecogni|unexpected|extra|not permitted|not allowed", re.I
)
TOO_LONG = re.compile(r"context.{0,20}(length|window|size)|too long", re.I)
NO_MODEL = re.compile(r"model_not_found|model\b.{0,80}(not exist|not found)", re.I)
NOTHING_LEFT = re.compile(r"insufficient_quota|insufficient.{0,10}(credit|balance|fund)", re.I)
"""What a 429 says that no waiting will cure."""

MAX_ERROR_BYTES = 1 << 16


@dataclass(frozen=True)
class Patience:
    """How long a request may take in which phase, and how often it is tried."""

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


@dataclass(frozen=True)
class Dialect:
    """In what a server departs from the full request."""

    left_out: frozenset[str] = frozenset()
    """Options it will not have."""
    renamed_budget: bool = False
    """It says max_completion_tokens for max_tokens."""
    fewer_logprobs: bool = False
    """It tells no more than `FEWER_LOGPROBS` at a place."""

    def speak(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request in this dialect."""
        spoken = {name: value for name, value in body.items() if name not in self.left_out}
        if self.renamed_budget:
            spoken["max_completion_tokens"] = spoken.pop("max_tokens")
        if self.fewer_logprobs and "top_logprobs" in spoken:
            spoken["top_logprobs"] = min(FEWER_LOGPROBS, spoken["top_logprobs"])
        return spoken

    def after(self, body: Mapping[str, Any], complaint: str) -> "Dialect | None":
        """A dialect to try next, or None if there is nothing to learn from a rejection.

        Args:
            body: The full request.
            complaint: What the server said to it in this dialect.
        """
        if "max_completion_tokens" in complaint and not self.renamed_budget:
            return replace(self, renamed_budget=True)
        spoken = self.speak(body)
        if "logprobs" in complaint and spoken.get("top_logprobs", 0) > FEWER_LOGPROBS:
            return replace(self, fewer_logprobs=True)
        present = [option for option in CAN_BE_LEFT_OUT if option in spoken]
        named = [option for option in present if option in complaint]
        if named and NOT_KNOWN.search(complaint):
            return replace(self, left_out=self.left_out | {named[0]})
        if "stream_options" in present:  # the likeliest, where the server does not say
            return replace(self, left_out=self.left_out | {"stream_options"})
        return None


class Endpoint:
    """One model of one endpoint, the connections to it, and the thread that they live in."""

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
        self.address = _address(url, model)
        self.dialect = Dialect()
        """What the endpoint is known to accept."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._clients: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []
        self._tls: ssl.SSLContext | None = None

    def close(self) -> None:
        """Cut what still runs, and end the thread. May be called twice."""
        with self._lock:
            loop, thread, clients = self._loop, self._thread, self._clients
            self._loop = self._thread = None
            self._clients, self._idle = [], []
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_shut_down(clients), loop).result()
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
        """Run a coroutine in the endpoint's thread, and wait for it.

        Raises:
            BackendError: `close` was called meanwhile. What the coroutine raises is raised too.
        """
        running = self.start(coroutine)
        try:
            return running.result()
        except concurrent.futures.CancelledError as error:
            raise BackendError(f"the model {self.name!r} was closed") from error
        finally:
            running.cancel()  # where the wait itself was cut short, by Ctrl-C

    @contextmanager
    def client(self) -> Iterator[httpx.AsyncClient]:
        """Lend a client for one request. Only to be called in the endpoint's thread.

        A client keeps its connection for the next request. It serves one request at a time, since
        a client looks at all of its connections for each: with 64 of them, that alone took 10 ms.
        As many requests run at a time as are asked for: whoever asks knows what the endpoint takes.
        """
        idle = self._idle  # `close` takes another list, and a client goes back where it came from
        client = idle.pop() if idle else self._new_client()
        try:
            yield client
        finally:
            idle.append(client)

    def _new_client(self) -> httpx.AsyncClient:
        if self._tls is None:
            self._tls = httpx.create_ssl_context()  # 10 ms, and the same for all
        # Every other limit is ours, see `Patience`.
        limits = httpx.Timeout(None, connect=self.patience.connect_seconds)
        client = httpx.AsyncClient(timeout=limits, headers=_key_header(), verify=self._tls)
        self._clients.append(client)
        return client


class _TransientError(Exception):
    """A try failed in a way that may pass."""

    def __init__(self, sentence: str, wait_seconds: float | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.wait_seconds = wait_seconds


class Exchange(ABC):
    """One request until its answer is whole: tries, dialects, time limits.

    It runs in the endpoint's thread. How an answer is read is for the subclass to say.
    """

    has_begun = False
    """Part of the answer was handed on: it cannot be taken back, so there is no other try."""
    is_finished = False
    """The answer is whole, whatever may still come."""

    def __init__(
        self, endpoint: Endpoint, body: dict[str, Any], first_seconds: float | None = None
    ) -> None:
        """Prepare a request.

        Args:
            endpoint: Where it goes.
            body: The full request; what the endpoint does not take is left out when it is sent.
            first_seconds: Another limit for `Patience.first_text_seconds`.
        """
        self._endpoint = endpoint
        self._patience = endpoint.patience
        self._first_seconds = first_seconds or self._patience.first_text_seconds
        self._dialect = endpoint.dialect
        self._body = body

    @abstractmethod
    async def read(self, response: httpx.Response, limit: asyncio.Timeout) -> None:
        """Read an answer; `limit` ends the wait for it and may be moved on."""

    def check_refusal(self, status: int, complaint: str) -> None:  # noqa: B027  # a hook
        """Look at a refusal before anyone else does. May raise; by default it passes."""

    def raise_too_long(self, status: int) -> Never:
        """The conversation is longer than the model reads."""
        what = f"cannot take a conversation of this length ({status}); begin a new one"
        self.fail(what, fault=Fault.REQUEST)

    async def run(self) -> None:
        """Send the request, again if need be, until it is answered.

        Raises:
            EndpointError: It was not.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(self._patience.turn_seconds):
                for number in range(1, self._patience.tries + 1):
                    try:
                        await self._try_once()
                        return
                    except _TransientError as problem:
                        if self.has_begun:
                            self.fail("lost the connection in mid-reply; try again", cause=problem)
                        wait = self._wait_before(number + 1, problem)
                        late = clock() - started + wait > self._patience.retry_seconds
                        if late or number == self._patience.tries:
                            tries = "once" if number == 1 else f"{number} times"
                            what = f"{problem.sentence}, tried {tries}; try again in a minute"
                            self.fail(
                                what,
                                cause=problem,
                                reason=problem.sentence,
                                wait_seconds=problem.wait_seconds,
                            )
                        logger.info("%s: try %d failed", self._endpoint.address, number)
                        await asyncio.sleep(wait)
        except TimeoutError as error:
            self.fail("took too long; try again", cause=error)

    def fail(
        self,
        what: str,
        *,
        cause: BaseException | None = None,
        fault: Fault = Fault.PASSING,
        reason: str | None = None,
        wait_seconds: float | None = None,
    ) -> Never:
        """Give up. `what` goes on from the model's name."""
        logger.warning("%s: %s", self._endpoint.address, what)
        raise EndpointError(
            f"the model {self._endpoint.name!r} {what}",
            reason or what.partition(";")[0],
            fault,
            wait_seconds,
        ) from cause

    def try_again(self, sentence: str, wait_seconds: float | None = None) -> Never:
        """End this try: the same request may well succeed later."""
        raise _TransientError(sentence, wait_seconds)

    def _wait_before(self, number: int, problem: _TransientError) -> float:
        backoff = self._patience.backoff_seconds * 2.0 ** (number - 2) * random.uniform(0.5, 1.0)
        return max(backoff, problem.wait_seconds or 0.0)

    async def _try_once(self) -> None:
        limit = asyncio.timeout(self._first_seconds)
        try:
            async with limit:
                await self._request(limit)
        except TimeoutError as error:
            if self.is_finished:  # only the count of tokens is missing
                return
            if not limit.expired():
                raise
            what = (
                "fell silent in mid-reply" if self.has_begun else "did not begin to answer in time"
            )
            self.fail(f"{what}; try again", cause=error)
        except httpx.TransportError as error:
            if self.is_finished:
                return
            raise _TransientError("cannot be reached") from error
        except httpx.HTTPError as error:
            self.fail("answered with something that is not HTTP", cause=error)

    async def _request(self, limit: asyncio.Timeout) -> None:
        with self._endpoint.client() as client:
            while not await self._is_answered(client, limit):
                pass  # in another dialect

    async def _is_answered(self, client: httpx.AsyncClient, limit: asyncio.Timeout) -> bool:
        endpoint = self._endpoint
        body = self._dialect.speak(self._body)
        async with client.stream("POST", endpoint.address, json=body) as response:
            if response.status_code == httpx.codes.OK:
                if self._dialect != endpoint.dialect:
                    logger.warning("%s is spoken to with %s", endpoint.address, self._dialect)
                    endpoint.dialect = self._dialect
                self._check_kind(response)
                await self.read(response, limit)
                return True
            complaint = await _beginning(response)
            is_plain = TOO_LONG.search(complaint) or NO_MODEL.search(complaint)
            if response.status_code not in {400, 422} or is_plain:
                self._refused(response, complaint)
            following = self._dialect.after(self._body, complaint)
            if following is None:
                self._refused(response, complaint)
            self._dialect = following
            return False

    def _check_kind(self, response: httpx.Response) -> None:
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if kind == "text/html":
            what = "answered with a web page; check the URL up to /v1"
            self.fail(what, fault=Fault.SETTINGS)

    def _refused(self, response: httpx.Response, complaint: str) -> Never:
        status = response.status_code
        if status == 402 or (status == 429 and NOTHING_LEFT.search(complaint)):
            self.fail(f"says that nothing is left to pay with ({status})", fault=Fault.SETTINGS)
        if status in {408, 429} or status >= 500:
            sentence = "has too much to do" if status == 429 else "has a fault"
            wait = _retry_after(response.headers.get("retry-after", ""))
            self.try_again(f"{sentence} ({status})", wait)
        if status == 413 or TOO_LONG.search(complaint):
            self.raise_too_long(status)
        self.check_refusal(status, complaint)
        if status in {401, 403}:
            what = f"does not accept the key ({status}); set {' or '.join(KEY_VARIABLES)}"
            self.fail(what, fault=Fault.SETTINGS)
        if status == 404 or NO_MODEL.search(complaint):
            what = f"is not known at this address ({status}); check the name, and the URL up to /v1"
            self.fail(what, fault=Fault.SETTINGS)
        self.fail(f"rejects the request ({status})", fault=Fault.REQUEST)


# --- the parts of a request ----------------------------------------------------------------------


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of the protocol, pictures as data URLs."""
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


def _address(url: str, model: str) -> httpx.URL:
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


async def _shut_down(clients: Sequence[httpx.AsyncClient]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for client in clients:
        await client.aclose()
