"""Requests to an OpenAI-compatible endpoint, by the official `openai` SDK.

The SDK speaks HTTP, sends failed requests again with exponential backoff, and obeys `Retry-After` up
to two minutes. Three things are added, because a run has a budget and many requests in flight:

- every request the SDK sends, repeated ones included, passes a `Meter` (budget, rate, counts);
- `Retry-After` holds back all requests, not just the refused one;
- a time limit covers a request up to the last byte of its reply.

The event loop runs in a thread of its own, so requests proceed while the consumer is busy.
"""

import asyncio
import os
import random
import threading
from concurrent.futures import Future
from typing import Any, Self

import httpx2
import openai

from compeer_core.backends.openai.client import (
    NO_MODEL,
    QUOTA_SPENT,
    TOO_LONG,
    Dialect,
    Endpoint,
    chat_messages,
    thinking_fields,
)
from compeer_core.backends.openai.settings import KEY_VARIABLES
from compeer_core.errors import BackendError, CompeerError
from training.cer.requests.generators import Prompt, Written, storable, visible
from training.cer.requests.request_dispatch import (
    ClosedError,
    Dispatch,
    NotAnsweredError,
    Outcome,
    Task,
)
from training.cer.requests.response_store import Attempt

CONNECT_SECONDS = 10.0
"""A reachable endpoint accepts a connection sooner."""
MAX_BACKOFF_SECONDS = 30.0
MAX_RETRY_AFTER_SECONDS = 120.0
"""The SDK's own limit. An endpoint that asks for more ends the run."""


class EndpointRequests:
    """Answers tasks in a thread of its own. A context manager.

    When its block ends with a `CompeerError`, or because the user wants to stop, requests in flight
    are awaited, for they are paid for; otherwise all are cancelled.
    """

    def __init__(self, dispatch: Dispatch, room: int) -> None:
        """Prepare; nothing is sent before the first task.

        Args:
            dispatch: Settings, check, meter and store of the requests.
            room: How many tasks `submit` takes at a time.

        Raises:
            ConfigError: The address is not a URL.
        """
        settings = dispatch.settings
        where = settings.where
        keys = (os.environ.get(variable, "").strip() for variable in KEY_VARIABLES)
        address = str(Endpoint(where.location, where.model).address)
        self.in_flight: set[asyncio.Task[Any] | None] = set()
        """Tasks whose request has been sent and whose reply is not stored yet."""
        self.is_closing = False
        """Whether no further request may be sent."""
        self._dispatch = dispatch
        address = address.removesuffix("/chat/completions")
        key = next(filter(None, keys), "EMPTY")  # what servers without keys expect
        self._client = _Client(self, dispatch, base_url=address, api_key=key)
        self._dialect = Dialect()
        self._room = room
        self._unfinished: set[Future[Outcome]] = set()
        self._changed = threading.Event()
        self._failure: BaseException | None = None
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="requests")
        self._end = asyncio.Event()
        self._slots = asyncio.Semaphore(settings.in_flight)
        self._unsaved: list[Attempt] = []
        self._saving = asyncio.Lock()

    # --- the consumer's thread -----------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_closing = True
        try:
            if isinstance(exception[1], CompeerError) or self._dispatch.is_stopping():
                asyncio.run_coroutine_threadsafe(self._drain(), self._loop.result()).result()
        finally:
            self._loop.result().call_soon_threadsafe(self._end.set)
            self._thread.join()

    def has_room(self) -> bool:
        """Whether `submit` takes another task."""
        return len(self._unfinished) < self._room

    def submit(self, task: Task) -> "Future[Outcome]":
        """Answer a task."""
        future = asyncio.run_coroutine_threadsafe(self._answer(task), self._loop.result())
        self._unfinished.add(future)
        future.add_done_callback(self._note)
        return future

    def wait(self, seconds: float) -> None:
        """Wait until a task is done."""
        self._changed.wait(seconds)
        self._changed.clear()

    def raise_failure(self) -> None:
        """Raise the first error that ended a task, if any."""
        if self._failure is not None:
            raise self._failure

    # --- the event loop's thread ---------------------------------------------------------------

    async def _run(self) -> None:
        self._main = asyncio.current_task()
        async with self._client:
            self._loop.set_result(asyncio.get_running_loop())
            await self._end.wait()
            for task in self._answering():
                task.cancel()
            await asyncio.gather(*self._answering(), return_exceptions=True)

    def _answering(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - {self._main, asyncio.current_task()}

    def _note(self, future: "Future[Outcome]") -> None:
        self._unfinished.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            self._failure = self._failure or error
            self.is_closing = True
        self._changed.set()

    async def _drain(self) -> None:
        """Wait until the texts of requests in flight are stored; cancel all other tasks."""
        for task in self._answering() - self.in_flight:
            task.cancel()
        await asyncio.gather(*self._answering(), return_exceptions=True)

    async def _answer(self, task: Task) -> Outcome:
        """Ask a question until its text is usable, or no attempt is left."""
        key = task.question.key
        attempts = list(task.stored)
        async with self._slots:
            while not self._dispatch.is_settled(attempts):
                number = len(attempts) + 1
                try:
                    written = await self._write(task.question.prompt(number))
                    attempts.append(self._dispatch.checked(task, number, written))
                    await self._save(attempts[-1])
                except NotAnsweredError as error:
                    return Outcome(key, tuple(attempts), unanswered=str(error))
                finally:
                    self.in_flight.discard(asyncio.current_task())
        return Outcome(key, tuple(attempts))

    async def _save(self, attempt: Attempt) -> None:
        """Store an attempt, together with those that came while others were being stored."""
        self._unsaved.append(attempt)
        async with self._saving:
            attempts, self._unsaved = self._unsaved, []
            if attempts:
                await asyncio.to_thread(self._dispatch.save, attempts)

    async def _write(self, prompt: Prompt) -> Written:
        """Send a request, without the options that this server rejects.

        Raises:
            NotAnsweredError: There is no text.
            BackendError: No other request would succeed either.
        """
        settings = self._dispatch.settings
        body: dict[str, Any] = {
            "model": settings.where.model,
            "messages": chat_messages(visible(prompt.messages, settings)),
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": prompt.seed,
            **thinking_fields(settings.thinking),
        }
        if settings.repetition_penalty != 1.0:  # an extension of vLLM, SGLang and others
            body["repetition_penalty"] = settings.repetition_penalty
        dialect = self._dialect
        while True:
            try:
                # Not `chat.completions.create`: its typed wrappers take a quarter of the CPU time.
                response = await self._client.post(
                    "/chat/completions", cast_to=httpx2.Response, body=dialect.apply(body)
                )
            except openai.APIError as error:
                following = None
                if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
                    complaint = error.response.text
                    if not (TOO_LONG.search(complaint) or NO_MODEL.search(complaint)):
                        following = dialect.after_rejection(body, complaint)
                if following is None:
                    raise self._explained(error) from error
                dialect = following
            else:
                self._dialect = dialect
                return _read(response.json())

    def _explained(self, error: openai.APIError) -> CompeerError:
        """Return what the SDK's last error means for the run."""
        if not isinstance(error, openai.APIStatusError):
            return NotAnsweredError(_reason(error.__cause__ or error))
        status, complaint = error.status_code, error.response.text
        author = self._dispatch.settings.author
        wait = self._client.retry_after(error.response.headers)
        if status == 402 or (status == 429 and QUOTA_SPENT.search(complaint)):
            return BackendError(f"the account behind {author} is out of credit ({status})")
        if wait > MAX_RETRY_AFTER_SECONDS:
            return BackendError(
                f"{author} asks to wait {wait:.0f} s ({status}); answers so far are stored, "
                "start again then"
            )
        if status == 413 or TOO_LONG.search(complaint):
            return NotAnsweredError(f"prompt too long (HTTP {status})")
        if status in {401, 403}:
            keys = " or ".join(KEY_VARIABLES)
            return BackendError(f"the endpoint of {author} rejects the key ({status}); set {keys}")
        if status == 404 or NO_MODEL.search(complaint):
            return BackendError(
                f"{author} does not exist at this address ({status}); check the model's name, and "
                "the URL up to /v1"
            )
        return NotAnsweredError(f"HTTP {status}")


class _Client(openai.AsyncOpenAI):
    """The SDK's client, with the backoff of the settings and a `Retry-After` that holds for all."""

    def __init__(self, requests: EndpointRequests, dispatch: Dispatch, **named: Any) -> None:
        settings = dispatch.settings
        limit = settings.timeout_seconds
        timeout = openai.Timeout(limit, connect=min(CONNECT_SECONDS, limit))
        super().__init__(
            max_retries=settings.retries,
            timeout=timeout,
            http_client=_HttpClient(requests, dispatch, timeout=timeout),
            **named,
        )
        self.organization = self.project = None  # else the SDK takes both from the environment
        self._requests = requests
        self._dispatch = dispatch

    def retry_after(self, headers: httpx2.Headers | None) -> float:
        """Return the seconds that `Retry-After` asks for; 0 without it."""
        return self._parse_retry_after_header(headers) or 0.0

    def _calculate_retry_timeout(
        self,
        remaining_retries: int,
        options: Any,
        response_headers: httpx2.Headers | None = None,
    ) -> float:
        # The SDK's backoff has no settings. If a later version no longer calls this, its own
        # backoff (0.5 s to 8 s) applies.
        wait = self.retry_after(response_headers)
        if 0 < wait <= MAX_RETRY_AFTER_SECONDS:
            self._dispatch.meter.hold(wait)
        if self._requests.is_closing:
            return 0.0
        exponent = self._dispatch.settings.retries - remaining_retries
        backoff = self._dispatch.settings.backoff_seconds * 2.0**exponent
        # With jitter, so that requests that failed together do not return together.
        return max(wait, min(backoff, MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1.0))


class _HttpClient(openai.DefaultAsyncHttpxClient):
    """Sends each request when the meter admits it, and reads its whole reply within a time limit."""

    def __init__(self, requests: EndpointRequests, dispatch: Dispatch, **named: Any) -> None:
        super().__init__(**named)
        self._requests = requests
        self._meter = dispatch.meter
        self._seconds = dispatch.settings.timeout_seconds

    async def send(self, request: httpx2.Request, **named: Any) -> httpx2.Response:
        """Send a request of the SDK.

        Raises:
            httpx2.RequestError: There is no whole reply, which the SDK may cure by another request.
            BudgetSpentError: The budget is spent.
            ClosedError: No further requests may be sent.
        """
        while not self._requests.is_closing and (wait := self._meter.admit()) > 0:
            await asyncio.sleep(wait)
        if self._requests.is_closing:
            raise ClosedError("no further requests are sent")
        self._requests.in_flight.add(asyncio.current_task())
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    response = await super().send(request, **named)
            except TimeoutError as error:
                raise httpx2.ReadTimeout("no whole reply in time", request=request) from error
            if response.is_success and not _is_completion(response):
                raise httpx2.DecodingError("the reply is no completion", request=request)
        except httpx2.RequestError as error:
            self._note(_reason(error))
            raise
        if response.is_error:
            self._note(f"HTTP {response.status_code}")
            if QUOTA_SPENT.search(response.text):
                response.headers["x-should-retry"] = "false"  # the SDK obeys this header
        return response

    def _note(self, reason: str) -> None:
        self._meter.failed(reason)
        self._requests.in_flight.discard(asyncio.current_task())


def _is_completion(response: httpx2.Response) -> bool:
    if response.headers.get("content-type", "").startswith("text/html"):
        raise BackendError("the endpoint answers with a web page; check the URL up to /v1")
    try:
        return isinstance(response.json()["choices"][0]["message"], dict)
    except (ValueError, LookupError, TypeError):
        return False


def _reason(error: BaseException) -> str:
    """Say in words that can be counted why there is no reply."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return "cannot connect"
    if isinstance(error, httpx2.TimeoutException):
        return "timed out"
    return "malformed reply" if isinstance(error, httpx2.DecodingError) else "connection lost"


def _read(completion: dict[str, Any]) -> Written:
    choice = completion["choices"][0]
    content = choice["message"].get("content") or ""
    if not isinstance(content, str):  # some servers send a list of parts
        content = "".join(part.get("text") or "" for part in content)
    if not content and choice.get("finish_reason") == "content_filter":
        raise NotAnsweredError("withheld by the content filter")
    tokens = (completion.get("usage") or {}).get("completion_tokens")
    return Written(storable(content), tokens or 0)
