"""Steps that write files, each done once: what a pipeline needs to be stopped and begun again.

A step reads files, writes files and returns a `StepReport`. What it did is noted beside the report:

```text
<run>/reports/filter.json        what the step read, wrote and left out
<run>/reports/done/filter.json   its settings and inputs, by hash, and size and hash of its outputs
```

A step is skipped if it was done under the same settings, with inputs of the same content, and its
outputs are still there. So a change of one step's settings redoes that step and whatever follows
from it: a later step is left alone where its own input comes out as it was, byte by byte.

The note is taken away before a step begins and written once its outputs have their names. Killed
anywhere in between, the step is done again from its inputs; what generators had answered by then is
in their journals.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compeer_core.config import FrozenModel
from training.cer.records import StepReport
from training.common.fingerprints import digest

REPORTS = "reports"
_log = logging.getLogger(__name__)

Json = Any
"""What `json.dumps` can write."""


class Output(FrozenModel):
    """A file as a step left it."""

    bytes: int
    sha256: str


class Done(FrozenModel):
    """The note that a step is done."""

    fingerprint: str
    """Of the step's settings and of its inputs."""
    outputs: Mapping[str, Output]
    """By path below the run's folder."""


class Steps:
    """The steps of one run, in the order in which they are asked for.

    Args:
        folder: Where outputs, reports and notes lie.
        say: Is told, in a sentence, what is done and what is skipped.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = _log.info) -> None:
        self.folder = folder
        self.reports: dict[str, StepReport] = {}
        """Of the steps so far, in order."""
        self.redone = False
        """Whether any step of this start had something to do."""
        self.unfinished = 0
        """Questions of the step at work that nobody answered. Its rows are whole without them, but it
        is not done: the next start asks them again."""
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
        """Do a step, or find that it is done.

        Args:
            name: Of the step, also the name of its report.
            work: Writes every one of `outputs` whole, under its final name at the end.
            settings: Whatever else the outputs depend on, as JSON.
            inputs: Files that it reads; one that is missing counts as such.
            outputs: Files below the run's folder.
        """
        report_path = self.folder / REPORTS / f"{name}.json"
        note = self.folder / REPORTS / "done" / f"{name}.json"
        fingerprint = digest([name, settings, [self.content(path) for path in inputs]])
        report = self._done_before(note, report_path, fingerprint, outputs)
        if report is not None:
            self._say(f"{name}: done before, {report.written} rows")
        else:
            self.redone = True
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
                    f"{name}: {self.unfinished} questions got no answer; the rows go on without "
                    "them, and the same command asks them again"
                )
        self.reports[name] = report
        return report

    def content(self, path: Path) -> str:
        """Return the hash of a file's content, "" of one that is missing; files are read once."""
        if path not in self._known:
            if not path.is_file():
                return ""
            with path.open("rb") as file:
                self._known[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._known[path]

    def report_path(self, name: str) -> Path:
        return self.folder / REPORTS / f"{name}.json"

    def _done_before(
        self, note: Path, report: Path, fingerprint: str, outputs: Sequence[Path]
    ) -> StepReport | None:
        if not (note.is_file() and report.is_file()):
            return None
        try:
            done = TypeAdapter(Done).validate_json(note.read_bytes())
            found = StepReport.model_validate_json(report.read_bytes())
        except ValidationError:
            return None  # of another version of this program: the step is done again
        if done.fingerprint != fingerprint:
            return None
        for path in outputs:
            output = done.outputs.get(path.relative_to(self.folder).as_posix())
            if output is None or not path.is_file() or path.stat().st_size != output.bytes:
                return None
            self._known[path] = output.sha256
        return found


def write_json(path: Path, value: Json) -> None:
    """Write under a temporary name and rename, so that a crash leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(path)


def _sentence(report: StepReport) -> str:
    dropped = f", {report.dropped_count} dropped" if report.dropped_count else ""
    return f"{report.read} read, {report.written} written{dropped}"
