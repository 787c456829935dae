"""HTTP connections with time-outs for headers and for reading responses.

uvicorn bounds the time between two requests, but not the time that headers take, that an unwanted
body takes, or that a response waits for its reader. A few hundred clients which send a byte a
minute, or read none, would hold all connections. Wanted bodies are bounded by
`ui_components.server.request_filter`.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
UNREAD_SECONDS = 120.0
"""The time in which a full buffer must drain: enough for megabytes on a slow phone connection."""


class BoundedHeaders(H11Protocol):
    """uvicorn's own protocol, closing connections whose request or reader is too slow."""

    header_seconds = HEADER_SECONDS
    unread_seconds = UNREAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self.transport.close()  # the rest of the body is not read

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._watch_headers()
        else:
            self._stop_watching()

    def _watch_headers(self) -> None:
        if self._header_timer is None:  # further bytes do not extend the deadline
            self._header_timer = self.loop.call_later(self.header_seconds, self._close)

    def _stop_watching(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()
