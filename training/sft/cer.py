"""SFT of a policy on turns of CER: `python -m training sft cer <config.toml>`.

Paper: COMPEER-SFT is "fine-tuned using only supervised learning"; on which turns of CER it does not
say. Learnt are those in which nobody found a fault (a choice): three steps judged right, in a reply that
is not the worse one of two. The loss is on the turn alone, never on the history.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from compeer_core.cer import CerRecord
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import SupportTurn, read, render
from compeer_core.taxonomy import Preference
from training.common.run_directory import RunDirectory
from training.data.pictures import Pictures
from training.data.samples import read_records
from training.finetune.base_model import check_base
from training.finetune.sft_trainer import FineTuning, Row, fine_tune
from training.sft.train import turn_row

_log = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[sft cer]`: which rows, which base, how long."""

    records: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows, as the cer stage writes them. Only rows of the train split are used."""
    with_faults: bool = False
    """Whether every turn that can be read is learnt, whatever was said about it."""
    unjudged: bool = False
    """Whether turns are learnt of which nobody said whether their steps are right."""
    base: Path | str
    """Checkpoint, or name on the hub, that is trained or that the adapter is trained on."""
    output: Path
    """Run directory: `adapter`, or `model` without LoRA."""
    data_dir: Path | None = None
    """Folder of corpora, for rows with pictures of their own."""
    faces: Path | None = None
    """Folder of the packed faces, for rows that show one."""
    longest: int | None = Field(default=None, gt=0)
    """Rows of more characters are left out and counted; None leaves none out."""
    training: FineTuning = FineTuning()


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Lay out the turns and train; a dry run looks for the base and counts them."""
    check_base(config.base)
    rows = training_rows(config)
    if dry_run:
        return
    directory = RunDirectory.open(resume or config.output, config, resume=resume is not None)
    fine_tune(config.base, rows, config.training, directory, resume=resume is not None)


def training_rows(config: Config) -> list[Row]:
    """Return the turns that are learnt, of all files in order, and say how many were left out.

    Raises:
        ConfigError: A file is missing, a line is no row of CER, a picture cannot be opened, or there
            is nothing to learn.
    """
    pictures = Pictures(config.data_dir, config.faces)
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    for path in config.records:
        for record in read_records(path, CerRecord):
            if record.case.split != "train":
                left_out["of another split"] += len(record.candidates)
                continue
            turns = turns_to_learn(record, with_faults=config.with_faults, unjudged=config.unjudged)
            for turn in turns:
                if isinstance(turn, str):
                    left_out[turn] += 1
                    continue
                dialogue = record.case.dialogue(pictures.shown(record.case.history))
                row = turn_row(dialogue, render(turn))
                if config.longest is not None and row["length"] > config.longest:
                    left_out[f"longer than {config.longest} characters"] += 1
                    continue
                rows.append(row)
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
    _log.info("%d turns to learn; left out: %s", len(rows), told or "none")
    if not rows:
        raise ConfigError(
            f"{', '.join(map(str, config.records))}: no turn of the train split to learn "
            f"({told or 'no rows'})"
        )
    return rows


def turns_to_learn(
    record: CerRecord, *, with_faults: bool = False, unjudged: bool = False
) -> Iterator[SupportTurn | str]:
    """Yield each turn of a row, or why it is not learnt.

    Args:
        record: A row.
        with_faults: Whether what was said about a turn does not matter.
        unjudged: Whether a step may be one that nobody judged.
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
"""Which of the two replies of a row is not fit to be learnt."""
