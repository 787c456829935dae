"""ESConv's supporter turns with rule-based reasoning, as CER rows: `python -m training cer rules <config.toml>`.

The turns are those of the first SFT set (`training.sft.dataset`), without photos. As CER rows they can be combined
with others. A rule wrote the steps and nobody judged them, so the rows carry no labels.
"""

import logging
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from pydantic import Field

from compeer_core.cer import SPLITS, Candidate, Case, CaseUtterance, CerRecord, HumanLabels, Split
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import parse
from compeer_core.taxonomy import Emotion, Strategy
from training.cer.corpora.reading import opening_key
from training.data.esconv import read_esconv
from training.data.samples import Sample, write_records
from training.sft.dataset import build_samples

_log = logging.getLogger(__name__)

LICENCE = "CC BY-NC 4.0"
_NO_FACES = dict.fromkeys(Emotion, "")


class Config(FrozenModel):
    """`[cer rules]`: the dialogues that become rows."""

    esconv: Path
    """Folder with ESConv's `train.txt.gz`, `valid.txt.gz` and `test.txt.gz`."""
    output: Path
    """Folder that receives `rows.jsonl`, with the rows of all splits."""
    history_characters: int = Field(default=100_000, ge=0)
    """The longest history; older turns are dropped. No ESConv dialogue reaches the default."""
    seed: int = Field(default=0, ge=0)
    """Draws the wording."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the rows; a dry run reads everything and counts them."""
    if resume is not None:
        raise ConfigError("this stage cannot be resumed: run it again, it takes seconds")
    rows: list[CerRecord] = []
    for split in SPLITS:
        of_split = list(rule_rows(config, split))
        _log.info("%s: %d turns", split, len(of_split))
        rows += of_split
    if not dry_run:
        write_records(config.output / "rows.jsonl", rows)


def rule_rows(config: Config, split: Split) -> Iterator[CerRecord]:
    """Yield a row for each supporter turn of a split that answers the seeker.

    Raises:
        ConfigError: The file is missing, or a line is not in ESConv's layout.
    """
    dialogues = list(read_esconv(config.esconv / f"{split}.txt.gz", split))
    source_ids = {
        source.dialogue.id: opening_key(utterance.text for utterance in source.dialogue.utterances)
        for source in dialogues
    }
    samples = build_samples(
        dialogues,
        {},
        _NO_FACES,
        face_share=0.0,
        history_characters=config.history_characters,
        seed=config.seed,
    )
    for dialogue_id, of_dialogue in groupby(samples, key=lambda sample: sample.dialogue_id):
        turns = list(of_dialogue)
        for number, sample in enumerate(turns):
            yield _row(sample, split, source_ids[dialogue_id], number, len(turns))


def _row(sample: Sample, split: Split, source_id: str, number: int, rounds: int) -> CerRecord:
    reply = parse(sample.completion).reply
    case = Case(
        id=f"{sample.dialogue_id}#{number}",
        dialogue_id=sample.dialogue_id,
        source_id=source_id,
        corpus="esconv",
        language="en",
        split=split,
        licence=LICENCE,
        round=number,
        rounds=rounds,
        history=tuple(
            CaseUtterance(speaker=turn.speaker, text=turn.text) for turn in sample.history
        ),
        original=reply,
        labels=HumanLabels(strategies=(Strategy(sample.strategy),), problem=sample.problem),
    )
    answer = Candidate(author="corpus", reply=reply, turn=sample.completion)
    return CerRecord(id=case.id, case=case, first=answer)
