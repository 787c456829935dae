"""Opposite versions of judged steps as CER rows: `python -m training cer contrast <config.toml>`.

A large language model rewrote each step of judged turns with few changes, so that the verdict is the opposite one: what
was wrong is right and what was right is wrong (`assets/cer/README.md`). A judge that sees both versions cannot tell
them apart by their style or topic, only by the conversation.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from compeer_core.cer import SPLITS, Candidate, CerRecord, DecidedBy, StepLabels
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import SupportTurn, render
from compeer_core.row_files import json_lines, parse_row, write_rows
from training.cer.written import WrittenReasoning
from training.data.records import read_records
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

WRITER = DecidedBy(kind="model", name="a large language model that wrote the opposite version")


class Config(FrozenModel):
    """`[cer contrast]`: the opposite versions and the rows that they belong to."""

    opposites: Path
    """File of opposite versions: JSON lines, compressed with gzip."""
    judged: tuple[Path, ...] = Field(min_length=1)
    """Files of the judged CER rows, written by `cer`. A version without its row is dropped and counted."""
    output: Path
    """Folder that receives `rows.jsonl`."""


class OppositeSteps(WrittenReasoning):
    """One line of the file: three steps, and whether they are right."""

    row: str
    """Id of the judged row."""
    right: StepLabels
    """Null where the writer disagreed with the reader and left the step as it was."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    refuse_resume(resume, "this stage takes seconds")
    rows = list(contrast_rows(config))
    counts = Counter(row.case.split for row in rows)
    _log.info(", ".join(f"{split}: {counts[split]} turns" for split in SPLITS))
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def contrast_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a row for each opposite version, in the order of the judged rows.

    The reply is that of the judged turn and has no preference.

    Raises:
        ConfigError: A file is missing, a line of it is not valid, a row has two versions or is not judged step by
            step, or no version has its row.
    """
    if not config.opposites.is_file():
        raise ConfigError(f"{config.opposites}: no such file (it is in assets/cer)")
    versions: dict[str, tuple[str, OppositeSteps]] = {}
    for where, line in json_lines(config.opposites):
        steps = parse_row(OppositeSteps, where, line)
        if steps.row in versions:
            raise ConfigError(
                f"{where}: {steps.row} already has an opposite version, in "
                f"{versions[steps.row][0]}; delete one"
            )
        versions[steps.row] = (where, steps)
    known = 0
    for path in config.judged:
        for record in read_records(path, CerRecord):
            if (version := versions.get(record.id)) is not None:
                known += 1
                yield _row(record, *version)
    if not known:
        raise ConfigError(
            f"{config.opposites}: none of {len(versions)} versions belongs to a row of "
            f"{', '.join(map(str, config.judged))}; name the rows that `cer` wrote from the same turns"
        )
    if known < len(versions):
        _log.info(
            "dropped: %d of %d versions, without their rows", len(versions) - known, len(versions)
        )


def _row(record: CerRecord, where: str, steps: OppositeSteps) -> CerRecord:
    judged = [c for c in (record.first, record.second) if c is not None and c.steps is not None]
    if len(judged) != 1:
        raise ConfigError(
            f"{where}: {record.id} has {len(judged)} turns judged step by step, not one"
        )
    try:
        turn = render(SupportTurn(steps.reasoning(), judged[0].reply))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    candidate = Candidate(
        author="llm", reply=judged[0].reply, turn=turn, steps=steps.right, steps_by=WRITER
    )
    return CerRecord(id=f"{record.id}/opposite", case=record.case, first=candidate)
