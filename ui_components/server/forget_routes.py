"""The route behind "Delete my data"."""

import asyncio
import logging

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from compeer_core.errors import StoreError
from ui_components.shared.services import Services

ERASED_SECONDS = 3.0
"""How long the response waits for the database files to be overwritten."""

logger = logging.getLogger(__name__)


def add_routes(app: FastAPI, services: Services) -> None:
    """Add the route of the button at the foot of the page."""

    @app.post("/forget")
    async def forget(request: Request) -> JSONResponse:
        """Delete everything stored about the visitor.

        ``erased`` in the response is false if the database's files still contain traces, for
        example because of a long-running reader; they are overwritten later without another
        request.
        """
        visitor = services.visitors.read(request.cookies)
        # Where the demo runs in a frame, a page of another site can send the cookie along.
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
