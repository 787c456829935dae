"""Visitors and attackers over real HTTP, without a browser: cookies, addresses, gradio's protocol.

Linux answers on all of 127.0.0.0/8, so two of them can come from different addresses.
"""

import http.client
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from ui_components.server.visitors import COOKIE

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"


class Browser:
    """A page without a browser."""

    def __init__(self, address: str, local: str = HERE, *, language: str = "en") -> None:
        transport = httpx.HTTPTransport(local_address=local)
        headers = {"accept-language": language}
        self.http = httpx.Client(base_url=address, timeout=60, transport=transport, headers=headers)
        self.cookie = self.http.get("/").cookies[COOKIE]
        self.config = self.http.get("/config").json()
        self.conversation = "conversation-" + "a" * 16
        self.session = secrets.token_hex(6)
        self._indices: dict[tuple[str, str], int] = {}

    def index(self, element: str, event: str) -> int:
        """The number of the handler that answers an event."""
        if (element, event) not in self._indices:
            component = next(
                each["id"]
                for each in self.config["components"]
                if each["props"].get("elem_id") == element
            )
            self._indices[element, event] = next(
                each["id"]
                for each in self.config["dependencies"]
                if [component, event] in [list(target) for target in each["targets"]]
            )
        return self._indices[element, event]

    def message(self, text: str, conversation: str = "", session: str = "") -> dict[str, Any]:
        """What the page posts when somebody sends a message."""
        said = {"text": text, "files": []}
        models = ["scripted-nano", "recorded-judge"]
        return {
            "data": [said, "", *models, "", conversation or self.conversation],
            "fn_index": self.index("message", "submit"),
            "session_hash": session or self.session,
        }

    def join(self, text: str, conversation: str = "", session: str = "") -> httpx.Response:
        """Send a message, and listen to nothing."""
        body = self.message(text, conversation, session)
        return self.http.post("/gradio_api/queue/join", json=body)

    @contextmanager
    def listening(self, session: str = "") -> Iterator[Iterator[str]]:
        """Open the stream with the answers to all events of a page."""
        path = f"/gradio_api/queue/data?session_hash={session or self.session}"
        with self.http.stream("GET", path) as stream:
            yield stream.iter_lines()

    def send(self, text: str = "hello", conversation: str = "", session: str = "") -> str:
        """Send a message, listen until its reply is there, and return all that was sent."""
        joined = self.join(text, conversation, session)
        assert joined.status_code == httpx.codes.OK, joined.text
        lines: list[str] = []
        with self.listening(session) as events:
            for line in events:
                lines.append(line)
                if '"process_completed"' in line:
                    break
        return "\n".join(lines)


@dataclass(frozen=True)
class Post:
    """One request of an attacker."""

    path: str
    body: Any
    cookie: str = ""

    @property
    def request(self) -> bytes:
        body = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {HERE}\r\ncontent-type: application/json\r\n"
            f"cookie: {COOKIE}={self.cookie}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Attack:
    """Posts as fast as it can, in some threads, until all is posted."""

    def __init__(self, address: str, posts: Iterable[Post], local: str, threads: int = 4) -> None:
        self.answers: Counter[int] = Counter()
        self._where = urlsplit(address)
        self._local = local
        self._posts = iter(list(posts))
        self._lock = threading.Lock()
        self._is_called_off = False
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> "Attack":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let all be posted, unless the test has failed."""
        self._is_called_off = kind is not None
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        where = (self._where.hostname or "", self._where.port or 0)
        with socket.create_connection(where, timeout=60, source_address=(self._local, 0)) as wire:
            while not self._is_called_off:
                with self._lock:
                    post = next(self._posts, None)
                if post is None:
                    return
                wire.sendall(post.request)  # in one piece: in two, the system would wait for more
                answer = http.client.HTTPResponse(wire)
                answer.begin()
                answer.read()
                with self._lock:
                    self.answers[answer.status] += 1


def seconds_of(act: Any, *arguments: Any) -> float:
    """Return how long something took."""
    begun = time.monotonic()
    act(*arguments)
    return time.monotonic() - begun
