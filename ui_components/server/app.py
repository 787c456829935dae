"""The web server around the page: health, metrics, images, the visitor's cookie, headers.

Gradio is mounted in our own FastAPI application, because it sends no security headers and has no
place for a cookie that scripts cannot read. Gradio features that store or publish what a visitor
typed are disabled here: the history of calls in the browser's storage, the monitoring page,
analytics, error details.
"""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any, cast

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ui_components.annotate import routes as annotate_routes
from ui_components.annotate.owner_routes import IMPORT_PATH
from ui_components.page import build_bare, build_page
from ui_components.results import routes as results_routes
from ui_components.server import forget_routes, upload_routes
from ui_components.server.admission import EVENTS, Admission
from ui_components.server.api import PICTURE_PARAMETERS
from ui_components.server.deletions import Arrivals
from ui_components.server.http_protocol import BoundedHeaders
from ui_components.server.listening import listen
from ui_components.server.middleware import HeadersMiddleware
from ui_components.server.request_filter import GradioCalls, RequestFilter
from ui_components.server.uploads import MAX_UPLOAD_BYTES, UPLOAD_PATH
from ui_components.server.visitors import is_from_here, picture_number
from ui_components.shared.services import Services
from ui_components.shared.texts import gradio_texts
from ui_components.shared.theme import build_theme, load_css, load_js
from ui_components.tour import routes as tour_routes

SESSIONS = 20_000
POLL_SECONDS = 0.02
"""How often gradio looks for a new event."""
SWEEP_SECONDS = 60.0
SHUTDOWN_SECONDS = 3
START_SECONDS = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def build_server(
    services: Services, *, api_only: bool = False, public_metrics: bool = False
) -> FastAPI:
    """Build the application: our routes first, then gradio.

    Args:
        services: What all visitors share.
        api_only: Serve no page.
        public_metrics: Show ``/metrics`` to everyone, not only to programs on this computer.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(services))
        try:
            yield
        finally:
            sweeping.cancel()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_routes(app, services, api_only=api_only, public_metrics=public_metrics)
    blocks = build_bare(services) if api_only else build_page(services, version())
    _make_room_for_events(blocks)
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        i18n=gradio_texts(),
        theme=build_theme(),
        css=load_css(),
        js=load_js(),
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        show_error=False,
        max_file_size=MAX_UPLOAD_BYTES,  # the page itself rejects larger files
        pwa=False,
        ssr_mode=False,
        allowed_paths=[],
        mcp_server=False,
    )
    # Gradio checks the files that a request names only if this is set, as its own launch() does.
    blocks.has_launched = True
    # Gradio would let pages of all origins read its responses. With this in front it adds no headers,
    # and since no origin is allowed, only our own page can read them.
    app.add_middleware(CORSMiddleware, allow_origins=())
    app.add_middleware(Admission, services=services)  # later additions are further out
    app.add_middleware(
        RequestFilter,
        calls=GradioCalls.of(blocks, PICTURE_PARAMETERS),
        own_routes=[route for route in app.routes if not isinstance(route, Mount)],
        uploads=services.uploads,
        owner_of=services.owner,
        streamed=frozenset({UPLOAD_PATH, IMPORT_PATH}),
    )
    app.add_middleware(HeadersMiddleware, services=services)
    app.add_middleware(Arrivals, deletions=services.deletions)
    return app


def _make_room_for_events(blocks: gr.Blocks) -> None:
    """Let gradio start at once whatever `Admission` admits, and only through the queue."""
    queue = blocks.queue(api_open=False, max_size=EVENTS, default_concurrency_limit=None)._queue
    queue.max_thread_count = EVENTS  # as `launch` sets it; most events need no thread
    # Beyond this, gradio drops the messages of the oldest session and ends its stream.
    queue.pending_messages_per_session.max_size = SESSIONS
    # gradio polls a thousand times a second. While a model runs, each time takes Python's lock from the model's thread.
    queue.sleep_when_free = queue.progress_update_sleep_when_free = POLL_SECONDS
    # Counting for the disabled monitoring page costs milliseconds per event.
    queue.ANALYTICS_MAX_EVENTS = 0


def version() -> str:
    """Return the version of the package, "dev" if it is not installed."""
    try:
        return installed_version("compeer")
    except PackageNotFoundError:
        return "dev"


def _add_routes(app: FastAPI, services: Services, *, api_only: bool, public_metrics: bool) -> None:
    models = services.models

    @app.get("/healthz")
    def health() -> JSONResponse:
        """Report whether the server answers, its default model is loaded, and the gate is on."""
        policy = models.default("policy")
        state = (
            "ready"
            if models.is_ready(policy)
            else "failed"
            if models.is_broken(policy)
            else "loading"
        )
        return JSONResponse(
            {
                "status": "ok",
                "version": version(),
                "model": policy,
                "model_state": state,
                "gate": services.gated,
            }
        )

    @app.get("/metrics")
    def metrics(request: Request) -> PlainTextResponse:
        """Report the counters."""
        if not public_metrics and not is_from_here(request):
            return PlainTextResponse(
                "the metrics are only available on the server's own computer; "
                "--metrics public makes them public\n",
                status_code=403,
            )
        services.metrics.waiting.set(models.queue_length())
        services.metrics.conversations.set(len(services.store))
        return PlainTextResponse(
            services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/robots.txt")
    def robots() -> PlainTextResponse:
        """Keep search engines away."""
        return PlainTextResponse("User-agent: *\nDisallow: /\n")

    @app.get("/pictures/{turn}/{index}")
    def picture(turn: str, index: str, request: Request) -> Response:
        """Serve a visitor's own image; 404 for anyone else."""
        visitor = services.visitors.read(request.cookies)
        number = picture_number(index)
        stores = (services.store, services.compare_jobs.store)
        images = (store.picture(visitor, turn, number) for store in stores)
        image = next((each for each in images if each is not None), None)
        if image is None:
            return PlainTextResponse("not found", status_code=404)
        return Response(
            image.data,
            media_type=image.media_type,
            headers={"cache-control": "private, no-store"},
        )

    forget_routes.add_routes(app, services)
    upload_routes.add_routes(app, services)
    if not api_only:
        annotate_routes.add_routes(app, services)
        tour_routes.add_routes(app, services)

    results_routes.add_routes(app, services)

    if api_only:

        @app.get("/")
        def welcome() -> PlainTextResponse:
            """List the endpoints."""
            return PlainTextResponse(
                "COMPEER without a page. With gradio_client: /chat, /score, /models, /leaderboard. "
                "Over HTTP: /healthz, /metrics, /results/board.json.\n"
            )


async def _sweep(services: Services) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        services.store.sweep()
        services.compare_jobs.store.sweep()
        services.risks.sweep()
        await asyncio.to_thread(services.uploads.sweep)


# --- serving -------------------------------------------------------------------------------------


class TrustedProxies:
    """Accepts forwarding headers from trusted proxies only.

    uvicorn does so for addresses and schemes, but gradio itself builds URLs from these headers.
    They are emptied, not removed, since `visitors.is_from_here` recognises a proxy by their names.
    """

    def __init__(self, app: ASGIApp, trusted_proxies: str) -> None:
        self._app = app
        # uvicorn's types are stricter than Starlette's.
        self._believing = ProxyHeadersMiddleware(cast("Any", app), trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, _ = scope.get("client") or (None, 0)
        if address is not None and address in self._believing.trusted_hosts:
            await self._believing(cast("Any", scope), cast("Any", receive), cast("Any", send))
            return
        if scope["type"] == "http":
            headers = [
                (name, b"" if name in (b"x-forwarded-host", b"x-forwarded-proto") else value)
                for name, value in scope["headers"]
            ]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


class Server(uvicorn.Server):
    """A uvicorn server that reports when it accepts requests."""

    def __init__(self, app: FastAPI, *, trusted_proxies: str = "") -> None:
        """Prepare to serve.

        Args:
            app: The application.
            trusted_proxies: Addresses or networks, separated by commas, whose ``X-Forwarded-*``
                headers are trusted; empty trusts none.
        """
        config = uvicorn.Config(
            TrustedProxies(app, trusted_proxies),
            http=BoundedHeaders,
            proxy_headers=False,  # see TrustedProxies
            log_level="warning",
            access_log=False,  # do not log visitors' addresses
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            ws="none",
        )
        super().__init__(config)
        self._on_served: Callable[[], None] | None = None

    def serve_on(self, bound: socket.socket, on_served: Callable[[], None]) -> None:
        """Serve until stopped. ``on_served`` is called once requests are answered."""
        self._on_served = on_served
        self.run([bound])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down cleanly on a signal; uvicorn would re-raise it before our folders are deleted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report it."""
        await super().startup(sockets)
        if self.started and self._on_served is not None:
            self._on_served()


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve in a thread until the block ends; yields the URL."""
    served = threading.Event()
    with listen("127.0.0.1", 0) as bound:
        server = Server(app)
        thread = threading.Thread(target=server.serve_on, args=(bound, served.set), daemon=True)
        thread.start()
        if not served.wait(START_SECONDS):
            raise RuntimeError("the server did not start")
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)
