"""The command line of the tour's recordings.

    python -m compeer_core.tour record                        all stages with a model in the list
    python -m compeer_core.tour record --weights base=FOLDER  also a stage without shipped weights
    python -m compeer_core.tour check                         compare with new turns of shipped models

An invalid flag or file gives one sentence on stderr and exit code 2. `check` exits with 1 if a text
differs; another version of torch, another CPU or another checkpoint can cause that.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from compeer_core.config import load_toml
from compeer_core.errors import CheckpointError, CompeerError, ConfigError
from compeer_core.tour.plan import ASSETS, FOLDER, Plan
from compeer_core.tour.recorder import Recorder, first_difference
from compeer_core.tour.recordings import load_recording, save_recording

PROGRAM = "python -m compeer_core.tour"


class _Parser(argparse.ArgumentParser):
    """An argument parser with one-sentence errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help explains")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        options = _parser().parse_args(arguments)
        plan = load_toml(options.folder / "plan.toml", Plan)
        recorder = Recorder(plan, options.models, dict(options.weights), options.judge)
        try:
            return options.run(plan, recorder, options.folder)  # type: ignore[no-any-return]
        finally:
            recorder.close()
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except CompeerError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1


def _record(plan: Plan, recorder: Recorder, folder: Path) -> int:
    for stage in plan.stages:
        paths = [save_recording(recording, folder) for recording in recorder.record(stage, folder)]
        for path in paths:
            _say(f"{path.name}: recorded")
        if not paths:
            _say(f"{stage.name}: skipped, the list has no model {stage.model!r}")
    return 0


def _check(plan: Plan, recorder: Recorder, folder: Path) -> int:
    differ = False
    for stage in plan.stages:
        for again in recorder.again(stage):
            path = folder / again.file_name
            at = first_difference(load_recording(path).raw, again.raw)
            differ |= at is not None
            result = "identical" if at is None else f"differs from character {at} on"
            _say(f"{path.name}: {result}")
    return int(differ)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, allow_abbrev=False, description="record the turns of the tour")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary in (
        ("record", _record, "generate one turn per model and case, and judge it"),
        ("check", _check, "generate the turns of shipped models again and compare"),
    ):
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        command.set_defaults(run=run)
        command.add_argument("--folder", type=Path, default=FOLDER, help="(default: %(default)s)")
        command.add_argument("--models", type=Path, default=ASSETS / "models.toml", metavar="FILE")
        command.add_argument("--judge", default="", metavar="NAME", help="(default: the list's)")
        command.add_argument(
            "--weights",
            type=_weights,
            action="append",
            default=[],
            metavar="STAGE=FOLDER",
            help="the weights of a stage whose model is not in the list",
        )
    return parser


def _weights(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals or not name or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE=FOLDER with an existing folder")
    return name, Path(folder)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
