"""Corrected turns of a policy as CER rows: `python -m training cer corrected <config.toml>`.

A large language model read turns that COMPEER-small wrote, and corrected what was wrong with as few changes as possible
(`assets/cer/README.md`). A row holds the corrected turn and the policy's own in random order, for `sft preference` and
for reward models; a turn without a mistake is a row of its own.

A history or emotion step is labelled wrong if it was corrected. A corrected strategy step has no label in the policy's
turn: it may be wrong, or only differ because another reply is better.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from compeer_core.cer import SPLITS, Candidate, CerRecord, DecidedBy
from compeer_core.config import FrozenModel
from compeer_core.errors import CompletionError, ConfigError
from compeer_core.reasoning import parse, render
from compeer_core.row_files import write_rows
from compeer_core.taxonomy import Preference
from training.cer.context_turns import ContextTurn, check_quotations, joined, read_turns
from training.cer.pairs import pair_of
from training.cer.requests.seeding import stable_hash
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

READER = DecidedBy(kind="model", name="a large language model that corrected the turn")


class Config(FrozenModel):
    """`[cer corrected]`: the turns and the rows that hold their contexts."""

    turns: tuple[Path, ...] = Field(min_length=1)
    """Files of corrected turns: JSON lines, compressed with gzip."""
    contexts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows with the contexts. A turn without a row is dropped and counted."""
    output: Path
    """Folder that receives `rows.jsonl`."""


class CorrectedTurn(ContextTurn):
    """One line of the file: a policy's turn after the correction, and as the policy wrote it."""

    policy: str
    """Name of the policy."""
    own: str
    """The policy's turn, in the output grammar."""
    answers: bool
    """Whether the policy's own reply answers the message, by the reader."""
    may_hurt: bool
    """Whether it may hurt, by the reader."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    refuse_resume(resume, "this stage takes seconds")
    rows = list(corrected_rows(config))
    for split in SPLITS:
        pairs = Counter(row.second is not None for row in rows if row.case.split == split)
        _log.info("%s: %d turns corrected, %d right as they are", split, pairs[True], pairs[False])
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def corrected_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a row for each turn, in the order of the contexts.

    Raises:
        ConfigError: See `read_turns` and `joined`; or a policy's turn is incomplete, a corrected turn quotes what its
            context does not contain, or a reply that does not answer was not corrected.
    """
    for case, placed in joined(read_turns(config.turns, CorrectedTurn), config.contexts):
        turn = placed.turn
        corrected = render(turn.support_turn())
        try:
            own = parse(turn.own)
        except CompletionError as error:
            raise ConfigError(f"{placed.where}: own: {error}") from error
        if own.reply == turn.reply and (turn.may_hurt or not turn.answers):
            raise ConfigError(f"{placed.where}: the reply was called wrong and is not corrected")
        same = [a == b for a, b in zip(own.reasoning, parse(corrected).reasoning, strict=True)]
        by_policy = Candidate(
            author=turn.policy,
            reply=own.reply,
            turn=turn.own,
            steps=(same[0], same[1], same[2] or None),
            steps_by=READER,
        )
        row = f"{case.id}/corrected"
        if corrected == turn.own:
            yield CerRecord(id=row, case=case, first=by_policy)
            continue
        check_quotations(placed, case)
        by_reader = Candidate(
            author="llm",
            reply=turn.reply,
            turn=corrected,
            steps=(True, True, True),
            steps_by=READER,
        )
        yield pair_of(
            row,
            case,
            by_reader,
            by_policy,
            preference=None if own.reply == turn.reply else Preference.FIRST,
            by=READER,
            swapped=stable_hash("side", row) % 2 == 1,
        )
