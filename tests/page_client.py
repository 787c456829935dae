"""The page and the API over real HTTP, without a browser: cookies, addresses, gradio's protocol.

Linux answers on all of 127.0.0.0/8, so two clients can have different addresses.
"""

import http.client
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from ui_components.server.visitors import COOKIE
from ui_components.shared.services import Services

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
CONVERSATION = "conversation-" + "x" * 16
FILE_DATA = {"_type": "gradio.FileData"}
JOIN = "/gradio_api/queue/join"


def handlers(client: httpx.Client) -> dict[str, int]:
    """Return the index of each handler of the page by ``"element event"``."""
    config = client.get("/config").json()
    names = {each["id"]: each["props"].get("elem_id") for each in config["components"]}
    return {
        f"{names.get(target)} {event}": dependency["id"]
        for dependency in config["dependencies"]
        for target, event in dependency["targets"]
    }


@contextmanager
def event_stream(client: httpx.Client, session: str) -> Iterator[Iterator[str]]:
    """Open the stream with the answers to all events of a page."""
    query = {"session_hash": session}
    with client.stream("GET", "/gradio_api/queue/data", params=query) as stream:
        yield stream.iter_lines()


def outcome(client: httpx.Client, session: str) -> str:
    """Wait until an event has ended, and return everything that the page received."""
    messages = []
    with event_stream(client, session) as lines:
        for line in lines:
            if line.startswith("data:"):
                message = json.loads(line[5:])
                messages.append(json.dumps(message, ensure_ascii=False))
                if message["msg"] == "process_completed":
                    break
    return "\n".join(messages)


class Page:
    """The page in one browser."""

    def __init__(
        self,
        address: str,
        services: Services | None = None,
        language: str = "en",
        *,
        local: str = HERE,
        listens: bool = False,
    ) -> None:
        """Open the page.

        Args:
            address: The server's URL.
            services: The server's services, for the visitor's id.
            language: The browser's language.
            local: The client's address.
            listens: Listen to every event in the background, as a browser does.
        """
        transport = httpx.HTTPTransport(local_address=local)
        headers = {"accept-language": language}
        self.http = httpx.Client(base_url=address, timeout=60, transport=transport, headers=headers)
        self.cookie = self.http.get("/").cookies[COOKIE]
        self.visitor = services.visitors.read({COOKIE: self.cookie}) if services else ""
        self.conversation = CONVERSATION
        self.session = secrets.token_hex(6)
        self._handlers = handlers(self.http)
        self._listens = listens

    def body(self, element: str, event: str, data: Sequence[Any], session: str) -> dict[str, Any]:
        """Return the body of a request that fires an event."""
        return {
            "data": data,
            "fn_index": self._handlers[f"{element} {event}"],
            "session_hash": session,
        }

    def act(self, element: str, event: str, *data: Any, **about: Any) -> list[Any]:
        """Fire an event that is answered at once; ``about`` is what the page's script sends."""
        body = self.body(element, event, data, secrets.token_hex(6)) | {"event_data": about}
        answer = self.http.post("/gradio_api/run/predict", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])

    def begin(self, element: str, event: str, *data: Any) -> str:
        """Queue an event, and return its session."""
        session = secrets.token_hex(6)
        answer = self.http.post(JOIN, json=self.body(element, event, data, session))
        assert answer.status_code == 200, answer.text
        if self._listens:
            threading.Thread(target=self.outcome, args=(session,), daemon=True).start()
        return session

    def outcome(self, session: str) -> str:
        """Wait until an event has succeeded, and return everything that the page received."""
        received = outcome(self.http, session)
        assert json.loads(received.splitlines()[-1])["success"], received
        return received

    def message(self, text: str, conversation: str = "", session: str = "") -> dict[str, Any]:
        """Return the body of a request that sends a message in Chat."""
        models = ["scripted-policy", "recorded-judge"]
        data = [{"text": text, "files": []}, "", *models, "", conversation or self.conversation]
        return self.body("message", "submit", data, session or self.session)

    def join(self, text: str, conversation: str = "", session: str = "") -> httpx.Response:
        """Send a message in Chat without listening."""
        return self.http.post(JOIN, json=self.message(text, conversation, session))

    @contextmanager
    def listening(self) -> Iterator[Iterator[str]]:
        """Open the stream of the messages sent with `join`."""
        with event_stream(self.http, self.session) as lines:
            yield lines

    def send(self, text: str = "hello", conversation: str = "") -> str:
        """Send a message in Chat, and return everything received until its reply has ended."""
        joined = self.join(text, conversation)
        assert joined.status_code == httpx.codes.OK, joined.text
        return self.outcome(self.session)

    def say(self, words: str, model: str = "maple-1") -> str:
        """Send a message in Chat without a judge; returns the session."""
        message = {"text": words, "files": []}
        return self.begin("message", "submit", message, "", model, "", "", CONVERSATION)

    def compare(self, words: str) -> str:
        """Send a message in Compare and allow storing it; returns the session."""
        settings = ("blind", [], False, True, CONVERSATION)
        message = {"text": words, "files": []}
        return self.begin("compare-message", "submit", message, "", *settings)

    def vote(self, conversation: str, battle: str, preference: str = "first") -> str:
        """Vote, and return the error that the page shows."""
        about = {"battle": battle, "preference": preference, "revision": 0}
        return str(self.act("compare-ballot", "vote", conversation, **about)[2])


# --- programs ------------------------------------------------------------------------------------


def upload(client: httpx.Client, name: str, data: bytes) -> httpx.Response:
    return client.post("/gradio_api/upload", files={"files": (name, data, "image/png")})


def picture_of(path: str, **more: object) -> dict[str, object]:
    return {"path": path, "meta": FILE_DATA, **more}


def chat_body(
    message: str = "hello", history: object = None, image: object = None
) -> dict[str, Any]:
    return {"data": [message, history, image, "", None, -1]}


def heard(client: httpx.Client, event_id: str, endpoint: str = "chat") -> tuple[str, Any]:
    """Listen to an API call until it ends; return how it ended and its data."""
    kind = ""
    with client.stream("GET", f"/gradio_api/call/{endpoint}/{event_id}") as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: ") and kind in {"complete", "error"}:
                return kind, json.loads(line.removeprefix("data: "))
    raise AssertionError("the call ended without an answer")


def call_chat(client: httpx.Client, **fields: Any) -> tuple[str, Any]:
    answer = client.post("/gradio_api/call/chat", json=chat_body(**fields))
    answer.raise_for_status()
    return heard(client, answer.json()["event_id"])


def send_message(client: httpx.Client, text: str, paths: Sequence[str] = ()) -> str:
    """Send a message with images in Chat, and return everything that the page received."""
    session = secrets.token_hex(6)
    message = {"text": text, "files": [picture_of(path) for path in paths]}
    conversation = f"conversation-{secrets.token_hex(8)}"
    body = {
        "data": [message, "", "scripted-policy", "", "", conversation],
        "fn_index": handlers(client)["message submit"],
        "session_hash": session,
    }
    client.post(JOIN, json=body).raise_for_status()
    return outcome(client, session)


# --- attackers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Post:
    """An attacker's request."""

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
    """Sends posts as fast as possible from several threads."""

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
        """Wait until all are sent, unless the test has failed."""
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
                wire.sendall(post.request)  # in one piece, because of Nagle's algorithm
                answer = http.client.HTTPResponse(wire)
                answer.begin()
                answer.read()
                with self._lock:
                    self.answers[answer.status] += 1


def seconds_of(act: Any, *arguments: Any) -> float:
    """Return the duration of a call."""
    begun = time.monotonic()
    act(*arguments)
    return time.monotonic() - begun
