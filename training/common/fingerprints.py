"""What tells that something a result was made from is no longer the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

from compeer_core.errors import ConfigError

_READ_WHOLE = 64 << 20


def digest(value: Any) -> str:
    """Return the SHA-256 of a value that JSON can hold, the same for any order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def stamp(path: Path) -> Any:
    """Return what tells a file or a folder that somebody else wrote from a changed one.

    Content, for files of up to 64 MiB, so that a copy is not taken for a change; of larger ones the
    size and the time of the last change.

    Raises:
        ConfigError: There is no such file.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [[file.relative_to(path).as_posix(), _stamp_of(file)] for file in files]


def _stamp_of(file: Path) -> Any:
    found = file.stat()
    if found.st_size > _READ_WHOLE:
        return [found.st_size, found.st_mtime_ns]
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
