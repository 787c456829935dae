"""Steps that write files and run once each, so that a pipeline can be stopped and continued.

A step reads files, writes files and returns a `StepReport`. Two files record it:

```text
<run>/reports/filter.json        what the step read, wrote and dropped
<run>/reports/done/filter.json   the hash of its settings and inputs, size and hash of its outputs
```

A step is skipped if its settings, the content of its inputs, and its outputs are unchanged. So a
changed setting repeats its step and the steps that depend on it; a later step whose input comes out
the same, byte for byte, is skipped.

The record is removed before a step begins, and written after its outputs have their final names. A
step that is killed in between runs again from its inputs; answers of generators are in their
journals by then.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compeer_core.config import FrozenModel
from compeer_core.row_files import replacing
from training.cer.records import StepReport
from training.common.fingerprints import digest

REPORTS = "reports"
_log = logging.getLogger(__name__)

Json = Any
"""Anything that `json.dumps` accepts."""


class Output(FrozenModel):
    """A file that a step has written."""

    bytes: int
    sha256: str


class Done(FrozenModel):
    """The record of a finished step."""

    fingerprint: str
    """The hash of the step's settings and inputs."""
    outputs: Mapping[str, Output]
    """By path below the run's folder."""


class Steps:
    """The steps of one run.

    Args:
        folder: Holds outputs, reports and records.
        say: Receives a sentence for each step that runs or is skipped.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = _log.info) -> None:
        self.folder = folder
        self.reports: dict[str, StepReport] = {}
        """The reports so far, in order."""
        self.unfinished = 0
        """Unanswered questions of the current step. Its rows are complete without them, but the step does
        not count as finished: the next start asks them again."""
        self._say = say
        self._known: dict[Path, str] = {}

    def run(
        self,
        name: str,
        work: Callable[[], StepReport],
        *,
        settings: Json,
        inputs: Iterable[Path] = (),
        outputs: Sequence[Path],
    ) -> StepReport:
        """Run a step, or skip it if it is finished.

        Args:
            name: The name of the step and of its report.
            work: Writes all `outputs` atomically.
            settings: What else the outputs depend on, as JSON.
            inputs: Files that it reads; a missing file counts as such.
            outputs: Files below the run's folder.
        """
        report_path = self.folder / REPORTS / f"{name}.json"
        note = self.folder / REPORTS / "done" / f"{name}.json"
        fingerprint = digest([name, settings, [self.content(path) for path in inputs]])
        report = self._done_before(note, report_path, fingerprint, outputs)
        if report is not None:
            self._say(f"{name}: already done, {report.written} rows")
        else:
            note.unlink(missing_ok=True)
            for path in outputs:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._known.pop(path, None)
            begun = time.monotonic()
            self.unfinished = 0
            report = work()
            write_json(report_path, report.model_dump(mode="json"))
            done = Done(
                fingerprint=fingerprint,
                outputs={
                    path.relative_to(self.folder).as_posix(): Output(
                        bytes=path.stat().st_size, sha256=self.content(path)
                    )
                    for path in outputs
                },
            )
            if not self.unfinished:
                write_json(note, done.model_dump(mode="json"))
            self._say(f"{name}: {_sentence(report)}, {time.monotonic() - begun:.1f} s")
            if self.unfinished:
                self._say(
                    f"{name}: {self.unfinished} questions were not answered; the rows continue without "
                    "them, and the same command asks them again"
                )
        self.reports[name] = report
        return report

    def content(self, path: Path) -> str:
        """Return the hash of a file's content, or "" if it is missing; each file is read once."""
        if path not in self._known:
            if not path.is_file():
                return ""
            with path.open("rb") as file:
                self._known[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._known[path]

    def _done_before(
        self, note: Path, report: Path, fingerprint: str, outputs: Sequence[Path]
    ) -> StepReport | None:
        if not (note.is_file() and report.is_file()):
            return None
        try:
            done = Done.model_validate_json(note.read_bytes())
            earlier = StepReport.model_validate_json(report.read_bytes())
        except ValidationError:
            return None  # written by another version of this program
        if done.fingerprint != fingerprint:
            return None
        for path in outputs:
            output = done.outputs.get(path.relative_to(self.folder).as_posix())
            if output is None or not path.is_file() or path.stat().st_size != output.bytes:
                return None
            self._known[path] = output.sha256
        return earlier


def write_json(path: Path, value: Json) -> None:
    """Write a value as indented JSON, atomically."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that a crash leaves the old one."""
    with replacing(path) as file:
        file.write(text)


def _sentence(report: StepReport) -> str:
    dropped = f", {report.dropped_count} dropped" if report.dropped_count else ""
    return f"{report.read} read, {report.written} written{dropped}"
