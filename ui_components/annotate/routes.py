"""The annotation desk over HTTP: sign-in, pages, drafts, answers, images, files.

Everything needs the cookie of an annotator or of the owner (`annotators`), which sign-in issues for a
token; the token is in no request's URL and is not stored. Changes are accepted from our own page only.
What only the owner may do is in `annotate.owner_routes`.
"""

import asyncio
import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from compeer_core.annotation.annotations import write_csv
from compeer_core.annotation.desk import PASS_SECONDS, Annotator, Desk
from compeer_core.annotation.owner import DeskOwner
from compeer_core.errors import InputError, StoreError
from compeer_core.row_files import write_lines
from compeer_core.votes.reading import storable
from ui_components.annotate import owner_routes, view
from ui_components.annotate.annotators import (
    ANNOTATOR_COOKIE,
    Guesses,
    is_owner,
    read_annotator,
)
from ui_components.annotate.handlers import Annotating, PageRequest, read_request
from ui_components.annotate.http import (
    NO_STORE,
    as_json,
    failed,
    is_own_page,
    read_json,
    refused,
    unread,
)
from ui_components.annotate.owner_handlers import Managing
from ui_components.server.middleware import cookie_reach
from ui_components.server.visitors import picture_number
from ui_components.shared.services import Services
from ui_components.shared.texts import Texts

MAX_TOKEN = 200
TRIES_OF_VISITOR = 8
TRIES_OF_ADDRESS = 60
WRONG_DELAY_SECONDS = 1.0
"""The delay of the response to a wrong token."""
MOST_DELAYED = 32
"""Delayed responses at once; further ones are sent immediately, so that guesses do not hold
connections."""
_CHUNK = 64 * 1024
Handler = Callable[[Annotator, PageRequest, Texts], dict[str, Any]]
Export = tuple[str, Callable[[IO[str], str | None, bool], object]]
"""A media type, and what writes a file about a batch, perhaps about closed items only."""


def add_routes(app: FastAPI, services: Services) -> None:
    """Add the desk to the server."""
    desk, owner = Desk(services.votes), DeskOwner(services.votes)
    managing = Managing(desk, owner, services.votes.database.name)
    _add_door(app, services, desk, owner)
    _add_desk(app, services, desk, Annotating(desk), managing)
    _add_files(app, services, desk, owner)
    owner_routes.add_routes(app, services, desk, managing)


# --- sign-in -------------------------------------------------------------------------------------


def _add_door(app: FastAPI, services: Services, desk: Desk, owner: DeskOwner) -> None:
    guesses = Guesses()
    delayed = asyncio.Semaphore(MOST_DELAYED)

    def come_in(token: str) -> str | None:
        annotator = desk.log_in(token)
        return desk.new_pass(annotator) if annotator or owner.knows(token) else None

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
            return refused("wrong_token", texts("annotate.login_wrong"), 403)
        minutes = max(1, round(wait / 60))
        answer = refused("wait", texts("annotate.login_wait", minutes=minutes), 429)
        answer.headers["retry-after"] = str(int(wait) + 1)
        return answer

    @app.post("/desk/login")
    async def log_in(request: Request) -> Response:
        """Issue the cookie for a token."""
        texts = services.texts(request)
        visitor = services.visitors.read(request.cookies)
        if not visitor or not is_own_page(request):
            return refused("request_unusable", texts("annotate.error_other"), 403)
        try:
            token = (await read_json(request)).get("token")
            given = token.strip()[:MAX_TOKEN] if isinstance(token, str) else ""
            cookie = await run_in_threadpool(come_in, given)
        except (InputError, StoreError) as error:
            return failed(error, texts)
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
        """End the pass in the cookie; other browsers of the same person stay signed in."""
        texts = services.texts(request)
        if not is_own_page(request):
            return refused("request_unusable", texts("annotate.error_other"), 403)
        try:
            desk.end_pass(request.cookies.get(ANNOTATOR_COOKIE, ""))
        except StoreError as error:
            return failed(error, texts)
        answer = JSONResponse({"html": view.outside(texts, said=texts("annotate.logged_out"))})
        answer.headers["set-cookie"] = (
            f"{ANNOTATOR_COOKIE}=; Path=/; Max-Age=0; HttpOnly; {cookie_reach(request.scope)}"
        )
        return answer


# --- the desk ------------------------------------------------------------------------------------


def _add_desk(
    app: FastAPI, services: Services, desk: Desk, annotating: Annotating, managing: Managing
) -> None:
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
            if not is_own_page(request):
                return refused("request_unusable", texts("annotate.error_other"), 403)
            try:
                body = await read_json(request)
                return await run_in_threadpool(answered, request, body, texts)
            except (InputError, StoreError) as error:
                return failed(error, texts)

        def answered(request: Request, body: dict[str, Any], texts: Texts) -> Response:
            annotator = read_annotator(desk, request.cookies)
            if annotator is None:
                if name == "view" and is_owner(desk, request.cookies):
                    return as_json(managing.look(read_request(body).place, texts).as_json())
                if name == "view" and ANNOTATOR_COOKIE not in request.cookies:
                    return as_json({"html": view.outside(texts), "said": ""})
                message = texts("annotate.error_logged_out")
                html = view.outside(texts, said=message)
                return as_json({"code": "logged_out", "error": message, "html": html}, 401)
            return as_json(handler(annotator, read_request(body), texts))

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
            return unread(error, services.texts(request))
        if image is None:
            return PlainTextResponse("not found", status_code=404)
        return Response(image.data, media_type=image.media_type, headers=NO_STORE)


# --- files ---------------------------------------------------------------------------------------


def _add_files(app: FastAPI, services: Services, desk: Desk, owner: DeskOwner) -> None:
    files: dict[str, Export] = {
        "cer.jsonl": (
            "application/jsonl",
            lambda file, batch, _: write_lines(file, desk.settled(batch=batch)),
        ),
        "annotations.jsonl": (
            "application/jsonl",
            lambda file, batch, closed: write_lines(
                file, desk.annotations(closed=closed, batch=batch)
            ),
        ),
        "annotations.csv": (
            "text/csv; charset=utf-8",
            lambda file, batch, closed: write_csv(
                file, desk.annotations(closed=closed, batch=batch)
            ),
        ),
        "agreement.json": (
            "application/json",
            lambda file, batch, _: file.write(view.as_json(desk.report(batch=batch))),
        ),
    }
    of_owner: dict[str, Export] = {
        "readings.jsonl": (
            "application/jsonl",
            lambda file, batch, _: write_lines(file, owner.readings(batch)),
        ),
        "reader_agreement.json": (
            "application/json",
            lambda file, batch, _: file.write(view.as_json(owner.reader_agreement(batch))),
        ),
    }

    @app.get("/desk/export/{name}")
    def export(request: Request, name: str, batch: str | None = None) -> Response:
        """Serve a file to the owner, or to annotators who may decide conflicts.

        Annotators get answers about items that need no more independent ones, the owner all.
        """
        texts = services.texts(request)
        try:
            annotator = read_annotator(desk, request.cookies)
            by_owner = annotator is None and is_owner(desk, request.cookies)
            if annotator is None and not by_owner:
                return PlainTextResponse(texts("annotate.error_logged_out"), status_code=401)
            if annotator is not None and not annotator.may_adjudicate:
                sentence = texts("annotate.error_not_yours_to_export")
                return PlainTextResponse(sentence, status_code=403)
            served = files | of_owner if by_owner else files
            if name not in served:
                return PlainTextResponse("not found", status_code=404)
            media_type, write = served[name]
            of = None if batch is None else storable(batch)
            content = _written(
                lambda file: write(file, of, not by_owner), has_mark=name.endswith(".csv")
            )
        except (StoreError, OSError) as error:  # for example a full disk
            return unread(error, texts)
        headers = {**NO_STORE, "content-disposition": f'attachment; filename="{name}"'}
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
