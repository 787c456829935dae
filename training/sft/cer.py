"""SFT of a policy on CER rows: `python -m training sft cer <config.toml>`.

Paper: COMPEER-SFT is "fine-tuned using only supervised learning"; on which turns of CER it does not
say. By default (a choice) the policy learns the turns in which nobody found a fault: all three steps
are judged right and the reply is not the worse one of two. The loss is on the turn alone, never on
the history.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from compeer_core.backends.protocol import Message
from compeer_core.cer import CerRecord
from compeer_core.config import FrozenModel
from compeer_core.dialogue import Dialogue
from compeer_core.errors import ConfigError
from compeer_core.prompts import policy_messages
from compeer_core.reasoning import SupportTurn, read, render
from compeer_core.taxonomy import Preference
from training.common.run_directory import RunDirectory
from training.data.pictures import Pictures
from training.data.records import drawn, read_records
from training.finetune.base_model import check_base
from training.finetune.sft_trainer import FineTuning, Row, fine_tune, message_rows

_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[sft cer]`: which rows, which base, how long."""

    records: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows, from `cer`, `cer rules` or `cer written`. Only the train split is learnt."""
    with_faults: bool = False
    """Learn every turn that can be parsed, whatever its verdicts."""
    unjudged: bool = False
    """Also learn turns whose steps nobody judged."""
    row_share: float = Field(default=1.0, gt=0, le=1)
    """Share of these turns to train on, drawn by the seed."""
    base: Path | str
    """Checkpoint, or name on the Hub, to train or to train the adapter on."""
    output: Path
    """Run directory: `adapter`, or `model` without LoRA."""
    data_dir: Path | None = None
    """Folder of corpora, for rows with pictures of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for rows that show one."""
    longest: int | None = Field(default=None, gt=0)
    """Skip and count rows of more characters; None skips none."""
    training: FineTuning = FineTuning()


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Format the turns and train; a dry run checks the base and counts them."""
    check_base(config.base)
    rows = training_rows(config)
    if dry_run:
        return
    directory = RunDirectory.open(resume or config.output, config, resume=resume is not None)
    fine_tune(config.base, rows, config.training, directory, resume=resume is not None)


def training_rows(config: Config) -> list[Row]:
    """Return the turns to learn, of all files in order, and log how many were skipped.

    Raises:
        ConfigError: A file is missing, a line is not a CER row, a picture cannot be opened, or there
            is nothing to learn.
    """
    pictures = Pictures(config.data_dir, config.faces)
    turns: list[tuple[CerRecord, SupportTurn]] = []
    skipped: Counter[str] = Counter()
    for path in config.records:
        for record in read_records(path, CerRecord):
            if record.case.split != "train":
                skipped["of another split"] += len(record.candidates)
                continue
            for turn in turns_to_learn(
                record, with_faults=config.with_faults, unjudged=config.unjudged
            ):
                if isinstance(turn, str):
                    skipped[turn] += 1
                else:
                    turns.append((record, turn))
    if config.row_share < 1:
        count = max(1, round(config.row_share * len(turns)))
        turns = drawn(turns, count, config.training.seed)
    rows: list[Row] = []
    for record, turn in turns:
        row = turn_row(pictures.dialogue(record.case), render(turn))
        if config.longest is not None and row["length"] > config.longest:
            skipped[f"longer than {config.longest} characters"] += 1
        else:
            rows.append(row)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    _log.info("%d turns to learn; skipped: %s", len(rows), reasons or "none")
    if not rows:
        raise ConfigError(
            f"{', '.join(map(str, config.records))}: no turn of the train split to learn "
            f"({reasons or 'no rows'})"
        )
    return rows


def turn_row(dialogue: Dialogue, completion: str) -> Row:
    """Return a history and the turn that answers it in trl's columns; `length` is in characters."""
    prompt, images = message_rows(policy_messages(dialogue, "trained"))
    answer, _ = message_rows([Message("assistant", (completion,))])
    length = sum(len(utterance.text) for utterance in dialogue) + len(completion)
    return {"prompt": prompt, "completion": answer, "images": images, "length": length}


def turns_to_learn(
    record: CerRecord, *, with_faults: bool = False, unjudged: bool = False
) -> Iterator[SupportTurn | str]:
    """Yield each turn of a row, or why to skip it.

    Args:
        record: A row.
        with_faults: Ignore the verdicts on a turn.
        unjudged: Accept steps that nobody judged.
    """
    unfit = _UNFIT.get(record.preference, (False, False))
    for candidate, is_unfit in zip(record.candidates, unfit, strict=False):
        if candidate.turn is None:
            yield "without reasoning"
            continue
        reading = read(candidate.turn)
        steps = candidate.steps or (None,)
        if not reading.is_complete:
            yield "incomplete"
        elif with_faults:
            yield reading.turn
        elif False in steps:
            yield "with a step that is judged wrong"
        elif None in steps and not unjudged:
            yield "with a step that nobody judged"
        elif is_unfit:
            yield "with the worse reply"
        else:
            yield reading.turn


_UNFIT: Mapping[Preference | None, tuple[bool, bool]] = MappingProxyType(
    {
        Preference.FIRST: (False, True),
        Preference.SECOND: (True, False),
        Preference.NEITHER: (True, True),
    }
)
"""Which of the two replies of a row not to learn."""
