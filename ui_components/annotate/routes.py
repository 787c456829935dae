"""The annotation desk over HTTP: sign-in, pages, drafts, answers, images, files.

Everything needs the cookie of an annotator (`annotators.Annotators`), which sign-in issues for a
token; the token is in no URL and is not stored. Changes are accepted from our own page only. Errors
are one sentence in the visitor's language, with a code for the script.
"""

import asyncio
import hashlib
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from compeer_core.annotation.annotations import write_csv
from compeer_core.annotation.desk import PASS_SECONDS, Annotator, Desk
from compeer_core.errors import InputError, StoreError
from compeer_core.row_files import write_lines
from ui_components.annotate import view
from ui_components.annotate.annotators import ANNOTATOR_COOKIE, Guesses, read_annotator
from ui_components.annotate.handlers import Annotating, PageRequest, read_request
from ui_components.server.middleware import cookie_reach
from ui_components.server.visitors import picture_number
from ui_components.shared.services import Services
from ui_components.shared.texts import Texts

MAX_BODY = 256 * 1024
MAX_TOKEN = 200
TRIES_OF_VISITOR = 8
TRIES_OF_ADDRESS = 60
WRONG_DELAY_SECONDS = 1.0
"""The delay of the response to a wrong token."""
MOST_DELAYED = 32
"""Delayed responses at once; further ones are sent immediately, so that guesses do not hold
connections."""
_CHUNK = 64 * 1024
_NO_STORE = {"cache-control": "private, no-store"}
_SENTENCES = {
    "item_not_yours",
    "item_open_elsewhere",
    "item_closed",
    "item_decided",
    "answer_incomplete",
    "reason_missing",
    "nothing_to_take_back",
    "note_too_long",
}

_log = logging.getLogger(__name__)

Handler = Callable[[Annotator, PageRequest, Texts], dict[str, Any]]


def add_routes(app: FastAPI, services: Services) -> None:
    """Add the desk to the server."""
    desk = Desk(services.votes)
    annotating = Annotating(desk)
    _add_door(app, services, desk)
    _add_desk(app, services, desk, annotating)
    _add_files(app, services, desk)


# --- sign-in -------------------------------------------------------------------------------------


def _add_door(app: FastAPI, services: Services, desk: Desk) -> None:
    guesses = Guesses()
    delayed = asyncio.Semaphore(MOST_DELAYED)

    def come_in(token: str) -> str | None:
        annotator = desk.log_in(token)
        return None if annotator is None else desk.new_pass(annotator)

    async def refuse(request: Request, visitor: str, texts: Texts) -> Response:
        address = request.client.host if request.client else ""
        wait = guesses.count(
            {
                f"visitor {visitor}": TRIES_OF_VISITOR,
                f"address {hashlib.sha256(address.encode()).hexdigest()}": TRIES_OF_ADDRESS,
            }
        )
        if not delayed.locked():
            async with delayed:
                await asyncio.sleep(WRONG_DELAY_SECONDS)
        if wait <= 0:
            return _refused("wrong_token", texts("annotate.login_wrong"), 403)
        minutes = max(1, round(wait / 60))
        refused = _refused("wait", texts("annotate.login_wait", minutes=minutes), 429)
        refused.headers["retry-after"] = str(int(wait) + 1)
        return refused

    @app.post("/desk/login")
    async def log_in(request: Request) -> Response:
        """Issue the cookie for a token."""
        texts = services.texts(request)
        visitor = services.visitors.read(request.cookies)
        if not visitor or not _is_own_page(request):
            return _refused("request_unusable", texts("annotate.error_other"), 403)
        try:
            token = (await _body(request)).get("token")
            given = token.strip()[:MAX_TOKEN] if isinstance(token, str) else ""
            cookie = await run_in_threadpool(come_in, given)
        except (InputError, StoreError) as error:
            return _failed(error, texts)
        if cookie is None:
            return await refuse(request, visitor, texts)
        answer = JSONResponse({})
        answer.headers["set-cookie"] = (
            f"{ANNOTATOR_COOKIE}={cookie}; Path=/; Max-Age={PASS_SECONDS}; HttpOnly; "
            f"{cookie_reach(request.scope)}"
        )
        return answer

    @app.post("/desk/logout")
    def log_out(request: Request) -> Response:
        """End the pass in the cookie; other browsers of the annotator stay signed in."""
        texts = services.texts(request)
        if not _is_own_page(request):
            return _refused("request_unusable", texts("annotate.error_other"), 403)
        try:
            desk.end_pass(request.cookies.get(ANNOTATOR_COOKIE, ""))
        except StoreError as error:
            return _failed(error, texts)
        answer = JSONResponse({"html": view.outside(texts, said=texts("annotate.logged_out"))})
        answer.headers["set-cookie"] = (
            f"{ANNOTATOR_COOKIE}=; Path=/; Max-Age=0; HttpOnly; {cookie_reach(request.scope)}"
        )
        return answer


# --- the desk ------------------------------------------------------------------------------------


def _add_desk(app: FastAPI, services: Services, desk: Desk, annotating: Annotating) -> None:
    handlers: dict[str, Handler] = {
        "view": lambda who, page_request, texts: annotating.look(
            who, page_request, texts
        ).as_json(),
        "draft": lambda who, page_request, _: annotating.save_draft(who, page_request),
        "hold": lambda who, page_request, _: annotating.hold(who, page_request),
        "leave": lambda who, page_request, _: annotating.leave(who, page_request),
        "answer": lambda who, page_request, texts: annotating.save(
            who, page_request, texts
        ).as_json(),
        "undo": lambda who, page_request, texts: annotating.take_back(
            who, page_request, texts
        ).as_json(),
    }

    def add(name: str, handler: Handler) -> None:
        @app.post(f"/desk/{name}", name=f"desk_{name}")
        async def route(request: Request) -> Response:
            texts = services.texts(request)
            if not _is_own_page(request):
                return _refused("request_unusable", texts("annotate.error_other"), 403)
            try:
                body = await _body(request)
                return await run_in_threadpool(answered, request, body, texts)
            except (InputError, StoreError) as error:
                return _failed(error, texts)

        def answered(request: Request, body: dict[str, Any], texts: Texts) -> Response:
            annotator = read_annotator(desk, request.cookies)
            if annotator is None:
                if name == "view" and ANNOTATOR_COOKIE not in request.cookies:
                    return _json({"html": view.outside(texts), "said": ""})
                message = texts("annotate.error_logged_out")
                html = view.outside(texts, said=message)
                return _json({"code": "logged_out", "error": message, "html": html}, 401)
            return _json(handler(annotator, read_request(body), texts))

    for name, handler in handlers.items():
        add(name, handler)

    @app.get("/desk/picture")
    def picture(request: Request, item: str = "", number: str = "") -> Response:
        """Serve an image of an item to the annotator it is assigned to."""
        image = None
        try:
            annotator = read_annotator(desk, request.cookies)
            if annotator is not None:
                image = annotating.picture(annotator, item, picture_number(number))
        except InputError:
            pass
        except StoreError as error:
            return _unread(error, services.texts(request))
        if image is None:
            return PlainTextResponse("not found", status_code=404)
        return Response(image.data, media_type=image.media_type, headers=_NO_STORE)


# --- files ---------------------------------------------------------------------------------------


def _add_files(app: FastAPI, services: Services, desk: Desk) -> None:
    def cer(file: IO[str]) -> None:
        for record in desk.settled():
            file.write(record.model_dump_json() + "\n")

    def report(file: IO[str]) -> None:
        file.write(view.as_json(desk.report()))

    files: dict[str, tuple[str, Callable[[IO[str]], object]]] = {
        "cer.jsonl": ("application/jsonl", cer),
        "annotations.jsonl": (
            "application/jsonl",
            lambda file: write_lines(file, desk.annotations(closed=True)),
        ),
        "annotations.csv": (
            "text/csv; charset=utf-8",
            lambda file: write_csv(file, desk.annotations(closed=True)),
        ),
        "agreement.json": ("application/json", report),
    }

    @app.get("/desk/export/{name}")
    def export(request: Request, name: str) -> Response:
        """Serve a file to annotators who may decide conflicts."""
        texts = services.texts(request)
        try:
            annotator = read_annotator(desk, request.cookies)
            if annotator is None:
                return PlainTextResponse(texts("annotate.error_logged_out"), status_code=401)
            if not annotator.may_adjudicate:
                sentence = texts("annotate.error_not_yours_to_export")
                return PlainTextResponse(sentence, status_code=403)
            if name not in files:
                return PlainTextResponse("not found", status_code=404)
            media_type, write = files[name]
            content = _written(write, has_mark=name.endswith(".csv"))
        except (StoreError, OSError) as error:  # for example a full disk
            return _unread(error, texts)
        headers = {**_NO_STORE, "content-disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(content, media_type=media_type, headers=headers)


def _written(write: Callable[[IO[str]], object], *, has_mark: bool) -> Iterator[bytes]:
    """Write the whole file before sending any of it, so that a failure does not send half a file."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it has been sent
    try:
        text = io.TextIOWrapper(
            file, encoding="utf-8-sig" if has_mark else "utf-8", newline="", write_through=True
        )
        write(text)
        text.detach()
    except BaseException:
        file.close()
        raise

    def content() -> Iterator[bytes]:
        with file:
            file.seek(0)
            while chunk := file.read(_CHUNK):
                yield chunk

    return content()


# --- requests and answers ------------------------------------------------------------------------


def _is_own_page(request: Request) -> bool:
    # Where the demo runs in a frame, a page of another site can send the cookie along.
    return request.headers.get("sec-fetch-site", "same-origin") == "same-origin"


async def _body(request: Request) -> dict[str, Any]:
    """Read a JSON object of limited size.

    Raises:
        InputError: ``request_unusable``.
    """
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise InputError("the request is too large", "request_unusable")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError("the request is not JSON", "request_unusable") from error
    if not isinstance(body, dict):
        raise InputError("the request is not a JSON object", "request_unusable")
    return body


def _failed(error: InputError | StoreError, texts: Texts) -> Response:
    if isinstance(error, StoreError):
        _log.error("the desk failed: %s", error)
        return _refused("store", texts("annotate.error_store"), 503)
    if error.code in _SENTENCES:
        message = texts(f"annotate.error_{error.code}", **error.values)
        return _refused(error.code, message, 409)
    return _refused(error.code, texts("annotate.error_other"), 400)


def _unread(error: StoreError | OSError, texts: Texts) -> Response:
    """Report that a file is not available right now."""
    _log.error("the desk could not be read: %s", error)
    return PlainTextResponse(texts("annotate.error_store"), status_code=503)


def _refused(code: str, sentence: str, status: int) -> Response:
    return _json({"code": code, "error": sentence}, status)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status_code=status, headers=_NO_STORE)
