"""The demo: flags, models, page, server.

```text
python app.py                                      the shipped model, on any CPU
python app.py --policy hf:Qwen/Qwen2.5-VL-7B-Instruct --quantize 4bit
python app.py --policy "openai:http://localhost:8000/v1#Qwen/Qwen2.5-VL-7B-Instruct"
python app.py --reward "openai:http://localhost:8000/v1#Qwen/Qwen2.5-VL-7B-Instruct"
```

Environment variables set the defaults of flags: ``GRADIO_SERVER_NAME`` and ``GRADIO_SERVER_PORT`` (as for
gradio's own servers), ``COMPEER_DATA_DIR`` and ``COMPEER_DATABASE_URL``. In a Hugging Face Space, which
sets ``SPACE_ID``, the default address is 0.0.0.0:7860, the only one that a Space forwards.
"""

import argparse
import ipaddress
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from compeer_core.annotation.owner import DeskOwner
from compeer_core.data_folder import DATA_DIR, DATABASE_URL, default_data_folder
from compeer_core.errors import CheckpointError, CompeerError, ConfigError, StoreError
from compeer_core.registry import Kind, ModelEntry, Registry, SourceKind, parse_source
from compeer_core.votes.database import default_url
from compeer_core.votes.store import VoteStore
from ui_components.server.listening import listen, upload_folder

MODELS = Path(__file__).resolve().parent / "assets" / "models.toml"
LOCAL = "127.0.0.1"
PORT = 7860
PORTS_TRIED = 100
TURNS_AT_ONCE = 8
WRONG_USAGE = 2
PRIVATE_NETWORKS = "127.0.0.0/8,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"
"""Networks of a Space's proxy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the demo until it is stopped, and return the exit code."""
    flags = _flags().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with ExitStack() as stack:
        try:
            registry, policy, judge = _read_models(flags)
            tries = PORTS_TRIED if flags.port is None else 1
            bound = stack.enter_context(
                listen(flags.host, PORT if flags.port is None else flags.port, tries)
            )
            uploads = stack.enter_context(upload_folder(flags.data_dir))
            votes = stack.enter_context(
                VoteStore(flags.database_url or default_url(flags.data_dir))
            )
        except (ConfigError, CheckpointError) as error:
            return _wrong(error)
        if _votes_are_temporary(flags):
            sys.stderr.write(
                "app.py: votes are stored in a file of this Space and lost when it restarts; to keep "
                f"them, set the secret {DATABASE_URL} to a PostgreSQL database\n"
            )
        _prepare_environment(uploads)
        # Gradio reads its environment on import, which takes seconds: after the flags are checked.
        from ui_components.server.app import Server, build_server
        from ui_components.shared.models import Models
        from ui_components.shared.services import Services

        models = Models(registry, policy=policy, judge=judge, local_slots=flags.turns_at_once)
        try:
            services = Services(
                models,
                votes,
                language=flags.language,
                gated=flags.gate,
                demo_board=flags.demo_board,
                risk_check=registry.risk_check(),
            )
            owner_token = DeskOwner(votes).token()
        except StoreError as error:
            return _wrong(error)
        application = build_server(
            services, api_only=flags.api_only, public_metrics=flags.metrics == "public"
        )
        server = Server(application, trusted_proxies=flags.forwarded_allow_ips)
        failures: list[CompeerError] = []

        def served() -> None:
            host, port = bound.getsockname()[:2]
            name = "localhost" if host in {"0.0.0.0", "::"} else host
            sys.stdout.write(f"COMPEER is served at http://{name}:{port}\n")
            if not flags.api_only:
                sys.stdout.write(
                    f"The owner of the annotation desk signs in under Annotate with the token {owner_token}\n"
                    "Commands for its database: python -m compeer_core.votes --help, with "
                    f"--database-url {shlex.quote(votes.database.name)}\n"
                )
            sys.stdout.flush()

        def broken(error: CompeerError) -> None:
            """Stop the server if the preselected model cannot be loaded."""
            if isinstance(error, ConfigError | CheckpointError):
                failures.append(error)
                server.should_exit = True

        services.models.warm_up(broken)
        server.serve_on(bound, served)
        return _wrong(failures[0]) if failures else 0


def _read_models(flags: argparse.Namespace) -> tuple[Registry, str | None, str | None]:
    """Return the list of models, and the policy and judge from the flags ("" is none).

    Raises:
        ConfigError: The list or a flag is invalid.
        CheckpointError: A folder or file is missing.
    """
    registry = Registry.from_toml(flags.models, quantize=flags.quantize, device=flags.device)
    registry, policy = _with_model_of_flag(registry, "policy", flags.policy)
    registry, judge = _with_model_of_flag(
        registry, "judge", "" if flags.reward == "none" else flags.reward
    )
    registry.check()
    return registry, policy, judge


def _with_model_of_flag(
    registry: Registry, kind: Kind, flag: str | None
) -> tuple[Registry, str | None]:
    """Return the registry with the model of a flag, and that model's name in it."""
    names = [entry.name for entry in registry.entries if entry.kind == kind]
    if not flag or flag in names:
        return registry, flag
    if parse_source(flag).kind is SourceKind.CHECKPOINT and not Path(flag).is_dir():
        registry.entry(flag, kind)  # raises an error that lists the known names
    entry = ModelEntry.from_flag(flag, kind)
    return registry.adding(entry), entry.name


def _votes_are_temporary(flags: argparse.Namespace) -> bool:
    """Return whether votes go to a Space's temporary disk, by default."""
    location = flags.database_url or os.environ.get(DATA_DIR)
    return _in_a_space() and not location and flags.data_dir == default_data_folder()


def _in_a_space() -> bool:
    return bool(os.environ.get("SPACE_ID"))


def _prepare_environment(uploads: str) -> None:
    os.environ["GRADIO_TEMP_DIR"] = uploads
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


def _wrong(error: Exception) -> int:
    sys.stderr.write(f"app.py: {error}\n")
    return WRONG_USAGE


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _networks(text: str) -> str:
    for network in filter(None, map(str.strip, text.split(","))):
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"{network!r} is neither an address nor a network; write the proxy's address, such as 127.0.0.1"
            ) from error
    return text


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Chat with a supporter that shows its reasoning, scored live by a judge.",
    )
    add = parser.add_argument
    add(
        "--host",
        default=os.environ.get("GRADIO_SERVER_NAME") or ("0.0.0.0" if _in_a_space() else LOCAL),
        help="address to listen on, 0.0.0.0 for all interfaces (default: %(default)s)",
    )
    add(
        "--port",
        type=int,
        default=os.environ.get("GRADIO_SERVER_PORT") or (PORT if _in_a_space() else None),
        help=f"port to listen on (default: {PORT} or the next free port)",
    )
    add(
        "--models",
        type=Path,
        default=MODELS,
        metavar="FILE",
        help="list of models (default: %(default)s)",
    )
    add(
        "--policy",
        metavar="NAME|hf:ID|openai:URL#MODEL",
        help="policy: a name from the list, a checkpoint folder, a Hugging Face Hub ID, or a model "
        "behind an OpenAI-compatible endpoint",
    )
    add(
        "--reward",
        metavar="NAME|openai:URL#MODEL|none",
        help="judge: a name from the list, a model as for --policy, or none",
    )
    add(
        "--quantize",
        choices=["4bit", "8bit", "int8"],
        help="quantize the weights of checkpoints (4bit, 8bit: bitsandbytes), or let single turns of a "
        "small model on a CPU read copies in 8 bits (int8)",
    )
    add(
        "--device",
        help="device of checkpoints, for example cpu or cuda:0 (default: CUDA if available)",
    )
    add(
        "--turns-at-once",
        type=_positive,
        default=TURNS_AT_ONCE,
        metavar="N",
        help="most replies that models in this process write at the same time; further ones wait in the "
        "queue. Fewer save memory, and time for each reply (default: %(default)s)",
    )
    add(
        "--data-dir",
        type=Path,
        default=default_data_folder(),
        metavar="FOLDER",
        help="folder for votes, and for images between upload and send; conversations are not stored "
        "(default: %(default)s)",
    )
    add(
        "--database-url",
        default=os.environ.get(DATABASE_URL),
        metavar="URL",
        help="database for votes, for example postgresql://user:password@host/name (default: "
        f"{DATABASE_URL}, or else a file in the data folder)",
    )
    add(
        "--forwarded-allow-ips",
        type=_networks,
        default=os.environ.get("FORWARDED_ALLOW_IPS")
        or (PRIVATE_NETWORKS if _in_a_space() else ""),
        metavar="ADDRESSES",
        help="proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted: comma-separated addresses "
        "or networks (default: none)",
    )
    add("--language", choices=["en", "zh"], help="language of the page (default: the browser's)")
    add(
        "--no-gate",
        dest="gate",
        action="store_false",
        help="for researchers: show every reply as the model wrote it, also one that breaks the format, "
        "repeats itself, contains markup, is too long or says nothing (default: draw it again)",
    )
    add(
        "--demo-board",
        action="store_true",
        help="for presentations: rank models from the first vote of one rater on, and say so on the "
        "leaderboard (default: 20 votes by 5 raters)",
    )
    add("--api-only", action="store_true", help="serve the API without the page")
    add(
        "--metrics",
        choices=["local", "public"],
        default="local",
        help="who may read /metrics: programs on this machine, or everybody (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
