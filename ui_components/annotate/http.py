"""Requests and answers of the annotation desk over HTTP, for annotators and the owner.

Errors are one sentence in the visitor's language, with a code for the script.
"""

import json
import logging
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from compeer_core.errors import InputError, StoreError
from ui_components.shared.texts import Texts

MAX_BODY = 256 * 1024
NO_STORE = {"cache-control": "private, no-store"}
_log = logging.getLogger(__name__)


def is_own_page(request: Request) -> bool:
    # Where the demo runs in a frame, a page of another site can send the cookie along.
    return request.headers.get("sec-fetch-site", "same-origin") == "same-origin"


async def read_json(request: Request) -> dict[str, Any]:
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


def failed(error: InputError | StoreError, texts: Texts) -> Response:
    if isinstance(error, StoreError):
        _log.error("the desk failed: %s", error)
        return refused("store", texts("annotate.error_store"), 503)
    if (key := f"annotate.error_{error.code}") in texts.words:
        return refused(error.code, texts(key, **error.values), 409)
    return refused(error.code, texts("annotate.error_other"), 400)


def unread(error: StoreError | OSError, texts: Texts) -> Response:
    """Report that a file is not available right now."""
    _log.error("the desk could not be read: %s", error)
    return PlainTextResponse(texts("annotate.error_store"), status_code=503)


def refused(code: str, sentence: str, status: int) -> Response:
    return as_json({"code": code, "error": sentence}, status)


def as_json(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status_code=status, headers=NO_STORE)
