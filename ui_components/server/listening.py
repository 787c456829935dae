"""The server's socket, and its temporary folder for uploads."""

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from compeer_core.errors import ConfigError

UPLOADS = "uploads-"
LAST_PORT = 65535
_LOCK = ".lock"


def listen(host: str, port: int, tries: int = 1) -> socket.socket:
    """Bind a socket.

    Args:
        host: An address of this machine.
        port: The port; 0 takes any free one.
        tries: How many consecutive ports to try while they are taken.

    Raises:
        ConfigError: None of them is available, or the port is invalid.
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
    # asyncio sets TCP_NODELAY only if the protocol is given.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # on Windows the option would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


@contextmanager
def upload_folder(data_folder: Path) -> Iterator[str]:
    """Create a private folder for uploads, deleted when the block ends.

    Folders of servers that were killed are removed first: their locks are gone.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        data_folder.mkdir(parents=True, exist_ok=True)
        for old in data_folder.glob(f"{UPLOADS}*"):
            with suppress(Timeout), FileLock(old / _LOCK, timeout=0):
                shutil.rmtree(old, ignore_errors=True)
        # It gets its final name once it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{UPLOADS}", dir=data_folder))
        lock = FileLock(made / _LOCK, timeout=0)
        lock.acquire()
        folder = made.rename(made.with_name(made.name.removeprefix(".")))
    except OSError as error:
        raise ConfigError(
            f"the data folder {data_folder} cannot be used: {error.strerror or error}; "
            "choose another one with --data-dir"
        ) from error
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
