"""Where the server listens, and where uploads lie for a moment."""

import errno
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from compeer_core.errors import ConfigError

UPLOADS = "uploads-"
LEFT_OVER_SECONDS = 24 * 3600.0
LAST_PORT = 65535


def listen(host: str, port: int, tries: int = 1) -> socket.socket:
    """Bind a socket.

    Args:
        host: An address of this machine.
        port: The port; 0 takes any free one.
        tries: How many ports from there on may be tried while they are taken.

    Raises:
        ConfigError: None of them could be had, or it is no port.
    """
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"a port is a number from 0 to {LAST_PORT}, got {port}")
    error: OSError | None = None
    for candidate in range(port, min(port + tries, LAST_PORT + 1)):
        try:
            return _bound(host, candidate)
        except OSError as failure:
            error = failure
            if failure.errno != errno.EADDRINUSE:
                break
    assert error is not None  # at least one port was tried
    if error.errno != errno.EADDRINUSE:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}")
    if tries == 1:
        raise ConfigError(
            f"port {port} is taken by another program; choose another one with --port"
        )
    raise ConfigError(
        f"all ports from {port} to {port + tries - 1} are taken; choose one with --port"
    )


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where the protocol is named does asyncio send every piece of an answer at once (TCP_NODELAY).
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere the option would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


def upload_folder(data_folder: Path) -> "tempfile.TemporaryDirectory[str]":
    """Make a private folder for uploads, which is gone when the server ends.

    What a server left behind that was killed is removed after a day.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        data_folder.mkdir(parents=True, exist_ok=True)
        for old in data_folder.glob(f"{UPLOADS}*"):
            if time.time() - old.stat().st_mtime > LEFT_OVER_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        return tempfile.TemporaryDirectory(
            prefix=UPLOADS, dir=data_folder, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(
            f"the data folder {data_folder} cannot be used: {error.strerror or error}; "
            "choose another one with --data-dir"
        ) from error
