"""Request filter: admits only what the page and the documented API send.

Gradio serves some fifty routes: it fetches files and URLs for anyone, stores states on disk, and
accepts a file name anywhere in a request. Here every route is closed except the listed ones, bodies
are bounded in size and time, and a file named in a request must be an image that the same visitor
has just uploaded. It is plain ASGI, because Starlette's middleware classes would hide from gradio
that a client has disconnected.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui_components.server.uploads import UPLOAD_PATH, Uploads

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024
"""For every request except uploads and imports."""
BODY_SECONDS = 15.0
"""The time in which a body must arrive."""

_ID = r"[\w-]{1,64}"
_DIRECT = "/gradio_api/run/predict"
_QUEUE = "/gradio_api/queue/join"
_CALL = re.compile(rf"/gradio_api/call/(?P<endpoint>{_ID})/?")
_STREAM = re.compile(rf"/gradio_api/queue/data|/gradio_api/call/{_ID}/{_ID}")
_GRADIO = (
    ("GET", re.compile(r"/|/config/?|/theme\.css|/favicon\.ico|/gradio_api/info/?")),
    ("GET", re.compile(r"/(assets|static|svelte)/[\w./-]{1,200}")),
    ("GET", _STREAM),
    ("HEAD", re.compile(r"/")),
    ("POST", re.compile(rf"{_QUEUE}|{_DIRECT}|/gradio_api/cancel")),
    ("POST", _CALL),
)
"""The gradio routes that the page, `gradio_client` and HTTP callers use."""

_BODY_KEYS = {"data", "event_data", "fn_index", "trigger_id", "session_hash"}
_FILE_KEYS = {"path", "url", "size", "orig_name", "mime_type", "is_stream", "meta"}
_SESSION = re.compile(_ID)
_MOST_NESTED = 16
_MOST_VALUES = 20_000


class RefusedError(Exception):
    """A rejected request. The message is one sentence for the caller."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class GradioCalls:
    """What the handlers of a `gradio.Blocks` accept: the number of values, and which are images."""

    arity: Mapping[int, int]
    """The number of inputs of each handler, by its index."""
    unqueued: frozenset[int]
    """The handlers that may be called outside the queue."""
    pictures: Mapping[int, frozenset[int]]
    """The positions of a handler's image inputs."""
    endpoints: Mapping[str, int]
    """The named endpoints for programs."""

    @classmethod
    def of(cls, blocks: gr.Blocks, picture_parameters: Mapping[str, int]) -> "GradioCalls":
        """Read them from the blocks.

        Args:
            blocks: With all handlers added.
            picture_parameters: The position of the image among an endpoint's parameters.
        """
        handlers = blocks.fns
        endpoints = {
            str(handler.api_name): index
            for index, handler in handlers.items()
            if handler.api_visibility == "public" and handler.api_name
        }
        places = {endpoints[name]: {place} for name, place in picture_parameters.items()}
        for index, handler in handlers.items():
            boxes = {
                place
                for place, block in enumerate(handler.inputs)
                if isinstance(block, gr.MultimodalTextbox)
            }
            places[index] = places.get(index, set()) | boxes
        return cls(
            arity={index: len(handler.inputs) for index, handler in handlers.items()},
            unqueued=frozenset(index for index, handler in handlers.items() if not handler.queue),
            pictures={index: frozenset(where) for index, where in places.items()},
            endpoints=endpoints,
        )


class RequestFilter:
    """Admits listed requests only. Only the headers (`HeadersMiddleware`) are outside of it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        calls: GradioCalls,
        own_routes: Sequence[BaseRoute],
        uploads: Uploads,
        owner_of: Callable[[Request], str],
        streamed: frozenset[str] = frozenset({UPLOAD_PATH}),
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """Wrap an application.

        Args:
            app: The application.
            calls: What gradio's handlers accept.
            own_routes: Routes that are not gradio's; they check their own input.
            uploads: The images that wait to be sent.
            owner_of: Returns the owner of a request; see `Uploads`.
            streamed: Paths that bound the size and time of their bodies themselves.
            body_seconds: The time in which a body must arrive.
        """
        self._app = app
        self._calls = calls
        self._own_routes = tuple(own_routes)
        self._uploads = uploads
        self._owner_of = owner_of
        self._streamed = streamed
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets here
        try:
            scope, receive = await self._let_in(scope, receive)
        except RefusedError as refused:
            await _refusal(refused)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except RuntimeError:
            # Gradio notices only in the middle of its answer that nobody knows the call that is
            # listened to. The listener was told; a traceback would say no more.
            if not _STREAM.fullmatch(scope["path"]):
                raise
            logger.info("a stream of events was asked for that there is none of")

    async def _let_in(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """Return the request in the form that is passed on.

        Raises:
            RefusedError: It is not allowed.
        """
        method, path = scope["method"], scope["path"]
        own = any(route.matches(scope)[0] is Match.FULL for route in self._own_routes)
        if not own and not any(
            method == allowed and pattern.fullmatch(path) for allowed, pattern in _GRADIO
        ):
            raise RefusedError(404, "there is nothing at this address")
        if method in ("GET", "HEAD"):
            # Only our own routes and the event stream use a query. The page reads its own
            # parameters in the browser; gradio would load a saved state for others.
            asked_for = scope["query_string"] if own or path == "/gradio_api/queue/data" else b""
            return {**scope, "query_string": asked_for}, receive
        if _is_from_another_site(Headers(scope=scope)):
            raise RefusedError(403, "a page of another site may not send this")
        if path in self._streamed:
            return scope, receive
        body = await _body(receive, self._body_seconds)
        if not own:
            body = self._checked(scope, path, body)
        return _with_length(scope, len(body)), _replayed(body, receive)

    # --- what is passed to gradio ---

    def _checked(self, scope: Scope, path: str, body: bytes) -> bytes:
        """Return a body for gradio, rebuilt from the checked values."""
        content = _json_object(body)
        if path == "/gradio_api/cancel":
            return json.dumps(_cancellation(content)).encode()
        called = _CALL.fullmatch(path)
        if called:
            index = self._calls.endpoints.get(called["endpoint"])
            if index is None:
                names = ", ".join(f"/{name}" for name in self._calls.endpoints)
                raise RefusedError(404, f"there is no such endpoint; there are {names}")
            content = {"data": content.get("data")}
        else:
            if not content.keys() <= _BODY_KEYS:
                raise RefusedError(400, "the request has an unknown field")
            index = _handler(content, self._calls)
            if path == _DIRECT and index not in self._calls.unqueued:
                raise RefusedError(404, "this endpoint is only available through the queue")
            if path == _QUEUE and index in self._calls.unqueued:
                # Its answer would stay in memory if nobody ever listens.
                raise RefusedError(404, "this endpoint is not available through the queue")
            _check_session(content)
        arity = self._calls.arity[index]
        data = content["data"]
        if not isinstance(data, list):
            raise RefusedError(400, "data must be a list with a value for each parameter")
        if len(data) != arity:
            raise RefusedError(400, f"data must hold {arity} values, one for each parameter")
        owner = self._owner_of(Request(scope))
        pictures = self._calls.pictures[index]
        for place, value in enumerate(data):
            self._check_files(value, owner, allowed=place in pictures)
        self._check_files(content.get("event_data"), owner, allowed=bool(pictures))
        return json.dumps(content).encode()

    def _check_files(self, value: object, owner: str, *, allowed: bool) -> None:
        """Allow a file only where an image is expected, and only one of the owner's uploads."""
        for named in _objects(value):
            meta = named.get("meta")
            if "path" not in named and not (isinstance(meta, dict) and "_type" in meta):
                continue
            path = named.get("path")
            if not (
                allowed
                and named.keys() <= _FILE_KEYS
                and not named.get("is_stream")
                and isinstance(path, str)
                and self._uploads.holds(path, owner)
            ):
                raise RefusedError(400, "a file must be a picture that you uploaded to this server")
            # Gradio creates the URL itself; a URL from outside could lead anywhere.
            named.pop("url", None)


def _is_from_another_site(headers: Headers) -> bool:
    """Whether a page of another site sends this; programs do not send the header."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    # Browsers omit it on unencrypted connections, but send the origin.
    origin = headers.get("origin")
    hosts = (headers.get("host"), headers.get("x-forwarded-host"))
    return origin is not None and (origin.partition("://")[2] or "null") not in hosts


# --- bodies --------------------------------------------------------------------------------------


async def _body(receive: Receive, seconds: float) -> bytes:
    """Read a body.

    Raises:
        RefusedError: It is too large or too slow, or its sender has disconnected.
    """
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RefusedError(400, "the request is incomplete")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise RefusedError(413, f"at most {MAX_BODY_BYTES:,} bytes may be sent at once")
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError as error:
        sentence = f"the request was not complete within {seconds:.0f} seconds"
        raise RefusedError(408, sentence) from error


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that yields a body once and then waits for the disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "the request is not JSON") from error
    if not isinstance(content, dict):
        raise RefusedError(400, "the request is not a JSON object")
    return content


def _no_number(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Every JSON object in a value.

    Raises:
        RefusedError: It is nested too deeply, or has too many values.
    """
    waiting: list[tuple[object, int]] = [(value, 0)]
    count = 0
    while waiting:
        inner, depth = waiting.pop()
        count += 1
        if depth > _MOST_NESTED or count > _MOST_VALUES:
            raise RefusedError(400, "the request is nested too deeply or has too many values")
        if isinstance(inner, dict):
            yield inner
            waiting += [(child, depth + 1) for child in inner.values()]
        elif isinstance(inner, list):
            waiting += [(child, depth + 1) for child in inner]


def _handler(content: Mapping[str, Any], calls: GradioCalls) -> int:
    index = content.get("fn_index")
    if not isinstance(index, int) or isinstance(index, bool) or index not in calls.arity:
        raise RefusedError(400, "fn_index names no handler of this page; please reload it")
    trigger = content.get("trigger_id")
    if trigger is not None and (not isinstance(trigger, int) or isinstance(trigger, bool)):
        raise RefusedError(400, "trigger_id must be a whole number")
    if "data" not in content:
        raise RefusedError(400, "data is missing")
    return index


def _check_session(content: Mapping[str, Any]) -> None:
    session = content.get("session_hash")
    if not isinstance(session, str) or not _SESSION.fullmatch(session):
        raise RefusedError(400, "session_hash must be up to 64 letters and digits")


def _cancellation(content: Mapping[str, Any]) -> dict[str, Any]:
    names = {name: content.get(name) for name in ("session_hash", "event_id")}
    if not all(isinstance(name, str) and _SESSION.fullmatch(name) for name in names.values()):
        raise RefusedError(400, "session_hash and event_id must be those of a call")
    index = content.get("fn_index")
    if not isinstance(index, int) or isinstance(index, bool):
        raise RefusedError(400, "fn_index must be a whole number")
    return {**names, "fn_index": index}


def _refusal(refused: RefusedError) -> Response:
    # Gradio's page reads "detail", its clients "error".
    content = {"detail": str(refused), "error": str(refused)}
    # Close the connection: the rest of an unread body may follow.
    return JSONResponse(content, status_code=refused.status, headers={"connection": "close"})
