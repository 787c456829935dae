"""The demo in its own process with scripted models."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.pages import write_models

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120
SECRET = "sk-the-key-of-this-server"


@dataclass
class ServerProcess:
    """A running server."""

    url: str
    data_folder: Path
    process: "subprocess.Popen[str]"
    errors: list[str] = field(default_factory=list)
    """Lines of its standard error."""

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **options)

    def visitor(self) -> httpx.Client:
        """Return a client with a visitor's cookie."""
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
    """Run ``app.py`` until the block ends; kill it if it does not terminate."""
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
            line = process.stdout.readline()
            starting.cancel()
            assert "is served at" in line, "".join(server.errors)
            yield server
        finally:
            starting.cancel()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            reading.join(5)
