"""Starts the app as its own process and measures it from outside."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
    """From the start of the process to the first whole page."""

    def resident_bytes(self) -> int:
        """Return the memory that the app and its children hold now."""
        return _resident_bytes(self.process.pid)


@contextmanager
def running_app(
    command: Sequence[str], folder: Path, timeout_seconds: float = 120.0
) -> Iterator[Server]:
    """Run the app on a free port until the block ends.

    Args:
        command: What follows `python`, such as `["app.py"]`; host and port are added.
        folder: The folder it runs in.
        timeout_seconds: How long it may take until the page is served.

    Raises:
        BackendError: The app ended before it served its page, or took too long.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}/"
    line = [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port)]
    # Into a file: a pipe that nobody reads would fill up and stop the app.
    with tempfile.TemporaryFile() as log:
        begun = time.monotonic()
        process = subprocess.Popen(
            line,
            cwd=folder,
            env=os.environ | {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for_page(url, process, log, begun + timeout_seconds)
            yield Server(url, process, time.monotonic() - begun)
        finally:
            _end(process)


def chat(url: str, message: str, seed: int) -> float:
    """Ask for one whole turn through the `/chat` endpoint and return its seconds."""
    client = Client(url, verbose=False, analytics_enabled=False)
    begun = time.monotonic()
    client.predict(
        message=message,
        history=[],
        image=None,
        model="",
        strategy=None,
        seed=seed,
        api_name="/chat",
    )
    return time.monotonic() - begun


@contextmanager
def watched_memory(server: Server, every_seconds: float = 0.05) -> Iterator[list[int]]:
    """Collect the server's resident bytes, over and over, while the block runs."""
    readings = [server.resident_bytes()]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(every_seconds):
            readings.append(server.resident_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield readings
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
                raise BackendError(f"the app ended with code {process.returncode}: {_tail(log)}")
            if time.monotonic() > deadline:
                raise BackendError(f"the app served no page in time: {_tail(log)}")
            time.sleep(_POLL_SECONDS)


def _tail(log: IO[bytes], size: int = 500) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-size:].strip() or "it printed nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=20)


def _resident_bytes(pid: int) -> int:
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
