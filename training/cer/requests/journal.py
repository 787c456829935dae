"""What was answered, on disk at once: an append-only file that survives being killed anywhere.

One JSON object per line. The first line says under which settings the file was made; each further
one holds what came of one request, or of all the rows of one batch:

```text
{"journal": 1, "made_under": {"model": "tiny", "temperature": 0.7, ...}}
{"tries": [{"key": "esconv-1#3", "asked": "5f3c...", "number": 1, "problem": "half a JSON", ...}]}
{"tries": [{"key": "esconv-1#3", "asked": "5f3c...", "number": 2, "text": "...", ...}]}
```

A line counts once its line break is on disk. Opening the file cuts off what follows the last line
break, so a batch is there whole or not at all. Lines are handed to the system one by one (a killed
process loses none that `append` returned from) and forced to the disk at least every second (a
machine that loses its power loses that second).

In memory there are the keys and where their lines are, not the texts.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError

VERSION = 1
SYNC_SECONDS = 0.5
"""Between two times that lines are forced to the disk."""


class Try(FrozenModel):
    """A text that came of a question, or why it was of no use."""

    key: str
    asked: str
    """Hash of the question."""
    number: int = Field(ge=1)
    """The how many-th text of this question it was."""
    text: str | None = None
    """None if it was of no use; such texts are not kept."""
    problem: str | None = None
    tokens: int = 0


class _Line(FrozenModel):
    tries: tuple[Try, ...]


class Journal:
    """The tries of one set of questions. Thread-safe; one process at a time.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, path: Path, made_under: Mapping[str, Any]) -> None:
        """Open or begin a journal.

        Args:
            path: The file; its folder is made.
            made_under: What the answers depend on beside the questions, as JSON has it.

        Raises:
            ConfigError: The file was made under something else, is damaged in its middle, or
                another process has it open.
        """
        self.path = path
        self._lock = threading.Lock()
        self._places: dict[str, list[int]] = {}
        self._dirty = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            _hold(self._file.fileno(), path)
            self._end = self._read(dict(made_under))
        except BaseException:
            self._file.close()
            raise
        self._closing = threading.Event()
        self._syncing = threading.Thread(target=self._sync_often, name="journal", daemon=True)
        self._syncing.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many questions have a try."""
        return len(self._places)

    def of(self, key: str) -> list[Try]:
        """Return the tries of a question, in the order in which they were made."""
        with self._lock:
            places = list(self._places.get(key, ()))
        found = []
        for place in places:
            line = _Line.model_validate_json(self._line_at(place))
            found += [one for one in line.tries if one.key == key]
        return found

    def append(self, tries: Sequence[Try]) -> None:
        """Add what belongs together: all of it will be there after a crash, or none."""
        data = _Line(tries=tuple(tries)).model_dump_json(exclude_defaults=True).encode() + b"\n"
        with self._lock:
            self._file.write(data)
            self._file.flush()
            for one in tries:
                self._places.setdefault(one.key, []).append(self._end)
            self._end += len(data)
            self._dirty = True

    def close(self) -> None:
        """Force everything to the disk. May be called twice."""
        if self._file.closed:
            return
        self._closing.set()
        self._syncing.join()
        self._sync()
        self._file.close()

    # --- reading -------------------------------------------------------------------------------

    def _read(self, made_under: Mapping[str, Any]) -> int:
        """Note where lines are, cut off half a line, and return where the next one begins."""
        end = 0
        for number, line in enumerate(self._lines(), start=1):
            if not line.endswith(b"\n"):
                break
            if number == 1:
                self._check_header(line, made_under)
            else:
                self._note(line, end, number)
            end += len(line)
        self._file.truncate(end)
        if end == 0:
            header = json.dumps({"journal": VERSION, "made_under": made_under}) + "\n"
            self._file.write(header.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            end = len(header)
        return end

    def _lines(self) -> Iterator[bytes]:
        # Bytes, not text: U+2028 and its kin end no line here.
        self._file.seek(0)
        return iter(self._file)

    def _check_header(self, line: bytes, made_under: Mapping[str, Any]) -> None:
        try:
            header = json.loads(line)
            version, before = header["journal"], header["made_under"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path} is no journal; move it out of the way") from error
        if version != VERSION:
            raise ConfigError(f"{self.path} was written by another version of this program")
        now = json.loads(json.dumps(made_under))
        different = sorted(
            name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
        )
        if different:
            changes = ", ".join(
                f"{name} (was {before.get(name)!r}, is {now.get(name)!r})" for name in different
            )
            raise ConfigError(
                f"{self.path} holds answers that were made under other settings: {changes}; "
                "set them back, or take another folder"
            )

    def _note(self, line: bytes, place: int, number: int) -> None:
        try:
            tries = _Line.model_validate_json(line).tries
        except ValidationError as error:
            raise ConfigError(
                f"{self.path}, line {number}: damaged; take the line out to have its questions "
                "asked again"
            ) from error
        for one in tries:
            self._places.setdefault(one.key, []).append(place)

    def _line_at(self, place: int) -> bytes:
        with self._lock:
            self._file.seek(place)
            return self._file.readline()

    # --- the disk ------------------------------------------------------------------------------

    def _sync_often(self) -> None:
        while not self._closing.wait(SYNC_SECONDS):
            self._sync()

    def _sync(self) -> None:
        with self._lock:
            if not self._dirty:
                return
            self._dirty = False
        os.fsync(self._file.fileno())


def _hold(descriptor: int, path: Path) -> None:
    """Make sure that nobody else writes; the system lets go when the process ends, however."""
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{path} is in use by another run; wait until it has ended"
            ) from error
