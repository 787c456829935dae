"""The commands of `python -m compeer_core.votes` that work on a database of votes.

python -m compeer_core.votes export votes.jsonl
python -m compeer_core.votes export rows.jsonl --what votes --as-of 2026-11-21T12:00:00Z
python -m compeer_core.votes import votes.jsonl --database-url postgresql://USER@HOST/NAME
python -m compeer_core.votes delete PSEUDONYM
python -m compeer_core.votes annotator NAME --may-adjudicate
python -m compeer_core.votes owner
python -m compeer_core.votes items rows.jsonl --pictures FOLDER
python -m compeer_core.votes items items.jsonl --read-by answers.jsonl.gz --share 0.1
python -m compeer_core.votes export answers.csv --what annotations
python -m compeer_core.votes migrate
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compeer_core.errors import ConfigError

if TYPE_CHECKING:
    from compeer_core.votes.store import VoteStore

ERASED_SECONDS = 30.0
"""How long a command waits until deleted data is overwritten."""

Parser = argparse.ArgumentParser
Moment = Callable[[str], datetime]


def add_commands(commands: "argparse._SubParsersAction[Any]", moment: Moment) -> None:
    """Add the commands to a parser; `moment` parses a time.

    Imports happen when a command runs: the database takes a second to load.
    """
    for name, (summary, add, run) in _COMMANDS.items():
        parser = commands.add_parser(name, help=summary, allow_abbrev=False)
        parser.set_defaults(run=run)
        parser.add_argument("--database-url", metavar="URL", help="default: the file of the user")
        add(parser, moment)


def _add_export(parser: Parser, moment: Moment) -> None:
    parser.add_argument("file", type=Path, help=".jsonl, or .csv for rows of CER or annotations")
    parser.add_argument(
        "--what",
        choices=("cer", "votes", "desk", "annotations"),
        default="cer",
        help="votes as rows of CER for training; votes without words for `board --votes`; labels "
        "settled by annotators as rows of CER; all answers of annotators (default: cer)",
    )
    parser.add_argument("--as-of", type=moment, metavar="TIME", help="the votes of this time")
    parser.add_argument(
        "--doubtful", action="store_true", help="include flagged and named votes in rows of CER"
    )


def _export(options: argparse.Namespace) -> None:
    from compeer_core.annotation.annotations import write_annotations
    from compeer_core.annotation.desk import Desk
    from compeer_core.votes.export import export_cer, write_cer
    from compeer_core.votes.rows import write_votes
    from compeer_core.votes.store import VoteStore

    with VoteStore(existing(options.database_url)) as store:
        if options.what == "cer":
            moved = export_cer(options.file, store, doubtful=options.doubtful, as_of=options.as_of)
            _say(f"{moved.rows} rows", moved.left_out)
        elif options.what == "desk":
            _say(f"{write_cer(options.file, Desk(store).settled())} rows", {})
        elif options.what == "annotations":
            count = write_annotations(options.file, Desk(store).annotations())
            _say(f"{count} annotations", {})
        elif options.file.suffix != ".jsonl":
            raise ConfigError(f"{options.file}: votes are written as .jsonl")
        else:
            _say(f"{write_votes(options.file, store.votes(options.as_of))} votes", {})


def _add_import(parser: Parser, _: Moment) -> None:
    parser.add_argument("file", type=Path, help="rows of CER, .jsonl or .csv")
    parser.add_argument(
        "--named", action="store_true", help="model names were visible to the voters"
    )


def _import(options: argparse.Namespace) -> None:
    from compeer_core.votes.export import import_cer
    from compeer_core.votes.store import VoteStore

    with VoteStore(options.database_url) as store:
        moved = import_cer(options.file, store, blind=not options.named)
    _say(f"{moved.rows} votes", moved.left_out)


def _add_delete(parser: Parser, _: Moment) -> None:
    parser.add_argument("pseudonym", help="the person's pseudonym in exports")


def _delete(options: argparse.Namespace) -> None:
    from compeer_core.votes.store import VoteStore

    with VoteStore(existing(options.database_url)) as store:
        voter = store.voter_of(options.pseudonym)
        if voter is None:
            raise ConfigError(f"nobody has the pseudonym {options.pseudonym!r}")
        deletion = store.delete_voter(voter)
        _say(f"{deletion.battles} battles and {deletion.votes} votes deleted{_traces(store)}", {})


def _add_items(parser: Parser, _: Moment) -> None:
    parser.add_argument("file", type=Path, help="rows of CER, or items of the pipeline, .jsonl")
    parser.add_argument("--key", type=Path, metavar="FILE", help="the key of the pipeline's items")
    pictures = parser.add_mutually_exclusive_group()
    pictures.add_argument(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="folder of the pictures, default: the file's own",
    )
    pictures.add_argument("--no-pictures", action="store_true", help="name pictures only")
    parser.add_argument("--batch", default="", metavar="NAME", help="name of the items' batch")
    parser.add_argument(
        "--read-by",
        type=Path,
        metavar="FILE",
        help="answers of a language model, .jsonl: people answer the same items without seeing them",
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="a random share of the items, default: 1"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the share, default: 0")


def _items(options: argparse.Namespace) -> None:
    from compeer_core.annotation.desk import Desk
    from compeer_core.annotation.items import add_items
    from compeer_core.votes.store import VoteStore

    with VoteStore(options.database_url) as store:
        added = add_items(
            Desk(store),
            options.file,
            key=options.key,
            pictures=None if options.no_pictures else options.pictures or options.file.parent,
            batch=options.batch,
            read_by=options.read_by,
            share=options.share,
            seed=options.seed,
        )
    _say(f"{added.items} items", added.left_out)


def _add_owner(parser: Parser, _: Moment) -> None:
    parser.add_argument(
        "--renew", action="store_true", help="replace the token, and end the owner's sessions"
    )


def _owner(options: argparse.Namespace) -> None:
    from compeer_core.annotation.owner import DeskOwner
    from compeer_core.votes.store import VoteStore

    with VoteStore(options.database_url) as store:
        owner = DeskOwner(store)
        _say(owner.renew_token() if options.renew else owner.token(), {})


def _add_annotator(parser: Parser, _: Moment) -> None:
    parser.add_argument("name", help="a pseudonym")
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--may-adjudicate", action="store_true", help="decides where two people differ"
    )
    change.add_argument("--revoke", action="store_true", help="invalidate the token")
    change.add_argument("--delete", action="store_true", help="with all drafts and answers")


def _annotator(options: argparse.Namespace) -> None:
    from compeer_core.annotation.desk import Desk
    from compeer_core.votes.store import VoteStore

    with VoteStore(options.database_url) as store:
        desk = Desk(store)
        if options.revoke:
            desk.revoke(options.name)
            _say("revoked", {})
        elif options.delete:
            _say(f"{desk.delete_annotator(options.name)} answers deleted{_traces(store)}", {})
        else:
            _say(desk.add_annotator(options.name, may_adjudicate=options.may_adjudicate), {})


def _traces(store: "VoteStore") -> str:
    """Wait until deleted data is overwritten; return a note if that takes too long."""
    try:
        store.database.erased.result(ERASED_SECONDS)
    except TimeoutError:
        return (
            "; the file still holds traces, since another program is using it: they will be overwritten "
            "when COMPEER opens it the next time"
        )
    return ""


def _add_nothing(_: Parser, __: Moment) -> None:
    pass


def _migrate(options: argparse.Namespace) -> None:
    from compeer_core.votes.store import VoteStore

    with VoteStore(options.database_url) as store:
        _say(f"{store.database.name} is up to date", {})


_COMMANDS: Mapping[
    str, tuple[str, Callable[[Parser, Moment], None], Callable[[argparse.Namespace], None]]
] = MappingProxyType(
    {
        "export": ("export votes or annotations to a file", _add_export, _export),
        "import": ("import rows of CER as votes", _add_import, _import),
        "delete": ("delete all data of a person", _add_delete, _delete),
        "annotator": ("add an annotator and show the token", _add_annotator, _annotator),
        "owner": ("show the token of the annotation desk's owner", _add_owner, _owner),
        "items": ("add items for annotation", _add_items, _items),
        "migrate": ("create a database, or migrate it", _add_nothing, _migrate),
    }
)


def existing(url: str | None) -> str:
    """Return the URL of an existing database, by default the user's own.

    Opening a missing file would create an empty one, and hide a typing error.

    Raises:
        ConfigError: The file does not exist.
    """
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from compeer_core.votes.database import default_url

    url = url or default_url()
    try:
        parsed = make_url(url)
    except ArgumentError:
        return url  # opening it raises a ConfigError
    file = parsed.database
    if parsed.get_backend_name() == "sqlite" and file and not Path(file).exists():
        raise ConfigError(f"{file}: there is no database of votes")
    return url


def _say(what: str, left_out: Mapping[str, int]) -> None:
    lines = [what, *(f"left out, {reason}: {count}" for reason, count in left_out.items())]
    sys.stdout.write("\n".join(lines) + "\n")
