"""HTTP connections that do not wait for ever: a request's headers must arrive within seconds.

uvicorn bounds the time between two requests, but not the time that a request's own headers take, so
that a few hundred clients which send a byte a minute would hold all connections. Bodies are bounded
by `ui_components.request_filter`.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0


class BoundedHeaders(H11Protocol):
    """uvicorn's own protocol, which closes a connection whose next request does not arrive in time."""

    header_seconds = HEADER_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._watch_headers()
        else:
            self._stop_watching()

    def _watch_headers(self) -> None:
        if self._header_timer is None:  # a further byte does not buy more time
            self._header_timer = self.loop.call_later(self.header_seconds, self._close)

    def _stop_watching(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()
