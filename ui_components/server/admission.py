"""Admission: how many events each visitor, each network and all may have in progress.

Gradio has one queue and one set of workers for everything; a program that keeps posting would fill
both and block every button of the page. So both are made larger than all that is admitted here
(`EVENTS`), nothing ever waits in them, and requests beyond a limit are rejected on arrival.

An event is in progress from its request until its answer was sent, or until nobody can receive it
any more. Gradio sends answers on a second connection, which is watched here: otherwise an event
whose stream was never opened would run to its end, and so would a plain function whose caller has
left. Handlers ask their `Call`.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus

import gradio as gr
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui_components.server.visitors import Caller
from ui_components.shared.services import Services


@dataclass(frozen=True, eq=False)
class Kind:
    """A group of callers, and how many events they may have in progress."""

    of_visitor: int
    of_network: int
    in_all: int


KNOWN = Kind(of_visitor=12, of_network=64, in_all=512)
"""Visitors with a conversation, so that newcomers cannot keep them out. One has three tabs, each
with a reply, a comparison and a few clicks. A network may be a school."""
NEW = Kind(of_visitor=12, of_network=64, in_all=512)
"""Visitors without a conversation."""
PROGRAM = Kind(of_visitor=8, of_network=8, in_all=64)
"""Programs, and browsers without cookies: each occupies a thread while it waits and is served."""
EVENTS = 2 * (KNOWN.in_all + NEW.in_all + PROGRAM.in_all)
"""Gradio's capacity: abandoned events no longer count here, but gradio has yet to notice."""
HEARD_WITHIN_SECONDS = 10.0
"""The time in which the stream for an answer must be opened; a page needs one round trip."""
STREAMS = 4
"""Open streams per session or event. A page has one, and two while it reconnects."""
RETRY_SECONDS = 5

BEGINS = re.compile(r"/gradio_api/(?:queue/join|call/(?:v2/)?[^/]+)/?")
RUNS = re.compile(r"/gradio_api/(?:run|api)/[^/]+/?")
LISTENS = re.compile(r"/gradio_api/(?:queue/data|call/(?:v2/)?[^/]+/(?P<event>[^/]+))")
FOR_PROGRAMS = "/gradio_api/call/"
"""The page never uses these."""
IN_SCOPE = "compeer.call"

Clock = Callable[[], float]


class Call:
    """One event, from its request to its answer."""

    def __init__(self, caller: Caller, kind: Kind, streams: Counter[str], clock: Clock) -> None:
        self.caller = caller
        self.kind = kind
        self.event = ""
        """Gradio's id for it; empty until assigned."""
        self._session = ""
        self._streams = streams
        self._clock = clock
        self._awaited_since = clock()
        self._has_hung_up = False
        self._was_heard = asyncio.Event()

    @property
    def has_left(self) -> bool:
        """Whether nobody can receive the answer any more, or nobody listened in time."""
        if self._streams[self.event] or self._streams[self._session]:
            return False
        return self._has_hung_up or self._patience <= 0

    async def heard(self) -> bool:
        """Wait until somebody listens for the answer. Return whether that happened in time."""
        try:
            await asyncio.wait_for(self._was_heard.wait(), max(self._patience, 0.0))
        except TimeoutError:
            return False
        return not self.has_left

    def belongs_to(self, session: str) -> None:
        """The event belongs to a page, whose stream carries the answers to all its events."""
        self._session = session
        if self._streams[session]:
            self._was_heard.set()

    def is_answered_on(self, stream: str) -> bool:
        """Whether that stream carries the answer."""
        return stream in {self.event, self._session}

    def opened(self) -> None:
        """Note that the stream with the answer was opened."""
        self._was_heard.set()

    def closed(self, *, by_caller: bool) -> None:
        """Note that the stream with the answer has ended.

        A page's stream ends when nothing is in progress, and is reopened for what was requested in
        that moment.
        """
        self._has_hung_up = by_caller
        self._awaited_since = self._clock()

    @property
    def _patience(self) -> float:
        """For how many more seconds somebody may start to listen."""
        return self._awaited_since + HEARD_WITHIN_SECONDS - self._clock()


def call_of(request: gr.Request | None) -> Call | None:
    """Return the call that a handler answers; None outside HTTP."""
    http_request = getattr(request, "request", None)
    call: Call | None = None if http_request is None else http_request.scope.get(IN_SCOPE)
    if call is not None and request is not None:
        call.belongs_to(request.session_hash or "")
    return call


class Admission:
    """The middleware in front of gradio.

    It comes after whatever determines a caller's true address, since limits depend on it, and
    inside `HeadersMiddleware`, so that rejections carry the same headers as everything else.
    """

    def __init__(self, app: ASGIApp, services: Services, *, clock: Clock = time.monotonic) -> None:
        self._app = app
        self._services = services
        self._clock = clock
        self._calls: list[Call] = []
        self._streams: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if scope["method"] == "POST" and (BEGINS.fullmatch(path) or RUNS.fullmatch(path)):
                await self._let_in(scope, receive, send)
                return
            listens = LISTENS.fullmatch(path)
            if scope["method"] == "GET" and listens:
                stream = listens["event"] or Request(scope).query_params.get("session_hash")
                if stream and self._streams[stream] >= STREAMS:
                    sentence = f"{STREAMS} streams are open for this session already"
                    await _busy(sentence)(scope, receive, send)
                    return
                if stream:
                    await self._listen(stream, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._services.caller(Request(scope))
        if scope["path"].startswith(FOR_PROGRAMS):
            caller = replace(caller, is_program=True)
        self._calls = [call for call in self._calls if not call.has_left]
        kind = self._kind(caller)
        limit = self._limit(caller, kind)
        if limit:
            await self._refuse(limit, caller, Request(scope))(scope, receive, send)
            return
        call = Call(caller, kind, self._streams, self._clock)
        self._calls.append(call)
        answer = b""

        async def send_and_read(message: Message) -> None:
            nonlocal answer
            if message["type"] == "http.response.body":
                answer += message.get("body", b"")
                if not message.get("more_body"):
                    call.event = _event_in(answer)  # before its stream can be requested
            await send(message)

        begins = BEGINS.fullmatch(scope["path"])
        try:
            await self._app({**scope, IN_SCOPE: call}, receive, send_and_read if begins else send)
        finally:
            if not call.event:  # it has ended, or was rejected
                self._end(call)

    def _kind(self, caller: Caller) -> Kind:
        if caller.is_program:
            return PROGRAM
        return KNOWN if self._services.knows(caller.visitor) else NEW

    def _limit(self, caller: Caller, kind: Kind) -> str:
        """Return the limit that the caller would exceed, empty for none."""
        alike = [call.caller for call in self._calls if call.kind is kind]
        own = caller.visitor or caller.network
        if sum((other.visitor or other.network) == own for other in alike) >= kind.of_visitor:
            return "visitor"
        if sum(other.network == caller.network for other in alike) >= kind.of_network:
            return "network"
        return "all" if len(alike) >= kind.in_all else ""

    def _refuse(self, limit: str, caller: Caller, request: Request) -> ASGIApp:
        sentence = self._services.texts(request)(f"errors.busy_{limit}")
        status = HTTPStatus.TOO_MANY_REQUESTS
        if limit == "all" and caller.is_program:  # gradio's page shows its own words for a 503
            status = HTTPStatus.SERVICE_UNAVAILABLE
        return _busy(sentence, status)

    async def _listen(self, stream: str, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = has_hung_up = False

        async def receive_and_look() -> Message:
            nonlocal has_hung_up
            message = await receive()
            if message["type"] == "http.disconnect" and not is_whole:
                has_hung_up = True
            return message

        async def send_and_look(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.body" and not message.get("more_body"):
                is_whole = True
            for event in _ended_in(message.get("body", b""), stream):
                for call in [call for call in self._calls if call.event == event]:
                    self._end(call)
            await send(message)

        self._streams[stream] += 1
        for call in self._calls:
            if call.is_answered_on(stream):
                call.opened()
        try:
            await self._app(scope, receive_and_look, send_and_look)
        finally:
            self._streams[stream] -= 1
            if not self._streams[stream]:
                del self._streams[stream]
            for call in self._calls:
                if call.is_answered_on(stream):
                    call.closed(by_caller=has_hung_up)

    def _end(self, call: Call) -> None:
        if call in self._calls:
            self._calls.remove(call)


def _busy(sentence: str, status: HTTPStatus = HTTPStatus.TOO_MANY_REQUESTS) -> ASGIApp:
    return JSONResponse(
        {
            "detail": sentence,
            "error": sentence,
        },  # gradio's page reads "detail", its clients "error"
        status_code=status,
        headers={"retry-after": str(RETRY_SECONDS), "cache-control": "no-store"},
    )


def _event_in(answer: bytes) -> str:
    """Return the id of the event that gradio has accepted, empty if none."""
    try:
        event = json.loads(answer)["event_id"]
    except (ValueError, KeyError, TypeError):
        return ""
    return event if isinstance(event, str) else ""


def _ended_in(sent: bytes, stream: str) -> Iterator[str]:
    """Return the events that ended according to a chunk of a stream; gradio sends single messages."""
    if sent.startswith(b"event: complete\n"):  # an error is also what gradio says to who has left
        yield stream
    elif sent.startswith(b"data: ") and b'"process_completed"' in sent:
        message = json.loads(sent.removeprefix(b"data: "))
        if message.get("msg") == "process_completed":
            yield message.get("event_id") or ""
