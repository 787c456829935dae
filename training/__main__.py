"""The command line of training: `python -m training <stage> <config.toml>`.

    python -m training pretrain training/configs/nano/pretrain.toml --set steps=200
    python -m training pretrain training/configs/nano/pretrain.toml --resume runs/nano/pretrain
    python -m training run training/configs/smoke.toml
    python -m training results --check

A wrong command, setting or file is one sentence on stderr and exit code 2; another failure that a
person can cure is one sentence and exit code 1; a run that saved and stopped is exit code 130; one
that waits for people has done its part and is exit code 0.
"""

import argparse
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


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help explains")


def main(arguments: Sequence[str] | None = None, stages: Mapping[str, Stage] = STAGES) -> int:
    """Run one command line and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # a trainer would tell the hub that it was made
    for library in ("httpx", "httpx2"):  # each request would be a line of the log
        logging.getLogger(library).setLevel(logging.WARNING)
    # On import it warns that a kernel of its own is missing, which only 4 bits on a processor would use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # peft 0.21 still reads a property that transformers 5.23 has renamed.
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
    file = parser.add_mutually_exclusive_group(required=True)
    file.add_argument("config", nargs="?", type=Path, help="the stage's TOML file")
    file.add_argument("--config", dest="named", type=Path, metavar="FILE", help="the same, by name")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of the file; dotted keys reach into tables; may be given again",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the config and its files, then stop"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run directory")
    flags = stages[name].flags if name in stages else {}
    for key, purpose in flags.items():
        parser.add_argument(_flag(key), metavar="VALUE", help=f"{purpose} (the key {key})")
    if name in stages:
        parser.description = stages[name].summary
        if "-h" in arguments or "--help" in arguments:
            print(parser.format_help(), end="")
            return 0
    module = load_stage(name, stages)
    given = parser.parse_args(arguments)
    values = {key: getattr(given, key) for key in flags}
    changes = [f"{key}={value}" for key, value in values.items() if value is not None]
    path = given.config or given.named
    config = load_toml(path, module.Config, [*given.set, *changes])
    if isinstance(config, recipe.Config):
        config = config.model_copy(update={"folder": path.parent / config.folder})
    module.run(config, resume=given.resume, dry_run=given.dry_run)
    return 0


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _results(arguments: list[str]) -> int:
    parser = _Parser(prog=f"{PROGRAM} {RESULTS}", allow_abbrev=False)
    parser.description = "write the tables of assets/results into the documents that show them"
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if one is old")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: here)")
    if "-h" in arguments or "--help" in arguments:
        print(parser.format_help(), end="")
        return 0
    given = parser.parse_args(arguments)
    stale = results.update_documents(given.root, write=not given.check)
    for document in stale:
        print(f"{document}: {'differs from assets/results' if given.check else 'written'}")
    return 1 if given.check and stale else 0


def _help(stages: Mapping[str, Stage]) -> str:
    flags = [
        f"  {name} also knows {_flag(key)}: {purpose}"
        for name, stage in stages.items()
        for key, purpose in stage.flags.items()
    ]
    width = max(map(len, stages))
    lines = [
        f"usage: {PROGRAM} <stage> <config.toml> [--set KEY=VALUE] [--dry-run] [--resume RUN]",
        f"       {PROGRAM} {RESULTS} [--check]",
        "",
        "stages:",
        *(f"  {name:<{width}} {stage.summary}" for name, stage in stages.items()),
        f"  {RESULTS:<{width}} write the tables of assets/results into README and model cards",
        "",
        *flags,
        "Example files are in training/configs.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
