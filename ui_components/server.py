"""The web server around the page: health, metrics, pictures, the visitor's cookie, headers.

Gradio is mounted in a FastAPI application of our own, because it sends no security headers and has
no place for a cookie that scripts cannot read. Its own conveniences that keep or publish what a
visitor typed are switched off here: the history of calls in the browser's storage, the monitoring
page, analytics, error details.
"""

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui_components.listening import listen
from ui_components.page import build_bare, build_page
from ui_components.services import Services
from ui_components.texts import LANGUAGES, choose_language, gradio_texts
from ui_components.theme import build_theme, load_css, load_js
from ui_components.visitors import COOKIE, COOKIE_SECONDS, LANGUAGE_COOKIE

MAX_UPLOAD = "8mb"
SWEEP_SECONDS = 60.0
SHUTDOWN_SECONDS = 3
START_SECONDS = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
FRAME_ANCESTORS = "'self' https://huggingface.co"
HEADERS = {
    "content-security-policy": (
        "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; img-src 'self' data: blob:; "
        "connect-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'; "
        f"frame-ancestors {FRAME_ANCESTORS}"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
    "cross-origin-opener-policy": "same-origin",
}


def build_server(services: Services, *, api_only: bool = False) -> FastAPI:
    """Build the application: our routes first, gradio behind them."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(services))
        try:
            yield
        finally:
            sweeping.cancel()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_routes(app, services, api_only=api_only)
    blocks = build_bare(services) if api_only else build_page(services, version())
    blocks.queue(max_size=256, default_concurrency_limit=None)
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
        max_file_size=MAX_UPLOAD,
        pwa=False,
        ssr_mode=False,
        allowed_paths=[],
        mcp_server=False,
    )
    app.add_middleware(Frontdoor, services=services)
    return app


def version() -> str:
    """Return the version of the package, "dev" where it is not installed."""
    try:
        return installed_version("compeer")
    except PackageNotFoundError:
        return "dev"


def _add_routes(app: FastAPI, services: Services, *, api_only: bool) -> None:
    models = services.models

    @app.get("/healthz")
    def health() -> JSONResponse:
        """Tell whether the server answers, and whether its default model is loaded."""
        policy = models.default("policy")
        state = (
            "ready"
            if models.is_ready(policy)
            else "failed"
            if models.is_broken(policy)
            else "loading"
        )
        return JSONResponse(
            {"status": "ok", "version": version(), "model": policy, "model_state": state}
        )

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        """Tell the counters."""
        services.metrics.waiting.set(models.waiting())
        services.metrics.conversations.set(len(services.store))
        return PlainTextResponse(
            services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/robots.txt")
    def robots() -> PlainTextResponse:
        """Keep search engines away from a chat."""
        return PlainTextResponse("User-agent: *\nDisallow: /\n")

    @app.get("/pictures/{turn}/{index}")
    def picture(turn: str, index: int, request: Request) -> Response:
        """Show a visitor a picture of theirs; for anybody else there is none."""
        visitor = services.visitors.read(request.cookies)
        image = services.store.picture(visitor, turn, index)
        if image is None:
            return PlainTextResponse("not found", status_code=404)
        return Response(
            image.data,
            media_type=image.media_type,
            headers={"cache-control": "private, no-store"},
        )

    if api_only:

        @app.get("/")
        def welcome() -> PlainTextResponse:
            """Say what there is instead of a page."""
            return PlainTextResponse(
                "COMPEER without a page. With gradio_client: /chat, /score, /models. "
                "Over HTTP: /healthz, /metrics.\n"
            )


async def _sweep(services: Services) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        services.store.sweep()


# --- headers, cookie, language -------------------------------------------------------------------


class Frontdoor:
    """Everything passes here: headers on all answers, the cookie and the language on the page."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_page = scope["method"] == "GET" and scope["path"] == "/"
        if is_page:
            asked = Request(scope).query_params.get("lang")
            if asked in LANGUAGES:
                await self._switch(str(asked), scope)(scope, receive, send)
                return
            # The page is changed on its way out, so it must not come compressed.
            scope = {
                **scope,
                "headers": [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"],
            }
        sender = _PageSender(send, self._page_head(scope)) if is_page else send
        cookies = Request(scope).cookies
        newcomer = is_page and not self._services.visitors.read(cookies)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    out.setdefault(name, value)
                if is_page:
                    out["cache-control"] = "no-store"
                if newcomer:
                    out.append("set-cookie", self._cookie(scope, headers))
            await sender(message)

        await self._app(scope, receive, send_with_headers)

    def _cookie(self, scope: Scope, headers: Headers) -> str:
        value = self._services.visitors.new_cookie()
        return (
            f"{COOKIE}={value}; Path=/; Max-Age={COOKIE_SECONDS}; HttpOnly; {_site(scope, headers)}"
        )

    def _switch(self, language: str, scope: Scope) -> ASGIApp:
        """Remember the language that was picked, and show the page in it."""
        cookie = (
            f"{LANGUAGE_COOKIE}={language}; Path=/; Max-Age={COOKIE_SECONDS}; "
            f"{_site(scope, Headers(scope=scope))}"
        )
        return Response(status_code=303, headers={"location": "./", "set-cookie": cookie} | HEADERS)

    def _page_head(self, scope: Scope) -> bytes:
        """The script that makes gradio speak the language which the server chose."""
        request = Request(scope)
        language = choose_language(
            request.cookies.get(LANGUAGE_COOKIE),
            request.headers.get("accept-language"),
            self._services.language,
        )
        tag = "zh-CN" if language == "zh" else language
        script = (
            "for (const [name, value] of [['language', TAG], ['languages', [TAG]]]) "
            "Object.defineProperty(navigator, name, {get: () => value, configurable: true});"
            "document.documentElement.lang = TAG;"
        ).replace("TAG", json.dumps(tag))
        return f"<script>{script}</script>".encode()


def _site(scope: Scope, headers: Headers) -> str:
    """Return how far a cookie travels: into a frame of another site only where the line is safe."""
    scheme = headers.get("x-forwarded-proto", scope.get("scheme", "http"))
    return "SameSite=None; Secure; Partitioned" if scheme == "https" else "SameSite=Lax"


class _PageSender:
    """Puts a script at the top of an HTML page that passes."""

    def __init__(self, send: Send, head: bytes) -> None:
        self._send = send
        self._head = head
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if not kind.startswith("text/html"):
                await self._send(message)
                return
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self._body.replace(b"<head>", b"<head>" + self._head, 1)
        MutableHeaders(scope=self._start)["content-length"] = str(len(body))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})


# --- serving -------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A uvicorn server that says when it really serves."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # addresses of visitors are not to be kept
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            ws="none",
        )
        super().__init__(config)
        self._on_served: Callable[[], None] | None = None

    def serve_on(self, bound: socket.socket, on_served: Callable[[], None]) -> None:
        """Serve until told to stop. ``on_served`` is called once requests are answered."""
        self._on_served = on_served
        self.run([bound])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End in good order on a signal; uvicorn would raise it again before our folders are gone."""
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
        """Start, and say so."""
        await super().startup(sockets)
        if self.started and self._on_served is not None:
            self._on_served()


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve in a thread of this process until the block ends; yields the address."""
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
