"""Fingerprints of configs and input files, to detect that a stored result is out of date."""

import hashlib
import json
from pathlib import Path
from typing import Any

from compeer_core.errors import ConfigError

_LARGEST_HASHED = 64 << 20


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value in hexadecimal, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(path: Path) -> Any:
    """Return a JSON value that changes when a file, or any file in a folder, changes.

    Files of up to 64 MiB are hashed, so a copy has the same fingerprint; larger ones are represented
    by size and modification time.

    Raises:
        ConfigError: The path does not exist.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [[file.relative_to(path).as_posix(), _file_fingerprint(file)] for file in files]


def _file_fingerprint(file: Path) -> Any:
    status = file.stat()
    if status.st_size > _LARGEST_HASHED:
        return [status.st_size, status.st_mtime_ns]
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
