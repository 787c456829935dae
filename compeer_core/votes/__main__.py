"""The command line of the votes: `python -m compeer_core.votes board`.

    python -m compeer_core.votes board
    python -m compeer_core.votes board --as-of 2026-11-21T12:00:00Z --format json --output board.json
    python -m compeer_core.votes board --votes votes.jsonl --language zh --format csv --table pairs

The other commands are in `compeer_core.votes.commands`: export, import, delete, annotator, owner, items,
migrate.

The same votes, time, options and code give the same bytes. A wrong command, option or file is reported in one
sentence on stderr with exit code 2; other expected failures have exit code 1.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from pydantic import ValidationError

from compeer_core.errors import CompeerError, ConfigError
from compeer_core.votes.commands import add_commands, existing
from compeer_core.votes.leaderboard.board import ALL_FLAGS, Board, Filters, Settings, bradley_terry
from compeer_core.votes.leaderboard.plot import to_svg
from compeer_core.votes.leaderboard.text import PROGRAM, TABLES, to_csv, to_json, to_markdown
from compeer_core.votes.rows import VoteRow, read_votes

_PRESENCE = MappingProxyType({None: None, "with": True, "without": False})


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help explains")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        options = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except ConfigError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except CompeerError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    return 0


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM, description="Votes, leaderboard and annotation.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)
    _add_board(commands.add_parser("board", help="compute the leaderboard", allow_abbrev=False))
    add_commands(commands, _moment)
    return parser


def _add_board(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_board)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--votes", type=Path, metavar="FILE", help="votes as JSON lines")
    source.add_argument("--database-url", metavar="URL", help="default: the file of the user")
    parser.add_argument(
        "--as-of",
        type=_moment,
        metavar="TIME",
        help="ignore later votes, as in 2026-11-21T12:00:00Z; default: now",
    )
    settings = Settings()
    parser.add_argument("--seed", type=int, default=settings.seed)
    parser.add_argument(
        "--fits", type=int, default=settings.fits, help="resamples of raters, default %(default)s"
    )
    parser.add_argument(
        "--ridge",
        type=float,
        default=settings.ridge,
        help="prior precision of the scores, default %(default)s",
    )
    parser.add_argument(
        "--min-votes",
        type=int,
        default=settings.min_votes,
        help="required to rank, default %(default)s",
    )
    parser.add_argument(
        "--min-raters",
        type=int,
        default=settings.min_raters,
        help="required to rank, default %(default)s",
    )
    parser.add_argument(
        "--kind", choices=("blind", "named", "any"), default=Filters().kind, help="default: blind"
    )
    for option, meaning in (
        ("--language", "only these"),
        ("--topic", "only these"),
        ("--admit", f"count votes with this flag too, '{ALL_FLAGS}' for any"),
    ):
        parser.add_argument(
            option, action="append", default=[], metavar="NAME", help=f"{meaning}; may be repeated"
        )
    parser.add_argument(
        "--image", choices=("with", "without"), help="only battles with or without pictures"
    )
    parser.add_argument(
        "--reasoning", choices=("with", "without"), help="whether it was shown before the vote"
    )
    parser.add_argument("--format", choices=tuple(_FORMATS), default="markdown")
    parser.add_argument("--table", choices=tuple(TABLES), default="models", help="for csv")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the terminal")


_FORMATS: Mapping[str, Callable[[Board, str], str]] = MappingProxyType(
    {
        "markdown": lambda board, _: to_markdown(board),
        "json": lambda board, _: to_json(board),
        "csv": to_csv,
        "svg": lambda board, _: to_svg(board),
    }
)


def _board(options: argparse.Namespace) -> None:
    as_of: datetime = options.as_of or datetime.now(UTC)
    try:
        settings = Settings(**{name: getattr(options, name) for name in Settings.model_fields})
    except ValidationError as error:
        detail = error.errors()[0]
        name = str(detail["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{name}: {detail['msg']}, got {detail['input']}") from error
    filters = Filters(
        kind=options.kind,
        languages=options.language,
        topics=options.topic,
        has_image=_PRESENCE[options.image],
        with_reasoning=_PRESENCE[options.reasoning],
        admit=options.admit,
    )
    with _votes(options, as_of) as votes:
        board = bradley_terry(votes, filters=filters, settings=settings, as_of=as_of)
    _write(_FORMATS[options.format](board, options.table), options.output)


@contextmanager
def _votes(options: argparse.Namespace, as_of: datetime) -> Iterator[Iterable[VoteRow]]:
    if options.votes is not None:
        yield read_votes(options.votes)
        return
    from compeer_core.votes.store import VoteStore  # slow to load, and not needed for a file

    with VoteStore(existing(options.database_url)) as store:
        yield store.votes(as_of=as_of)


def _write(text: str, path: Path | None) -> None:
    # Bytes, so that the same board is the same file on every system.
    if path is None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
        return
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the zone may lead out of the calendar
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a date with time and zone, such as 2026-11-21T12:00:00Z"
    )


if __name__ == "__main__":
    sys.exit(main())
