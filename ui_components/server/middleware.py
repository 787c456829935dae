"""Headers, the visitor's cookie and the language, for every request.

Gradio sends no security headers. This is plain ASGI, because Starlette's middleware classes would
hide from gradio that a client has disconnected.
"""

import json

from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui_components.server.visitors import COOKIE, COOKIE_SECONDS, LANGUAGE_COOKIE
from ui_components.shared.services import Services
from ui_components.shared.texts import LANGUAGES, choose_language, region_of

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


class HeadersMiddleware:
    """The outermost middleware: headers on all responses, cookie and language on the page."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_page = scope["method"] == "GET" and scope["path"] == "/"
        if is_page:
            language = Request(scope).query_params.get("lang")
            if language in LANGUAGES:
                await self._switch(str(language), scope)(scope, receive, send)
                return
            # The page is modified below, so it must arrive uncompressed.
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
                    out.append("set-cookie", self._cookie(scope))
            await sender(message)

        await self._app(scope, receive, send_with_headers)

    def _cookie(self, scope: Scope) -> str:
        network = self._services.caller(Request(scope)).network
        value = self._services.visitors.new_cookie(network)
        return (
            f"{COOKIE}={value}; Path=/; Max-Age={COOKIE_SECONDS}; HttpOnly; {cookie_reach(scope)}"
        )

    def _switch(self, language: str, scope: Scope) -> ASGIApp:
        """Store the selected language, and show the page in it."""
        cookie = (
            f"{LANGUAGE_COOKIE}={language}; Path=/; Max-Age={COOKIE_SECONDS}; {cookie_reach(scope)}"
        )
        return Response(status_code=303, headers={"location": "./", "set-cookie": cookie} | HEADERS)

    def _page_head(self, scope: Scope) -> bytes:
        """The script that makes gradio use the language that the server chose.

        It hides the browser's languages, so it also gives the page the reader's country.
        """
        request = Request(scope)
        accepted = request.headers.get("accept-language")
        language = choose_language(
            request.cookies.get(LANGUAGE_COOKIE),
            accepted,
            self._services.language,
        )
        tag = "zh-CN" if language == "zh" else language
        script = (
            "for (const [name, value] of [['language', TAG], ['languages', [TAG]]]) "
            "Object.defineProperty(navigator, name, {get: () => value, configurable: true});"
            "document.documentElement.lang = TAG;"
            f"document.documentElement.dataset.region = {json.dumps(region_of(accepted, language))};"
        ).replace("TAG", json.dumps(tag))
        return f"<script>{script}</script>".encode()


def cookie_reach(scope: Scope) -> str:
    """Return the cookie's SameSite: frames of other sites get it only over HTTPS.

    Behind a proxy the scheme is the proxy's, if it is one of ``--forwarded-allow-ips``.
    """
    return "SameSite=None; Secure; Partitioned" if scope["scheme"] == "https" else "SameSite=Lax"


class _PageSender:
    """Inserts a script at the top of an HTML page."""

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
