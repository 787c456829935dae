"""Mirroring turns as CER rows: `python -m training cer mirror <config.toml>`.

A large language model answered contexts of other rows a second time, close to the seeker's own words
(`assets/cer/README.md`): a small policy copies well and paraphrases badly. The shipped file names the context of each
turn and does not contain it, as ESConv's licence differs from ours. This stage joins the two.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from compeer_core.cer import SPLITS, Candidate, Case, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from compeer_core.reasoning import render
from compeer_core.row_files import json_lines, parse_row, write_rows
from training.cer.written import WrittenSupport
from training.data.records import read_records

_log = logging.getLogger(__name__)

_DRAW = re.compile(r"~\d+(?=#\d+$)")


class Config(FrozenModel):
    """`[cer mirror]`: the turns and the rows that hold their contexts."""

    turns: tuple[Path, ...] = Field(min_length=1)
    """Files of turns: JSON lines, compressed with gzip."""
    contexts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows, written by `cer written` and `cer rules`. A turn without a row is dropped and counted."""
    output: Path
    """Folder that receives `rows.jsonl`."""


class MirrorTurn(WrittenSupport):
    """One line of the file."""

    context: str = Field(pattern=r"^\S+#\d+$")
    """Id of the case that the turn answers, without the number of a photo draw."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    if resume is not None:
        raise ConfigError("this stage cannot be resumed: run it again, it takes seconds")
    rows = list(mirror_rows(config))
    counts = Counter(row.case.split for row in rows)
    _log.info(", ".join(f"{split}: {counts[split]} turns" for split in SPLITS))
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def mirror_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a row for each context that has a turn, in the order of the contexts.

    Raises:
        ConfigError: A file is missing, a line is no turn, two turns answer one context, a turn quotes what its
            context does not contain, or no turn has a context.
    """
    turns = _read_turns(config.turns)
    missing = set(turns)
    for path in config.contexts:
        for record in read_records(path, CerRecord):
            context = context_of(record.case)
            if context in turns:
                missing.discard(context)
                yield _answered(record.case, *turns[context])
    if len(missing) == len(turns):
        raise ConfigError(
            f"{', '.join(map(str, config.turns))}: none of {len(turns)} contexts is in {', '.join(map(str, config.contexts))}; name the "
            "rows that `cer written` and `cer rules` wrote"
        )
    if missing:
        _log.info("dropped: %d of %d turns, whose contexts are missing", len(missing), len(turns))


def context_of(case: Case) -> str:
    """Return the name of a case's context, which is the same for all photo draws."""
    return _DRAW.sub("", case.id)


def _read_turns(paths: Sequence[Path]) -> dict[str, tuple[str, MirrorTurn]]:
    """Return each turn and its place in the files, by context."""
    turns: dict[str, tuple[str, MirrorTurn]] = {}
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file (shipped as assets/cer/mirror.jsonl.gz)")
        for where, line in json_lines(path):
            turn = parse_row(MirrorTurn, where, line)
            if turn.context in turns:
                first = turns[turn.context][0]
                raise ConfigError(
                    f"{where}: context {turn.context} already has a turn, in {first}; delete one"
                )
            turns[turn.context] = (where, turn)
    return turns


def _answered(case: Case, where: str, turn: MirrorTurn) -> CerRecord:
    try:
        turn.check_quotations([u.text for u in case.history if u.speaker is Speaker.SEEKER])
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    answer = Candidate(author="llm", reply=turn.reply, turn=render(turn.support_turn()))
    return CerRecord(id=f"{case.id}/mirror", case=case, first=answer)
