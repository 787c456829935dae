"""The owner's part of the annotation desk over HTTP.

Every route needs the owner's cookie, which is checked before the body is read; annotators are refused. Forms
are multipart. Only an import may be larger than other requests: its files are read from disk, and one runs at a
time.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from compeer_core.annotation.desk import Desk
from compeer_core.errors import InputError, StoreError
from ui_components.annotate import view
from ui_components.annotate.annotators import is_owner, read_annotator
from ui_components.annotate.handlers import PageState
from ui_components.annotate.http import as_json, failed, is_own_page, refused
from ui_components.annotate.owner_handlers import Managing
from ui_components.server.uploads import safe_name
from ui_components.shared.services import Services
from ui_components.shared.texts import Texts

IMPORT_PATH = "/desk/owner/import"
MAX_IMPORT = 32 * 2**20
"""In bytes, all files together."""
IMPORT_SECONDS = 300.0
"""The time in which an import must arrive."""
FILES = ("items", "key", "answers")
_MOST_FIELDS = 1000

Action = Callable[[FormData, Texts], PageState]


def add_routes(app: FastAPI, services: Services, desk: Desk, managing: Managing) -> None:
    """Add the routes to the server."""
    actions: dict[str, Action] = {
        "person": lambda form, texts: managing.add_person(
            _text(form, "name"), bool(_text(form, "may_adjudicate")), texts
        ),
        "link": lambda form, texts: managing.renew_link(_text(form, "name"), texts),
        "revoke": lambda form, texts: managing.revoke(_text(form, "name"), texts),
        "samples": lambda _, texts: managing.add_samples(texts),
        "assign": lambda form, texts: managing.assign(
            _text(form, "batch"),
            [name for name in form.getlist("people") if isinstance(name, str)],
            _percent(form, "overlap", "overlap_unusable"),
            texts,
        ),
        "remove": lambda form, texts: managing.remove(_text(form, "batch"), texts),
        "import": lambda form, texts: _imported(form, managing, texts),
    }
    importing = asyncio.Lock()

    def add(name: str, action: Action) -> None:
        @app.post(f"/desk/owner/{name}", name=f"desk_owner_{name}")
        async def route(request: Request) -> Response:
            texts = services.texts(request)
            if not is_own_page(request):
                return refused("request_unusable", texts("annotate.error_other"), 403)
            try:
                refusal = await run_in_threadpool(_not_the_owner, request, desk, texts)
                if refusal is not None:
                    return refusal
                if name != "import":
                    return await acted(request, texts)
                if importing.locked():
                    return refused("busy", texts("owner.error_busy"), 429)
                async with importing:
                    return await acted(request, texts)
            except (InputError, StoreError) as error:
                return failed(error, texts)
            except OSError as error:  # for example a full disk
                return failed(StoreError(f"an import could not be stored: {error}"), texts)

        async def acted(request: Request, texts: Texts) -> Response:
            form = await _form(request)
            try:
                state = await run_in_threadpool(action, form, texts)
            finally:
                await form.close()
            return as_json(state.as_json())

    for name, action in actions.items():
        add(name, action)


def _not_the_owner(request: Request, desk: Desk, texts: Texts) -> Response | None:
    """Return the refusal of a request that is not the owner's."""
    if is_owner(desk, request.cookies):
        return None
    if read_annotator(desk, request.cookies) is not None:
        answer = refused("not_the_owner", texts("owner.error_not_the_owner"), 403)
    else:
        message = texts("annotate.error_logged_out")
        html = view.outside(texts, said=message)
        answer = as_json({"code": "logged_out", "error": message, "html": html}, 401)
    answer.headers["connection"] = "close"  # the body is unread
    return answer


def _imported(form: FormData, managing: Managing, texts: Texts) -> PageState:
    with tempfile.TemporaryDirectory(prefix="compeer-import-") as name:
        files: dict[str, Path] = {}
        for field in FILES:
            upload = form.get(field)
            if isinstance(upload, UploadFile) and upload.filename:
                folder = Path(name) / field
                folder.mkdir()
                files[field] = folder / (safe_name(upload.filename) or field)
                with files[field].open("wb") as file:
                    shutil.copyfileobj(upload.file, file)
        share = _percent(form, "share", "share_unusable")
        return managing.add_file(files, _text(form, "batch"), share, texts)


async def _form(request: Request) -> FormData:
    """Read a multipart form of limited size; its files are on disk.

    Raises:
        InputError: ``request_unusable``, or ``import_unusable`` if it is too large.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InputError("the request is no form", "request_unusable")

    async def bounded() -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_IMPORT:
                problem = f"at most {MAX_IMPORT // 2**20} MiB"
                raise InputError("too large", "import_unusable", {"problem": problem})
            yield chunk

    parser = MultiPartParser(
        request.headers, bounded(), max_files=len(FILES), max_fields=_MOST_FIELDS
    )
    try:
        async with asyncio.timeout(IMPORT_SECONDS):
            return await parser.parse()
    except (MultiPartException, UnicodeError, TimeoutError, ClientDisconnect) as error:
        raise InputError(f"the form cannot be read: {error}", "request_unusable") from error


def _text(form: Mapping[str, object], field: str) -> str:
    value = form.get(field)
    return value if isinstance(value, str) else ""


def _percent(form: Mapping[str, object], field: str, code: str) -> float:
    """Return a share from a number of percent.

    Raises:
        InputError: With the code: it is no number.
    """
    try:
        return float(_text(form, field)) / 100
    except ValueError as error:
        raise InputError(f"{field} is no number", code) from error
