"""An HTTP server in the test process that answers as a test says, with the faults of real ones."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from compeer_core.backends.openai.client import Endpoint as Client
from compeer_core.backends.openai.client import Patience
from compeer_core.backends.openai.policy import OpenAIBackend

HASTY = Patience(tries=3)


class Reply:
    """One answer of the server, written as the test says."""

    def __init__(
        self, handler: BaseHTTPRequestHandler, body: dict[str, Any], gone: threading.Event
    ) -> None:
        self._handler = handler
        self.body = body
        """The request that is answered."""
        self.gone = gone

    def head(self, status: int = 200, **headers: str) -> None:
        self._handler.send_response(status)
        for name, value in headers.items():
            self._handler.send_header(name.replace("_", "-"), value)
        self._handler.end_headers()

    def refuse(self, status: int, text: str = "", **headers: str) -> None:
        body = json.dumps({"error": {"message": text}}).encode()
        if "Retry_After" not in headers:
            headers["retry-after-ms"] = "1"  # the SDK would wait half a second
        self.head(status, Content_Type="application/json", Content_Length=str(len(body)), **headers)
        self.raw(body)

    def answer(self, content: Any) -> None:
        """A whole answer that is not streamed."""
        body = json.dumps(content, ensure_ascii=False).encode()
        self.head(Content_Type="application/json", Content_Length=str(len(body)))
        self.raw(body)

    def stream(self) -> None:
        self.head(Content_Type="text/event-stream", Transfer_Encoding="chunked")

    def raw(self, data: bytes) -> None:
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def block(self, data: bytes) -> None:
        """One block of a chunked body."""
        self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    def say(self, *texts: str) -> None:
        for text in texts:
            self.event({"choices": [{"delta": {"content": text}, "finish_reason": None}]})

    def event(self, content: Any) -> None:
        self.block(b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n")

    def end(self, reason: str = "stop", tokens: int | None = None) -> None:
        self.event({"choices": [{"delta": {}, "finish_reason": reason}]})
        if tokens is not None:
            self.event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.block(b"data: [DONE]\n\n")
        self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        self._handler.close_connection = True


Script = Callable[[Reply], None]


@dataclass
class Endpoint:
    """Answers the n-th request with the n-th script, and all further ones with the last."""

    scripts: list[Script] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a client has hung up while a script was writing."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    clients: list[Client] = field(default_factory=list)
    """Closed when the server is."""

    def __call__(self, *scripts: Script) -> "Endpoint":
        self.scripts = list(scripts)
        return self

    def backend(self, patience: Patience = HASTY) -> OpenAIBackend:
        backend = OpenAIBackend(self.url, "tiny", patience)
        self.clients.append(backend)
        return backend


@contextmanager
def serving() -> Iterator[Endpoint]:
    """Serve in threads of this process until the block ends."""
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked = json.loads(body)
            with state.lock:
                state.bodies.append(asked)
                state.headers.append({name.title(): value for name, value in self.headers.items()})
                state.paths.append(self.path)
                script = state.scripts[min(len(state.bodies), len(state.scripts)) - 1]
            try:
                script(Reply(self, asked, state.gone))
            except OSError:
                state.gone.set()
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            state.gone.set()

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        for client in state.clients:
            client.close()
        server.shutdown()
        server.server_close()
        thread.join()
