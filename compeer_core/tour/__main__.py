"""The command line of the tour's recordings.

    python -m compeer_core.tour record third=compeer-small    stage `third` of plan.toml, from a listed model
    python -m compeer_core.tour record                        nothing new: judge what is recorded again
    python -m compeer_core.tour check                         do the listed models reproduce their recordings?

Invalid flags or files give one sentence on stderr and exit code 2. `check` exits with 1 if a text
differs, which another version of torch or another CPU can cause.
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
from compeer_core.tour.recordings import load_recordings, save_recording

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
        recorder = Recorder(plan, options.models, options.judge)
        try:
            return options.run(options, plan, recorder)  # type: ignore[no-any-return]
        finally:
            recorder.close()
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except CompeerError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1


def _record(options: argparse.Namespace, plan: Plan, recorder: Recorder) -> int:
    folder: Path = options.folder
    stages = [stage.name for stage in plan.stages]
    for name, _ in options.stages:
        if name not in stages:
            raise ConfigError(f"plan.toml has no stage {name!r}, only {', '.join(stages)}")
    for name, model in options.stages:
        for recording in recorder.record(name, model):
            _say(f"{save_recording(recording, folder).name}: recorded from {model}")
    for recording in load_recordings(folder):
        _say(f"{save_recording(recorder.judged(recording), folder).name}: judged")
    return 0


def _check(options: argparse.Namespace, _: Plan, recorder: Recorder) -> int:
    differ = False
    for recording in load_recordings(options.folder):
        again = recorder.again(recording)
        if again is None:
            _say(f"{recording.file_name}: its weights are not listed any more")
            continue
        at = first_difference(recording.raw, again.raw)
        differ |= at is not None
        comparison = "the same text" if at is None else f"different text from character {at} on"
        _say(f"{recording.file_name}: {comparison}")
    return int(differ)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, allow_abbrev=False, description="record the turns of the tour")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    record = commands.add_parser(
        "record",
        help="prompt models once, store what they write, and judge all recordings",
        allow_abbrev=False,
    )
    record.add_argument(
        "stages",
        type=_stage,
        nargs="*",
        metavar="STAGE=MODEL",
        help="a stage of plan.toml and the listed model to record it from",
    )
    check = commands.add_parser(
        "check", help="run the listed models again and compare", allow_abbrev=False
    )
    for command, run in ((record, _record), (check, _check)):
        command.set_defaults(run=run)
        command.add_argument("--folder", type=Path, default=FOLDER, help="(%(default)s)")
        command.add_argument("--models", type=Path, default=ASSETS / "models.toml", metavar="FILE")
        command.add_argument("--judge", default="", metavar="NAME", help="(the list's default)")
    return parser


def _stage(text: str) -> tuple[str, str]:
    stage, _, model = text.partition("=")
    if not stage or not model:
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE=MODEL")
    return stage, model


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
