"""What a run leaves on disk, so that it can be understood, resumed and repeated.

```text
<run>/config.json     the resolved config, seed, versions, git commit and command, written first
<run>/metrics.jsonl   one row per step, appended
<run>/log.txt         what the run said, with times
```

Of several processes that train together, the first writes; the others only know the folder.

Stages add their own files beside these. Machine-written files are JSON, because JSON keeps nulls.
"""

import json
import logging
import math
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from training.common.jsonl import keep_rows, whole_rows
from training.common.processes import is_first

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"

_LIBRARIES = ("accelerate", "numpy", "peft", "tokenizers", "torch", "transformers", "trl")
_log = logging.getLogger(__name__)


class RunDirectory:
    """The folder of one run. Make one with `RunDirectory.open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(
        cls,
        path: Path,
        config: FrozenModel,
        *,
        resume: bool = False,
        may_change: Collection[str] = (),
    ) -> "RunDirectory":
        """Begin a run at `path`, or go on with the one that is there.

        A folder that holds no metrics yet may be begun again: nothing is lost.

        Args:
            path: The run's folder; made if it is missing.
            config: The resolved config. A field called `seed` is recorded as the run's seed.
            resume: Whether to go on with a run instead of beginning one.
            may_change: Dotted keys that may differ from those of the run that is resumed.

        Raises:
            ConfigError: A run is already there, or none is there to resume, or it was made under
                another config; the message names the keys.
        """
        directory = cls(path)
        if not is_first():
            return directory
        values = config.model_dump(mode="json")
        if resume:
            directory._check_same(values, may_change)
            directory._record_resumption(values)
            return directory
        if _has_content(path / METRICS_FILE):
            raise ConfigError(
                f"{path}: a run is already there; go on with --resume {path}, "
                "or choose another output"
            )
        path.mkdir(parents=True, exist_ok=True)
        record = {
            "config": values,
            "seed": values.get("seed"),
            "resumed": [],
            **_circumstances(),
        }
        _write_json(path / CONFIG_FILE, record)
        return directory

    def metrics(self, *, step: int, **row: float | int | str | None) -> None:
        """Append one row to metrics.jsonl.

        A value that is not finite is written as null and named in the log: NaN is no JSON, and a
        loss that became NaN should be seen.
        """
        if not is_first():
            return
        lost = [key for key, value in row.items() if not _is_writable(value)]
        for key in lost:
            self.log("step %d: %s is %s", step, key, row[key])
        kept = {key: None if key in lost else value for key, value in row.items()}
        line = json.dumps({"step": step, "time": _now(), **kept}, allow_nan=False)
        with (self.path / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of metrics.jsonl; a last line cut short by a crash is left out."""
        yield from whole_rows(self.path / METRICS_FILE)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`, and a last line cut short by a crash.

        A run that goes on from the checkpoint of that step makes the later ones again.
        """
        if is_first():
            keep_rows(self.path / METRICS_FILE, lambda row: row["step"] <= step)

    def log(self, message: str, *values: object) -> None:
        """Write one line to log.txt and to the log of the process."""
        if not is_first():
            return
        _log.info(message, *values)
        with (self.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{_now()} {message % values if values else message}\n")

    def _check_same(self, values: Mapping[str, Any], may_change: Collection[str]) -> None:
        path = self.path / CONFIG_FILE
        if not path.exists():
            raise ConfigError(f"{self.path}: there is no run to resume, {CONFIG_FILE} is missing")
        before = _flat(_read_json(path)["config"])
        now = _flat(values)
        differing = [
            f"{key} (was {json.dumps(before.get(key))}, now {json.dumps(now.get(key))})"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not _allowed(key, may_change)
        ]
        if differing:
            raise ConfigError(
                f"{path}: a run resumes only under the config it began with; "
                f"different: {', '.join(differing)}"
            )

    def _record_resumption(self, values: Mapping[str, Any]) -> None:
        path = self.path / CONFIG_FILE
        record = _read_json(path)
        record["config"] = dict(values)
        record["resumed"].append(_circumstances())
        _write_json(path, record)


def versions(libraries: Collection[str] = _LIBRARIES) -> dict[str, str]:
    """Return the versions of Python and of those of the libraries that are installed."""
    found = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for library in libraries:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return the commit of this checkout, with "+changes" if files differ; None outside git."""
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def _circumstances() -> dict[str, Any]:
    return {
        "date": _now(),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "git_commit": git_commit(),
        "versions": versions(),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _allowed(key: str, may_change: Collection[str]) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in may_change)


def _is_writable(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def _write_json(path: Path, value: object) -> None:
    """Write to a temporary name and rename, so that a crash leaves the old file whole."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
