"""Turns that are stored without their conversation, joined with the rows that hold it.

A turn names its context by the id of a CER case. So a file of turns for ESConv holds no text of ESConv, whose licence
differs from ours, and the same turn answers every draw of a dialogue's photos.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import Field

from compeer_core.cer import Case, CerRecord
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.row_files import json_lines, parse_row
from training.cer.written import WrittenSupport
from training.data.records import read_records

_log = logging.getLogger(__name__)

_DRAW = re.compile(r"~\d+(?=#\d+$)")


class ContextTurn(WrittenSupport):
    """A supporter turn, and the name of the conversation that it answers."""

    context: str = Field(pattern=r"^\S+#\d+$")
    """Id of the case that the turn answers, without the number of a photo draw."""


T = TypeVar("T", bound=ContextTurn)
Placed = TypeVar("Placed")


@dataclass(frozen=True)
class PlacedTurn(Generic[Placed]):
    """A turn, and its place in a file as errors name it."""

    where: str
    turn: Placed


def read_turns(paths: Sequence[Path], kind: type[T]) -> dict[str, PlacedTurn[T]]:
    """Return the turns of some files, by context.

    Raises:
        ConfigError: A file is missing, a line is no such turn, or two turns answer one context.
    """
    turns: dict[str, PlacedTurn[T]] = {}
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file (the written turns are in assets/cer)")
        for where, line in json_lines(path):
            turn = parse_row(kind, where, line)
            if (known := turns.get(turn.context)) is not None:
                raise ConfigError(
                    f"{where}: context {turn.context} already has a turn, in {known.where}; delete one"
                )
            turns[turn.context] = PlacedTurn(where, turn)
    return turns


def joined(
    turns: Mapping[str, PlacedTurn[Placed]], contexts: Sequence[Path]
) -> Iterator[tuple[Case, PlacedTurn[Placed]]]:
    """Yield each case that a turn answers once, in the order of the contexts; count turns without a case.

    Args:
        turns: By context.
        contexts: Files of CER rows.

    Raises:
        ConfigError: A file is missing, or no turn has a case.
    """
    missing, known = set(turns), set[str]()
    for path in contexts:
        for record in read_records(path, CerRecord):
            context = _DRAW.sub("", record.case.id)
            if context in turns and record.case.id not in known:
                missing.discard(context)
                known.add(record.case.id)
                yield record.case, turns[context]
    if len(missing) == len(turns):
        raise ConfigError(
            f"{', '.join(map(str, contexts))}: holds the context of none of {len(turns)} turns; name the rows that "
            "`cer written` and `cer rules` wrote"
        )
    if missing:
        _log.info("dropped: %d of %d turns, whose contexts are missing", len(missing), len(turns))


def check_quotations(placed: PlacedTurn[T], case: Case) -> None:
    """Check that a turn quotes only what the seeker wrote.

    Raises:
        ConfigError: A quotation is invented; the message names the turn's place.
    """
    messages = [turn.text for turn in case.history if turn.speaker is Speaker.SEEKER]
    try:
        placed.turn.check_quotations(messages)
    except ValueError as error:
        raise ConfigError(f"{placed.where}: {error}") from error
