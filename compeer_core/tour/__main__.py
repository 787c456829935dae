"""The command line of the tour's recordings.

    python -m compeer_core.tour record                        all stages whose models are listed
    python -m compeer_core.tour record --weights base=FOLDER  also one whose weights are not shipped
    python -m compeer_core.tour check                         do the shipped models reproduce their recordings?

Invalid flags or files give one sentence on stderr and exit code 2. `check` exits with 1 if a text
differs, which another version of torch, another CPU or another checkpoint can cause.
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
    """An argument parser that reports errors in one sentence instead of the full usage."""

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
        made = [save_recording(recording, folder) for recording in recorder.record(stage, folder)]
        for path in made:
            _say(f"{path.name}: recorded")
        if not made:
            _say(f"{stage.name}: no model {stage.model!r} is listed, so nothing is recorded")
    return 0


def _check(plan: Plan, recorder: Recorder, folder: Path) -> int:
    differ = False
    for stage in plan.stages:
        for again in recorder.again(stage):
            path = folder / again.file_name
            at = first_difference(load_recording(path).raw, again.raw)
            differ |= at is not None
            comparison = "the same text" if at is None else f"different text from character {at} on"
            _say(f"{path.name}: {comparison}")
    return int(differ)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, allow_abbrev=False, description="record the turns of the tour")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, description in (
        ("record", _record, "run each model once, store its output, and let the judge assess it"),
        ("check", _check, "run the shipped models again and compare"),
    ):
        command = commands.add_parser(name, help=description, allow_abbrev=False)
        command.set_defaults(run=run)
        command.add_argument("--folder", type=Path, default=FOLDER, help="(%(default)s)")
        command.add_argument("--models", type=Path, default=ASSETS / "models.toml", metavar="FILE")
        command.add_argument("--judge", default="", metavar="NAME", help="(the list's default)")
        command.add_argument(
            "--weights",
            type=_weights,
            action="append",
            default=[],
            metavar="STAGE=FOLDER",
            help="the weights of a stage that the list of models does not hold",
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
