"""The demo as its operator runs it: a process of its own with scripted models, asked over sockets."""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.pages import write_models

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
SECRET = "sk-the-key-of-this-server"


@dataclass
class ServerProcess:
    """A running server, and how to ask it."""

    url: str
    data_folder: Path
    process: "subprocess.Popen[str]"
    errors: list[str] = field(default_factory=list)
    """What it wrote to standard error, line by line."""

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **options)

    def visitor(self) -> httpx.Client:
        """Somebody who has opened the page, and so has a cookie."""
        with self.client() as newcomer:
            newcomer.get("/").raise_for_status()
            return self.client(cookies=newcomer.cookies)

    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def is_healthy(self) -> bool:
        with self.client() as client:
            return client.get("/healthz", timeout=2).json()["status"] == "ok"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def running_server(folder: Path, *flags: str, data: Path | None = None) -> Iterator[ServerProcess]:
    """Run ``app.py`` until the block ends, and kill it then if it does not end by itself."""
    data = data or folder / "data"
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "app.py", "--models", str(write_models(models))]
    command += ["--data-dir", str(data), "--port", str(port), *flags]
    environment = os.environ | {"COMPEER_TEST_KEY": SECRET, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        server = ServerProcess(f"http://127.0.0.1:{port}", data, process)
        assert process.stderr is not None
        assert process.stdout is not None
        reading = threading.Thread(target=server.errors.extend, args=(process.stderr,), daemon=True)
        reading.start()
        starting = threading.Timer(START_SECONDS, process.kill)
        starting.start()
        try:
            told = process.stdout.readline()
            starting.cancel()
            assert "is served at" in told, "".join(server.errors)
            yield server
        finally:
            starting.cancel()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            reading.join(5)


# --- what callers say ----------------------------------------------------------------------------

FILE_DATA = {"_type": "gradio.FileData"}


def upload(client: httpx.Client, name: str, data: bytes) -> httpx.Response:
    return client.post("/gradio_api/upload", files={"files": (name, data, "image/png")})


def picture_of(path: str, **more: object) -> dict[str, object]:
    return {"path": path, "meta": FILE_DATA, **more}


def chat_body(
    message: str = "hello", history: object = None, image: object = None
) -> dict[str, Any]:
    return {"data": [message, history, image, "", None, -1]}


def heard(client: httpx.Client, event_id: str, endpoint: str = "chat") -> tuple[str, Any]:
    """Listen to a call until it ends, and return how it ended and with what."""
    kind = ""
    with client.stream("GET", f"/gradio_api/call/{endpoint}/{event_id}") as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: ") and kind in {"complete", "error"}:
                return kind, json.loads(line.removeprefix("data: "))
    raise AssertionError("the call ended without an answer")


def call_chat(client: httpx.Client, **said: Any) -> tuple[str, Any]:
    answer = client.post("/gradio_api/call/chat", json=chat_body(**said))
    answer.raise_for_status()
    return heard(client, answer.json()["event_id"])


def send_message(client: httpx.Client, text: str, paths: Sequence[str] = ()) -> str:
    """Send a message from the page, and return the first stream of answers to it, whole."""
    session = secrets.token_hex(6)
    said = {"text": text, "files": [picture_of(path) for path in paths]}
    conversation = f"conversation-{secrets.token_hex(8)}"
    body = {
        "data": [said, "", "scripted-nano", "", "", conversation],
        "fn_index": handlers(client)["message submit"],
        "session_hash": session,
    }
    client.post("/gradio_api/queue/join", json=body).raise_for_status()
    lines = []
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if '"process_completed"' in line:
                break
    return "\n".join(lines)


def handlers(client: httpx.Client) -> dict[str, int]:
    """The page's handlers by the element that sets them off, as anybody can read them."""
    config = client.get("/config").json()
    names = {
        component["id"]: component["props"].get("elem_id") for component in config["components"]
    }
    return {
        f"{names.get(target)} {event}": dependency["id"]
        for dependency in config["dependencies"]
        for target, event in dependency["targets"]
    }
