"""Graded turns of a policy as CER rows: `python -m training cer graded <config.toml>`.

COMPEER-small answered each context several times, and a large language model graded every reply and judged most steps
(`assets/cer/README.md`). A row holds two of the turns for `sft preference`, so a policy learns from its own turns which ones fit,
and no wording that it could not have found itself; or one turn with the verdicts on its steps, for `reward adapter`.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from compeer_core.cer import SPLITS, Candidate, Case, CaseUtterance, CerRecord, DecidedBy
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Speaker
from compeer_core.errors import CompletionError, ConfigError
from compeer_core.reasoning import parse
from compeer_core.row_files import json_lines, parse_row, write_rows
from compeer_core.taxonomy import Preference
from training.cer.context_turns import PlacedTurn, joined
from training.cer.pairs import pair_of
from training.cer.requests.seeding import stable_hash
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

READER = DecidedBy(kind="model", name="a large language model that read all turns of the context")


class Config(FrozenModel):
    """`[cer graded]`: the turns, and the rows with their contexts."""

    turns: Path
    """File of graded turns: JSON lines, compressed with gzip."""
    contexts: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows with the contexts."""
    output: Path
    """Folder that receives `rows.jsonl`."""


class GradedTurn(FrozenModel):
    """A turn and what the reader says of it."""

    text: str
    """In the output grammar."""
    grade: Literal[0, 1, 2]
    """Of the reply: 0 wrong, 1 weak, 2 good."""
    steps: tuple[bool, bool, bool] | None = None
    """Whether the history, emotion and strategy steps are right; None if they were not judged."""


class GradedTurns(FrozenModel):
    """One line of the file: turns that answer a context."""

    context: str
    """Id of the context's case."""
    history: tuple[str, ...] = ()
    """The utterances of a conversation that is in no other file, the seeker's first; empty takes those of the case."""
    policy: str
    """Who wrote the turns."""
    turns: tuple[GradedTurn, ...]
    pairs: tuple[tuple[int, int], ...]
    """The pairs to learn from: the turn with the better reply and the other, counted from 0."""
    held_out: bool
    """Whether the rows are for validation, whatever the split of the context."""

    @model_validator(mode="after")
    def _pairs_follow_the_grades(self) -> Self:
        places = range(len(self.turns))
        for better, worse in self.pairs:
            if better not in places or worse not in places:
                raise ValueError(f"pair [{better}, {worse}]: there are {len(self.turns)} turns")
            if self.turns[better].grade <= self.turns[worse].grade:
                raise ValueError(f"pair [{better}, {worse}]: the first has no better grade")
        return self

    def case(self) -> Case:
        """Return the case of a line that has its own history."""
        dialogue = self.context.rpartition("#")[0]
        sides = (Speaker.SEEKER, Speaker.SUPPORTER)
        return Case(
            id=self.context,
            dialogue_id=dialogue,
            source_id=dialogue,
            corpus="short",
            language="en",
            split="train",
            licence="CC BY 4.0",
            round=len(self.history) // 2,
            rounds=len(self.history) // 2 + 1,
            history=tuple(
                CaseUtterance(speaker=sides[place % 2], text=text)
                for place, text in enumerate(self.history)
            ),
            original=None,
        )


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    refuse_resume(resume, "this stage takes seconds")
    rows = list(graded_rows(config))
    pairs = Counter(row.case.split for row in rows if row.second)
    turns = Counter(row.case.split for row in rows if not row.second)
    _log.info(", ".join(f"{split}: {pairs[split]} pairs, {turns[split]} turns" for split in SPLITS))
    if not dry_run:
        write_rows(config.output / "rows.jsonl", rows)


def graded_rows(config: Config) -> Iterator[CerRecord]:
    """Yield a row for each pair and for each turn with judged steps, in the order of the contexts.

    Raises:
        ConfigError: See `joined`; or a line is not valid, or a context occurs twice.
    """
    if not config.turns.is_file():
        raise ConfigError(f"{config.turns}: no such file (it is in assets/cer)")
    graded: dict[str, PlacedTurn[GradedTurns]] = {}
    for where, line in json_lines(config.turns):
        turns = parse_row(GradedTurns, where, line)
        if turns.context in graded:
            raise ConfigError(f"{where}: context {turns.context} occurs twice")
        graded[turns.context] = PlacedTurn(where, turns)
    elsewhere = {name: placed for name, placed in graded.items() if not placed.turn.history}
    if elsewhere:
        for case, placed in joined(elsewhere, config.contexts):
            yield from _rows(case, placed)
    for placed in graded.values():
        if placed.turn.history:
            yield from _rows(placed.turn.case(), placed)


def _rows(case: Case, placed: PlacedTurn[GradedTurns]) -> Iterator[CerRecord]:
    graded = placed.turn
    split = "valid" if graded.held_out else case.split
    case = case.model_copy(update={"split": split})
    candidates = [_candidate(turn, graded.policy, placed.where) for turn in graded.turns]
    for number, (better, worse) in enumerate(graded.pairs):
        name = f"{case.id}/graded-{number}"
        yield pair_of(
            name,
            case,
            candidates[better],
            candidates[worse],
            preference=Preference.FIRST,
            by=READER,
            swapped=stable_hash("graded side", name) % 2 == 1,
        )
    for number, (turn, candidate) in enumerate(zip(graded.turns, candidates, strict=True)):
        if turn.steps is not None:
            judged = candidate.model_copy(update={"steps": turn.steps, "steps_by": READER})
            yield CerRecord(id=f"{case.id}/turn-{number}", case=case, first=judged)


def _candidate(turn: GradedTurn, policy: str, where: str) -> Candidate:
    try:
        return Candidate(author=policy, reply=parse(turn.text).reply, turn=turn.text)
    except CompletionError as error:
        raise ConfigError(f"{where}: a turn: {error}") from error
