"""SFT of a LoRA adapter on a small frozen base: `python -m training sft adapter <config.toml>`.

CER rows are grouped into dialogues, and each dialogue's history is read once (`shared_prefix`). The base is
frozen; `small_adapter` describes the precision.

Several processes share the dialogues of each step:

    torchrun --nproc-per-node 2 -m training sft adapter training/configs/small/sft_adapter.toml

A run stopped at any point continues from its last checkpoint with the same rows. To stop several
processes, send SIGTERM to one of them: torchrun gives the others 30 seconds and then kills them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import Field

from compeer_core.cer import Case, CerRecord, Split
from compeer_core.errors import ConfigError
from compeer_core.reasoning import render
from training.common.processes import sum_over_processes
from training.data.pictures import Pictures
from training.data.records import drawn, read_records
from training.finetune.base_model import LoraShape
from training.finetune.shared_prefix import (
    SharedPrefixRow,
    TokenisedSample,
    padded_rows,
    row_loss,
    shared_prefix_row,
)
from training.finetune.small_adapter import (
    AdapterConfig,
    AdapterRun,
    check_folders,
    split_to_fit,
    steps_of,
)
from training.finetune.tokenise import SampleReader
from training.sft.cer import turns_to_learn

_log = logging.getLogger(__name__)


class DialogueConfig(AdapterConfig):
    """Rows, base and schedule of a stage that learns from dialogues. The valid split of `records` is held out."""

    lora: LoraShape = LoraShape(rank=32, alpha=64)
    dialogues_per_step: int = Field(default=16, gt=0)
    """Of all processes together."""
    validation_dialogues: int = Field(default=64, gt=0)
    """The loss is measured on so many dialogues of the validation split, drawn by `seed`."""


class Config(DialogueConfig):
    """`[sft adapter]`: rows, base and schedule."""

    label_weight: float = Field(default=1.0, gt=0)
    """Weight of the emotion's and the strategy's name in the training loss, relative to any other token. They are
    few of a turn's tokens, so the rest decides what is learnt otherwise. The validation loss has no weights."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train to `config.steps`, or continue a run; Ctrl-C saves first; a dry run counts turns."""
    check_folders(config)
    dialogues = read_dialogues(config.records, "train")
    held_out = read_dialogues(config.records, "valid")
    _log.info(
        "%d turns of %d dialogues to learn, %d dialogues held out",
        *(sum(map(len, dialogues)), len(dialogues), len(held_out)),
    )
    for split, of_split in (("train", dialogues), ("valid", held_out)):
        if not of_split:
            files = ", ".join(map(str, config.records))
            raise ConfigError(f"{files}: no turn of the {split} split that can be learnt")
    if dry_run:
        return
    training = AdapterRun(config)
    training.open(resume)
    builder = RowBuilder(
        training.reader, Pictures(None, config.faces), training.limit, config.label_weight
    )
    validation = [
        row
        for turns in drawn(held_out, config.validation_dialogues, config.seed)
        for row in builder.rows(turns)
    ]
    if not validation:
        raise ConfigError(
            f"longest: each turn of the valid split has more than {training.limit} tokens"
        )
    train_rows(
        config, training, len(dialogues), lambda number: builder.rows(dialogues[number]), validation
    )
    if builder.too_long:
        training.directory.log(
            "turns of more than %d tokens were met %d times", training.limit, builder.too_long
        )
    training.save()


def train_rows(
    config: DialogueConfig,
    training: AdapterRun,
    dialogues: int,
    rows: Callable[[int], list[SharedPrefixRow]],
    validation: Sequence[SharedPrefixRow],
) -> None:
    """Train the adapter of an open run on the rows of dialogues.

    Args:
        config: Of the stage.
        training: The run.
        dialogues: Number of dialogues.
        rows: Makes the rows of a dialogue from its number.
        validation: Rows whose loss per target is measured.
    """
    model = training.model
    numbers = range(dialogues)
    steps = steps_of(numbers, config.dialogues_per_step, config.seed, training.step)
    rows_of = training.kept(rows)

    def learn() -> tuple[float, int]:
        of_step = [row for number in next(steps) for row in rows_of(number)]
        learnt = max(1.0, sum(row.weights.sum().item() for row in of_step))  # all may be too long
        return training.add_gradients(
            of_step, lambda row: row_loss(model, row, weighted=True) / learnt, padded_rows
        )

    def validate() -> float:
        total = torch.zeros(1, dtype=torch.float64, device=training.device)
        for row in training.batches(validation, padded_rows):
            total += row_loss(model, row)
        return sum_over_processes(total).item() / sum(len(row.targets) for row in validation)

    training.train(learn, validate)


# --- dialogues ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearntTurn:
    """A case and the turn that answers it."""

    case: Case
    completion: str


def read_dialogues(records: Sequence[Path], split: Split) -> list[list[LearntTurn]]:
    """Return the turns to learn of each dialogue of a split, in the order of the files.

    Raises:
        ConfigError: A file is missing or a line is no row of CER.
    """
    dialogues: dict[str, list[LearntTurn]] = {}
    for path in records:
        for record in read_records(path, CerRecord):
            if record.case.split != split:
                continue
            for turn in turns_to_learn(record, unjudged=True):
                if not isinstance(turn, str):
                    learnt = LearntTurn(record.case, render(turn))
                    dialogues.setdefault(record.case.dialogue_id, []).append(learnt)
    return list(dialogues.values())


class RowBuilder:
    """Makes rows of dialogues.

    Attributes:
        too_long: How many turns were left out because they are longer than a row may be.
    """

    def __init__(
        self, reader: SampleReader, pictures: Pictures, longest: int, label_weight: float = 1.0
    ) -> None:
        self.too_long = 0
        self._label_weight = label_weight
        self._reader = reader
        self._pictures = pictures
        self._longest = longest

    def rows(self, turns: Sequence[LearntTurn]) -> list[SharedPrefixRow]:
        """Return the rows of a dialogue: one for each set of pictures that its histories show.

        Where all samples of a row show the same pictures, they share what follows these too. A row that is
        too long is halved.

        Raises:
            ConfigError: A picture cannot be opened.
        """
        groups: list[list[TokenisedSample]] = []
        for turn in turns:
            dialogue = self._pictures.dialogue(turn.case)
            sample = self._reader.read_turn(
                dialogue, turn.completion, label_weight=self._label_weight
            )
            if groups and _show_the_same(groups[-1][0], sample):
                groups[-1].append(sample)
            else:
                groups.append([sample])
        rows: list[SharedPrefixRow] = []
        for group in groups:
            of_group, dropped = split_to_fit(group, self._row, self._longest)
            rows += of_group
            self.too_long += dropped
        return rows

    def _row(self, samples: Sequence[TokenisedSample]) -> SharedPrefixRow:
        first, *others = (replace(sample, first_picture=None) for sample in samples)
        row = shared_prefix_row([first, *(replace(o, pixels=None, grid=None) for o in others)])
        of_picture = self._reader.processor.image_token_id
        if (row.tokens == of_picture).sum() == first.prompt.count(of_picture):
            return row
        return shared_prefix_row(samples)  # their histories differ before the pictures


def _show_the_same(one: TokenisedSample, other: TokenisedSample) -> bool:
    if one.pixels is None or other.pixels is None:
        return one.pixels is other.pixels
    assert one.grid is not None and other.grid is not None
    return torch.equal(one.grid, other.grid) and torch.equal(one.pixels, other.pixels)
