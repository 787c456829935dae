"""Delete my data: everything that is kept of whoever asks."""

import asyncio
import logging

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from compeer_core.errors import StoreError
from ui_components.shared.services import Services

ERASED_SECONDS = 3.0
"""How long an answer waits until the database's files hold nothing any more of what was deleted."""

logger = logging.getLogger(__name__)


def add_routes(app: FastAPI, services: Services) -> None:
    """Add what the button at the foot of the page asks for."""

    @app.post("/forget")
    async def forget(request: Request) -> JSONResponse:
        """Delete everything that is kept of whoever asks.

        In the answer, ``erased`` is false where the database's files still hold traces, beside a long
        reader for example; they are overwritten later, without anybody asking again.
        """
        visitor = services.visitors.read(request.cookies)
        # A page of another site can send the cookie along where the demo runs in a frame.
        if not visitor or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return JSONResponse({"error": "not the visitor's own page"}, status_code=403)
        try:
            deleted = await run_in_threadpool(services.forget, visitor)
        except StoreError as error:
            logger.error("a deletion failed: %s", error)
            sentence = services.texts(request)("page.forgotten_half")
            return JSONResponse({"code": "store", "error": sentence}, status_code=503)
        erased = asyncio.wrap_future(services.votes.database.erased)
        await asyncio.wait([erased], timeout=ERASED_SECONDS)
        return JSONResponse(
            {"battles": deleted.battles, "votes": deleted.votes, "erased": erased.done()}
        )
