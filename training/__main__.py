"""The command line of training: `python -m training <stage> <config.toml>`.

    python -m training sft adapter training/configs/small/sft_adapter.toml --set steps=200
    python -m training sft adapter training/configs/small/sft_adapter.toml --resume runs/small/sft
    python -m training run training/configs/smoke.toml
    python -m training results --check

Every expected failure prints one sentence on stderr instead of a traceback. Exit codes:

- 0: finished, or waiting for people to do their part
- 1: failed for a reason the user can fix
- 2: wrong command, setting or file
- 130: interrupted; the state is saved
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from compeer_core.config import load_toml
from compeer_core.errors import CheckpointError, CompeerError, ConfigError
from training import recipe
from training.common import results
from training.stages import STAGES, Stage, StoppedEarly, WaitingForPeople, load_stage

PROGRAM = "python -m training"
RESULTS = "results"
INSTALL = "install the extras of training: pip install 'compeer[train,cer,eval]'"


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None, stages: Mapping[str, Stage] = STAGES) -> int:
    """Run one command line and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # trainers report their creation to the Hub
    for library in ("httpx", "httpx2"):  # they log every request
        logging.getLogger(library).setLevel(logging.WARNING)
    # Warns on import about a missing kernel that only 4-bit weights on a CPU would use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # peft 0.21 still reads a property that transformers 5.23 renamed.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments), stages)
    except (ConfigError, CheckpointError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except WaitingForPeople as error:
        print(error)
        return 0
    except StoppedEarly as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped", file=sys.stderr)
        return 130
    except CompeerError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in {"compeer_core", "training"}:
            raise
        print(f"{PROGRAM}: the package {error.name} is missing; {INSTALL}", file=sys.stderr)
        return 1


def _run(arguments: list[str], stages: Mapping[str, Stage]) -> int:
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_help(stages))
        return 0 if arguments else 2
    name, *rest = arguments
    if name == RESULTS:
        return _results(rest)
    if rest and f"{name} {rest[0]}" in stages:
        name, rest = f"{name} {rest[0]}", rest[1:]
    return _stage(name, rest, stages)


def _stage(name: str, arguments: list[str], stages: Mapping[str, Stage]) -> int:
    parser = _Parser(prog=f"{PROGRAM} {name}", allow_abbrev=False)
    stage = stages.get(name)
    named = stage.arguments if stage else {}
    for key, purpose in named.items():
        parser.add_argument(key, help=f"{purpose} (config key: {key})")
    source = parser.add_mutually_exclusive_group(required=not named)
    if not named:
        source.add_argument("config", nargs="?", type=Path, help="the stage's TOML file")
    source.add_argument(
        "--config",
        dest="config_flag",
        type=Path,
        metavar="FILE",
        help="the stage's TOML file, as a flag",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of the file; dotted keys address tables; repeatable",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="validate the config and its input files, then exit"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume the run in a directory")
    flags = stage.flags if stage else {}
    for key, purpose in flags.items():
        parser.add_argument(_flag(key), metavar="VALUE", help=f"{purpose} (config key: {key})")
    if stage:
        parser.description = stage.summary
        if "-h" in arguments or "--help" in arguments:
            print(parser.format_help(), end="")
            return 0
    module = load_stage(name, stages)
    options = parser.parse_args(arguments)
    values = {key: getattr(options, key) for key in flags}
    overrides = [f"{key}={value}" for key, value in values.items() if value is not None]
    overrides += [f"{key}={json.dumps(getattr(options, key), ensure_ascii=False)}" for key in named]
    path = options.config_flag if named else options.config or options.config_flag
    config = load_toml(path, module.Config, [*options.set, *overrides])
    if isinstance(config, recipe.Config):
        config = config.model_copy(update={"folder": path.parent / config.folder})
    module.run(config, resume=options.resume, dry_run=options.dry_run)
    return 0


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _results(arguments: list[str]) -> int:
    parser = _Parser(prog=f"{PROGRAM} {RESULTS}", allow_abbrev=False)
    parser.description = "update the tables in README and docs from the files in assets/results"
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a document is out of date"
    )
    parser.add_argument(
        "--root", type=Path, default=Path(), help="the checkout (default: current directory)"
    )
    if "-h" in arguments or "--help" in arguments:
        print(parser.format_help(), end="")
        return 0
    options = parser.parse_args(arguments)
    stale = results.update_documents(options.root, write=not options.check)
    for document in stale:
        print(f"{document}: {'differs from assets/results' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def _help(stages: Mapping[str, Stage]) -> str:
    flags = [
        f"  {name} also accepts {_flag(key)}: {purpose}"
        for name, stage in stages.items()
        for key, purpose in stage.flags.items()
    ]
    flags += [
        f"  {name} takes {' and '.join(stage.arguments)} instead of a file"
        for name, stage in stages.items()
        if stage.arguments
    ]
    width = max(map(len, stages))
    lines = [
        f"usage: {PROGRAM} <stage> <config.toml> [--set KEY=VALUE] [--dry-run] [--resume RUN]",
        f"       {PROGRAM} {RESULTS} [--check]",
        "",
        "stages:",
        *(f"  {name:<{width}} {stage.summary}" for name, stage in stages.items()),
        f"  {RESULTS:<{width}} update the tables in README, docs and model cards",
        "",
        *flags,
        "Example configs: training/configs",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
