"""Upload routes that replace gradio's; `uploads` says why."""

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from compeer_core.errors import ImageError
from ui_components.chat.handlers import error_sentence
from ui_components.server.uploads import UPLOAD_PATH
from ui_components.shared.services import Services

_STATUS = {"upload_too_large": 413, "busy_network": 429, "no_room": 507}


def add_routes(app: FastAPI, services: Services) -> None:
    """Add the routes, which must precede gradio's."""

    @app.post(UPLOAD_PATH)
    async def upload(request: Request) -> Response:
        """Store images for the next message."""
        try:
            paths = await services.uploads.receive(request, services.owner(request))
        except ImageError as error:
            # Gradio's page shows the body of an error unchanged.
            sentence = error_sentence(error, services.texts(request))
            status = _STATUS.get(error.code, 400)
            headers = {"retry-after": "5"} if status == 429 else {}
            # Close the connection: the rest of an unread body may follow.
            return PlainTextResponse(sentence, status, headers={**headers, "connection": "close"})
        return JSONResponse(paths)

    @app.get("/gradio_api/file={path:path}")
    def uploaded(path: str, request: Request) -> Response:
        """Serve a visitor's image in the message box; gradio's page requests it by its path."""
        return services.uploads.show(path, services.owner(request))
