"""Mirroring turns as CER rows: `python -m training cer mirror <config.toml>`.

A large language model answered contexts of other rows a second time, close to the seeker's own words
(`assets/cer/README.md`): a small policy copies well and paraphrases badly.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from compeer_core.cer import SPLITS, Candidate, CerRecord
from compeer_core.config import FrozenModel
from compeer_core.reasoning import render
from compeer_core.row_files import write_rows
from training.cer.context_turns import ContextTurn, check_quotations, joined, read_turns
from training.stages import refuse_resume

_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[cer mirror]`: the turns and the rows that hold their contexts."""

    turns: tuple[Path, ...] = Field(min_length=1)
    """Files of turns: JSON lines, compressed with gzip."""
    contexts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows, written by `cer written` and `cer rules`. A turn without a row is dropped and counted."""
    output: Path
    """Folder that receives `rows.jsonl`."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    refuse_resume(resume, "this stage takes seconds")
    rows = list(mirror_rows(config))
    counts = Counter(row.case.split for row in rows)
    _log.info(", ".join(f"{split}: {counts[split]} turns" for split in SPLITS))
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def mirror_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a row for each context that has a turn, in the order of the contexts.

    Raises:
        ConfigError: See `read_turns` and `joined`; or a turn quotes what its context does not contain.
    """
    for case, placed in joined(read_turns(config.turns, ContextTurn), config.contexts):
        check_quotations(placed, case)
        turn = placed.turn
        answer = Candidate(author="llm", reply=turn.reply, turn=render(turn.support_turn()))
        yield CerRecord(id=f"{case.id}/mirror", case=case, first=answer)
