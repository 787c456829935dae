"""Starts the app in a process of its own and measures it over HTTP."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from gradio_client import Client

from compeer_core.errors import BackendError

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Server:
    """A running app."""

    url: str
    process: subprocess.Popen[bytes]
    seconds_until_served: float
    """From the start of the process to the first complete page."""


@contextmanager
def running_app(
    command: Sequence[str], folder: Path, timeout_seconds: float = 120.0
) -> Iterator[Server]:
    """Run the app on a free port until the block ends.

    Args:
        command: Arguments of `python`, such as `["app.py"]`; host and port are added.
        folder: Working directory.
        timeout_seconds: Time limit until the page is served.

    Raises:
        BackendError: The app exited before it served its page, or exceeded the limit.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}/"
    line = [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port)]
    # Log to a file: a pipe that is not read fills up and blocks the app.
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(
            line,
            cwd=folder,
            env=os.environ | {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for_page(url, process, log, started + timeout_seconds)
            yield Server(url, process, time.monotonic() - started)
        finally:
            _end(process)


@dataclass(frozen=True)
class Answer:
    """What `/chat` returned, and after how long."""

    seconds: float
    turn: Mapping[str, Any]
    """As docs/serving.md describes it."""


def connect(url: str, address: str = "") -> Client:
    """Open a client of the API.

    Args:
        url: The app.
        address: The client's address, for an app that trusts forwarded addresses; empty for its own.
    """
    headers = {"X-Forwarded-For": address} if address else None
    return Client(url, verbose=False, analytics_enabled=False, headers=headers)


def ask(client: Client, message: str, history: Sequence[Mapping[str, str]], seed: int) -> Answer:
    """Request one turn from the `/chat` endpoint."""
    started = time.monotonic()
    turn = client.predict(
        message=message,
        history=list(history),
        image=None,
        model="",
        strategy=None,
        seed=seed,
        api_name="/chat",
    )
    return Answer(time.monotonic() - started, turn)


def chat(url: str, message: str, seed: int) -> float:
    """Request the first turn of a conversation and return the seconds it took."""
    return ask(connect(url), message, [], seed).seconds


@contextmanager
def sampled_memory(pid: int | None = None, every_seconds: float = 0.05) -> Iterator[list[int]]:
    """Sample the resident bytes of a process and its children while the block runs.

    Args:
        pid: The process; None is this one.
        every_seconds: Sampling interval.
    """
    samples = [_resident_bytes(pid)]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(every_seconds):
            samples.append(_resident_bytes(pid))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        finished.set()
        thread.join()


def _wait_for_page(
    url: str, process: subprocess.Popen[bytes], log: IO[bytes], deadline: float
) -> None:
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        while True:
            with suppress(httpx.TransportError):
                page = client.get(url)
                if page.status_code == httpx.codes.OK and "</html>" in page.text:
                    return
            if process.poll() is not None:
                raise BackendError(f"the app exited with code {process.returncode}: {_tail(log)}")
            if time.monotonic() > deadline:
                raise BackendError(f"the app served no page within the limit: {_tail(log)}")
            time.sleep(_POLL_SECONDS)


def _tail(log: IO[bytes], size: int = 500) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-size:].strip() or "no output"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=20)


def _resident_bytes(pid: int | None) -> int:
    total = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
