"""Graded replies of a policy as CER rows of pairs: `python -m training cer graded <config.toml>`.

COMPEER-small wrote several replies after the same reasoning steps, its own or corrected ones, and a large language model
graded each (`assets/cer/README.md`). A row holds two of them for `sft preference`, so a policy learns from its own replies which
ones fit, and no wording that it could not have found itself.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from compeer_core.cer import SPLITS, Candidate, CerRecord, DecidedBy
from compeer_core.config import FrozenModel
from compeer_core.errors import CompletionError, ConfigError
from compeer_core.reasoning import Reasoning, SupportTurn, parse, render
from compeer_core.row_files import json_lines, parse_row, write_rows
from compeer_core.taxonomy import Preference
from training.cer.context_turns import PlacedTurn, joined, read_turns
from training.cer.corrected import CorrectedTurn
from training.cer.requests.seeding import stable_hash
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

READER = DecidedBy(kind="model", name="a large language model that graded both replies")


class Config(FrozenModel):
    """`[cer graded]`: the replies, and the turns and rows that they belong to."""

    replies: Path
    """File of graded replies: JSON lines, compressed with gzip."""
    turns: tuple[Path, ...] = ()
    """Files of corrected turns, which have the reasoning steps of lines without `steps`."""
    contexts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows with the contexts."""
    output: Path
    """Folder that receives `rows.jsonl`."""


class GradedReplies(FrozenModel):
    """One line of the file: replies to a context after the same steps."""

    context: str
    policy: str = "compeer-small"
    """Who wrote the replies."""
    steps: str | None = None
    """The steps before the replies, in the output grammar; None takes those of the context's corrected turn."""
    replies: tuple[str, ...]
    grades: tuple[Literal[0, 1, 2], ...]
    """0 wrong, 1 weak, 2 good, by the reader."""
    pairs: tuple[tuple[int, int], ...]
    """The pairs to learn from: the better reply and the worse, counted from 0."""
    held_out: bool
    """Whether the pairs are for validation, whatever the split of the context."""

    @model_validator(mode="after")
    def _pairs_follow_the_grades(self) -> Self:
        if len(self.grades) != len(self.replies):
            raise ValueError(f"{len(self.replies)} replies, but {len(self.grades)} grades")
        places = range(len(self.replies))
        for better, worse in self.pairs:
            if better not in places or worse not in places:
                raise ValueError(f"pair [{better}, {worse}]: there are {len(self.replies)} replies")
            if self.grades[better] <= self.grades[worse]:
                raise ValueError(f"pair [{better}, {worse}]: the first has no better grade")
        return self


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    refuse_resume(resume, "this stage takes seconds")
    rows = list(graded_rows(config))
    counts = Counter(row.case.split for row in rows)
    _log.info(", ".join(f"{split}: {counts[split]} pairs" for split in SPLITS))
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def graded_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a row for each pair, in the order of the contexts, with sides by the row's id.

    Raises:
        ConfigError: See `read_turns` and `joined`; or a line is not valid, a context occurs twice or has no corrected
            turn.
    """
    if not config.replies.is_file():
        raise ConfigError(f"{config.replies}: no such file (it is in assets/cer)")
    turns = read_turns(config.turns, CorrectedTurn)
    graded: dict[str, PlacedTurn[GradedReplies]] = {}
    for where, line in json_lines(config.replies):
        replies = parse_row(GradedReplies, where, line)
        if replies.context in graded:
            raise ConfigError(f"{where}: context {replies.context} occurs twice")
        if replies.steps is None and replies.context not in turns:
            raise ConfigError(f"{where}: context {replies.context} has no corrected turn")
        graded[replies.context] = PlacedTurn(where, replies)
    for case, placed in joined(graded, config.contexts):
        replies = placed.turn
        if replies.steps is None:
            reasoning = turns[replies.context].turn.reasoning()
        else:
            reasoning = _reasoning(replies.steps, placed.where)
        candidates = [
            Candidate(author=replies.policy, reply=r, turn=render(SupportTurn(reasoning, r)))
            for r in replies.replies
        ]
        split = "valid" if replies.held_out else case.split
        for number, (better, worse) in enumerate(replies.pairs):
            name = f"{case.id}/graded-{number}"
            swap = (
                stable_hash("graded side", name) % 2
            )  # or a judge would learn to prefer the first
            yield CerRecord(
                id=name,
                case=case.model_copy(update={"split": split}),
                first=candidates[worse if swap else better],
                second=candidates[better if swap else worse],
                preference=Preference.SECOND if swap else Preference.FIRST,
                preference_by=READER,
            )


def _reasoning(steps: str, where: str) -> Reasoning:
    try:
        return parse(f"{steps}<reply>-</reply>").reasoning
    except CompletionError as error:
        raise ConfigError(f"{where}: steps: {error}") from error
