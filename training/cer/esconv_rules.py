"""ESConv's supporter turns with rule-made reasoning as CER rows: `python -m training cer rules <config.toml>`.

Stage, strategy, emotion and intensity come from the corpus, the sentences around them from `training.sft.dataset`;
replies are the corpus's own. It is what published work can be compared on.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from compeer_core.cer import SPLITS, Candidate, Case, CaseUtterance, CerRecord, Split
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from training.cer.written import ROWS, counts_of
from training.esconv import read_esconv
from training.samples import Sample, write_records
from training.sft.dataset import build_samples

_log = logging.getLogger(__name__)

LICENCE = "CC BY-NC 4.0"


class Config(FrozenModel):
    """`[cer rules]`: where ESConv lies."""

    esconv: Path
    """Folder with ESConv's `train.txt.gz`, `valid.txt.gz` and `test.txt.gz`."""
    output: Path
    """Folder that receives `rows.jsonl`."""
    history_characters: int = 100_000
    """Older turns are left out beyond this."""
    seed: int = 0
    """Draws the wording of the reasoning."""


def records_of(samples: Iterable[Sample], split: Split) -> Iterator[CerRecord]:
    """Yield the rows of samples, which come dialogue by dialogue."""
    for _, together in groupby(samples, lambda sample: sample.dialogue_id):
        turns = list(together)
        for number, sample in enumerate(turns):
            reply = parse(sample.completion).reply
            case = Case(
                id=f"{sample.dialogue_id}#{number}",
                dialogue_id=sample.dialogue_id,
                source_id=sample.dialogue_id,
                corpus="esconv",
                language="en",
                split=split,
                licence=LICENCE,
                round=number,
                rounds=len(turns),
                history=tuple(
                    CaseUtterance(speaker=said.speaker, text=said.text) for said in sample.history
                ),
                original=reply,
            )
            answer = Candidate(author="corpus", reply=reply, turn=sample.completion)
            yield CerRecord(id=case.id, case=case, first=answer)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows of all splits; a dry run reads everything and counts them."""
    if resume is not None:
        raise ConfigError("cer rules takes seconds and cannot be resumed: begin it again")
    rows = [
        row
        for split in SPLITS
        for row in records_of(
            build_samples(
                read_esconv(config.esconv / f"{split}.txt.gz", split),
                {},
                {},
                face_share=0.0,
                history_characters=config.history_characters,
                seed=config.seed,
            ),
            split,
        )
    ]
    _log.info("rows: %s", counts_of(rows))
    if not dry_run:
        write_records(config.output / ROWS, rows)
