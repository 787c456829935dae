"""The directory of a run: everything needed to inspect, resume and reproduce it.

```text
<run>/config.json     the stage's module, the resolved config, seed, versions, git commit and command, written first
<run>/metrics.jsonl   one row per step, appended
<run>/log.txt         log lines with timestamps
```

With several processes, only rank 0 writes. Stages add files of their own.
"""

import contextlib
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

from pydantic import BaseModel

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.row_files import read_json, replacing
from training.common.jsonl import complete_rows, filter_rows
from training.common.processes import is_first

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"

_LIBRARIES = ("accelerate", "numpy", "peft", "tokenizers", "torch", "transformers", "trl")
_log = logging.getLogger(__name__)


class RunDirectory:
    """The directory of one run. Create it with `RunDirectory.open`."""

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
        """Start a run at `path`, or resume the one there.

        A directory without metrics can be reused for a new run: nothing would be lost.

        Args:
            path: The run's directory; created if missing.
            config: The resolved config. A field called `seed` is recorded as the run's seed.
            resume: Whether to resume an existing run.
            may_change: Dotted keys that may differ from the config of the resumed run.

        Raises:
            ConfigError: There is already a run, or none to resume, or its config differs; the
                message names the keys.
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
                f"{path}: there is already a run; resume it with --resume {path}, "
                "or choose another output"
            )
        path.mkdir(parents=True, exist_ok=True)
        record = {
            "stage": type(config).__module__,
            "config": values,
            "seed": values.get("seed"),
            "resumed": [],
            **_provenance(),
        }
        _write_json(path / CONFIG_FILE, record)
        return directory

    @classmethod
    def continued(cls, path: Path, config: FrozenModel) -> "RunDirectory":
        """Open the run of a stage that continues by itself, whatever settings have changed.

        The first start is recorded, each later one under `resumed`.
        """
        if not (path / CONFIG_FILE).is_file():
            return cls.open(path, config)
        directory = cls(path)
        if is_first():
            directory._record_resumption(config.model_dump(mode="json"))
        return directory

    def metrics(self, *, step: int, **row: float | int | str | None) -> None:
        """Append one row to metrics.jsonl.

        JSON has no NaN: a value that is not finite is written as null and reported in the log.
        """
        if not is_first():
            return
        finite = dict(row)
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                self.log("step %d: %s is %s", step, key, value)
                finite[key] = None
        line = json.dumps({"step": step, "time": _now(), **finite}, allow_nan=False)
        with (self.path / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of metrics.jsonl, except a truncated last line."""
        yield from complete_rows(self.path / METRICS_FILE)

    def rewind(self, step: int) -> None:
        """Drop the rows after `step`: a run resumed from that checkpoint writes them again."""
        if is_first():
            filter_rows(self.path / METRICS_FILE, lambda row: row["step"] <= step)

    def log(self, message: str, *values: object) -> None:
        """Write one line to log.txt and to the process's log."""
        if not is_first():
            return
        _log.info(message, *values)
        with (self.path / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{_now()} {message % values if values else message}\n")

    def _check_same(self, values: Mapping[str, Any], may_change: Collection[str]) -> None:
        path = self.path / CONFIG_FILE
        if not path.exists():
            raise ConfigError(f"{self.path}: no run to resume, {CONFIG_FILE} is missing")
        before = _flatten(_read_json(path)["config"])
        now = _flatten(values)
        differing = [
            f"{key} (was {json.dumps(before.get(key))}, now {json.dumps(now.get(key))})"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not _allowed(key, may_change)
        ]
        if differing:
            raise ConfigError(
                f"{path}: a run can only be resumed with its original config; "
                f"different: {', '.join(differing)}"
            )

    def _record_resumption(self, values: Mapping[str, Any]) -> None:
        path = self.path / CONFIG_FILE
        record = _read_json(path)
        record["config"] = dict(values)
        record["resumed"].append(_provenance())
        _write_json(path, record)


class Record(BaseModel):
    """What is read back from `config.json`."""

    stage: str
    """The module of the stage."""
    config: Mapping[str, Any]
    command: str
    date: str
    git_commit: str | None
    versions: Mapping[str, str]


def read_record(run: Path) -> Record:
    """Read how a run was made.

    Raises:
        ConfigError: The record is missing, truncated, or from before records named their stage.
    """
    try:
        return read_json(run / CONFIG_FILE, Record)
    except ConfigError as error:
        raise ConfigError(f"{error}; name the folder of a run, or run its stage again") from error


def versions(libraries: Collection[str] = _LIBRARIES) -> dict[str, str]:
    """Return the versions of Python and of the installed ones among `libraries`."""
    installed = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for library in libraries:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[library] = metadata.version(library)
    return installed


def git_commit() -> str | None:
    """Return the commit of this checkout, plus "+changes" if files differ; None outside git."""
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(
        command, cwd=folder, text=True, stderr=subprocess.DEVNULL, timeout=30
    ).strip()


def _provenance() -> dict[str, Any]:
    return {
        "date": _now(),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "git_commit": git_commit(),
        "versions": versions(),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys; lists stay as they are."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _allowed(key: str, may_change: Collection[str]) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in may_change)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def _write_json(path: Path, value: object) -> None:
    with replacing(path) as file:  # a crash leaves the old file intact
        file.write(json.dumps(value, indent=2) + "\n")
