"""SFT of a LoRA adapter on a small frozen base: `python -m training sft adapter <config.toml>`.

Rows of CER are put together to dialogues, and each dialogue's history is read once (`shared_prefix`). The base
stays in bf16 and is never moved. The adapter computes in bf16 too and is moved in fp32: the optimiser has a
master copy of it, without which small steps would be rounded away.

Several processes share the dialogues of each step:

    torchrun --nproc-per-node 2 -m training sft adapter training/configs/small/sft_plain.toml

On two cores two processes of one thread each learn about half as fast again as one of two threads. A run
stopped at any point continues from its last checkpoint with the same rows.
"""

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from pydantic import Field
from torch import Tensor, nn

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.cer import Case, CerRecord, Split
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.reasoning import SupportTurn, render
from training.base_model import LoraShape, check_base, lora_config
from training.optimisation import (
    CHECKPOINT,
    Optimisers,
    Schedule,
    load_checkpoint,
    open_run,
    run_steps,
)
from training.pictures import Pictures
from training.processes import is_first, process_count, process_number
from training.samples import read_records
from training.sft.cer import turns_to_learn
from training.sft.tokenise import SampleReader
from training.shared_prefix import (
    ATTENTION,
    SharedPrefixRow,
    TokenisedSample,
    row_loss,
    shared_prefix_row,
)

_log = logging.getLogger(__name__)


class Config(Schedule):
    """`[sft adapter]`: which rows, which base, how long."""

    records: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows. The train split is learnt, the valid split measured."""
    base: Path
    """Checkpoint that the adapter is trained on, a Qwen2.5-VL."""
    output: Path
    """Run directory: `adapter` is the result."""
    start: Path | None = None
    """Adapter to begin with, of the same shape; None begins with one that changes nothing."""
    faces: Path | None = None
    """Folder of the packed faces, for rows that show one."""
    lora: LoraShape = LoraShape(rank=32, alpha=64)
    dialogues_per_step: int = Field(default=24, gt=0)
    """Of all processes together."""
    longest: int = Field(default=2048, gt=0)
    """Tokens of a row; a longer dialogue becomes several rows. A single turn that is longer is left out."""
    validation_dialogues: int = Field(default=64, gt=0)
    """The loss is measured on so many dialogues of the validation split, drawn by `seed`."""


@dataclass(frozen=True)
class LearntTurn:
    """A case and the turn that answers it."""

    case: Case
    completion: str


class Masters(Optimisers):
    """The fp32 copy of an adapter's weights: what AdamW moves and what a checkpoint keeps."""

    def __init__(self, adapter: Sequence[nn.Parameter], schedule: Schedule) -> None:
        self._adapter = adapter
        self.weights = nn.ParameterList(weight.detach().float().clone() for weight in adapter)
        super().__init__([], [(list(self.weights), schedule.adamw_lr)], schedule)

    def step(self, step: int) -> float:
        """Add up the gradients of all processes and move master and adapter; see `Optimisers.step`."""
        whole = torch.cat([_gradient(weight) for weight in self._adapter])
        _summed(whole)
        parts = whole.split([weight.numel() for weight in self._adapter])
        for master, part in zip(self.weights, parts, strict=True):
            master.grad = part.view_as(master)
        for weight in self._adapter:
            weight.grad = None
        factor = super().step(step)
        self.publish()
        return factor

    def publish(self) -> None:
        """Give the adapter its masters' values, rounded to its own type."""
        with torch.no_grad():
            for weight, master in zip(self._adapter, self.weights, strict=True):
                weight.copy_(master)


def _gradient(weight: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return gradient.float().flatten()


def _summed(values: Tensor) -> Tensor:
    """Add up a tensor over all processes, in place."""
    if process_count() > 1:
        torch.distributed.all_reduce(values)
    return values


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
                if isinstance(turn, SupportTurn):
                    learnt = LearntTurn(record.case, render(turn))
                    dialogues.setdefault(record.case.dialogue_id, []).append(learnt)
    return list(dialogues.values())


class RowBuilder:
    """Makes rows of dialogues."""

    def __init__(self, reader: SampleReader, pictures: Pictures, longest: int) -> None:
        self._reader = reader
        self._pictures = pictures
        self._longest = longest

    def rows(self, turns: Sequence[LearntTurn]) -> list[SharedPrefixRow]:
        """Return the rows of a dialogue, none longer than `longest`."""
        return self._fitted([self._tokenised(turn) for turn in turns])

    def _tokenised(self, turn: LearntTurn) -> TokenisedSample:
        dialogue = turn.case.dialogue(self._pictures.shown(turn.case.history))
        return self._reader.read_turn(dialogue, turn.completion)

    def _fitted(self, samples: Sequence[TokenisedSample]) -> list[SharedPrefixRow]:
        row = shared_prefix_row(samples)
        if row.tokens.shape[1] <= self._longest:
            return [row]
        half = len(samples) // 2
        if not half:
            return []
        return self._fitted(samples[:half]) + self._fitted(samples[half:])


def shared_out(lengths: Sequence[int], processes: int, number: int) -> list[int]:
    """Return which items a process takes, so that all have about as much to do.

    The longest go first and each goes to the process with the least so far.

    Args:
        lengths: Of the items.
        processes: How many share them.
        number: Which process, from 0.
    """
    loads = [0] * processes
    mine = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        taker = loads.index(min(loads))
        loads[taker] += lengths[item]
        if taker == number:
            mine.append(item)
    return mine


def steps_of(
    dialogues: Sequence[Sequence[LearntTurn]], size: int, seed: int, skip: int
) -> Iterator[list[Sequence[LearntTurn]]]:
    """Yield the dialogues of each step for ever, from step `skip` on; each pass in an order of its own."""
    size = min(size, len(dialogues))
    for number in itertools.count():
        order = np.random.default_rng([seed, number]).permutation(len(dialogues)).tolist()
        for start in range(0, len(order) - size + 1, size):
            if skip:
                skip -= 1
                continue
            yield [dialogues[place] for place in order[start : start + size]]


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train to `config.steps`, or continue a run; Ctrl-C saves first; a dry run counts turns."""
    check_base(config.base)
    dialogues = read_dialogues(config.records, "train")
    held_out = read_dialogues(config.records, "valid")
    _log.info(
        "%d turns of %d dialogues to learn, %d dialogues held out",
        *(sum(map(len, dialogues)), len(dialogues), len(held_out)),
    )
    for split, found in (("train", dialogues), ("valid", held_out)):
        if not found:
            files = ", ".join(map(str, config.records))
            raise ConfigError(f"{files}: no complete turn of the {split} split")
    if dry_run:
        return
    _join_processes(config)
    model = load_model(config.base, torch.bfloat16).to(config.device)
    reader = SampleReader(config.base, model, {})
    directory = open_run(config.output, config, resume)
    torch.manual_seed(config.seed)
    adapted = _adapted(model, config)
    adapter = [weight for weight in adapted.parameters() if weight.requires_grad]
    masters = Masters(adapter, config)
    step = load_checkpoint(directory.path / CHECKPOINT, masters.weights, masters.all)
    masters.publish()
    directory.rewind(step)
    model.model.language_model.set_attn_implementation(ATTENTION)
    builder = RowBuilder(reader, Pictures(None, config.faces), config.longest)
    drawn = np.random.default_rng(config.seed).permutation(len(held_out))
    validation = [
        row
        for place in drawn[: config.validation_dialogues].tolist()
        for row in builder.rows(held_out[place])
    ]
    steps = steps_of(dialogues, config.dialogues_per_step, config.seed, step)

    def learn() -> tuple[float, int]:
        rows = [row for turns in next(steps) for row in builder.rows(turns)]
        learnt = max(1, sum(len(row.targets) for row in rows))
        total = torch.zeros(1)
        for row in _mine(rows):
            loss = row_loss(model, row.to(config.device)) / learnt
            loss.backward()
            total += loss.item()
        return _summed(total).item(), sum(row.tokens.shape[1] for row in rows)

    def validate() -> float:
        model.eval()
        with torch.no_grad():
            losses = [row_loss(model, row.to(config.device)).item() for row in _mine(validation)]
        model.train()
        total = _summed(torch.tensor([math.fsum(losses)], dtype=torch.float64)).item()
        return total / max(1, sum(len(row.targets) for row in validation))

    model.train()
    run_steps(masters.weights, masters, config, directory, step, learn, validate)
    if is_first():
        save_adapter(adapted, config.base, directory.path / "adapter")


def _mine(rows: Sequence[SharedPrefixRow]) -> list[SharedPrefixRow]:
    lengths = [row.tokens.shape[1] for row in rows]
    return [rows[item] for item in shared_out(lengths, process_count(), process_number())]


def _join_processes(config: Config) -> None:
    if process_count() > 1:
        from accelerate import PartialState

        PartialState(cpu=config.device_type == "cpu")


def _adapted(model: Any, config: Config) -> PeftModel:
    """Put a trainable adapter on a model, in the type of its weights."""
    model.requires_grad_(False)
    if config.start is None:
        shape = lora_config(model, config.lora, freeze_vision=True)
        adapted: Any = get_peft_model(model, shape, autocast_adapter_dtype=False)
    else:
        try:
            adapted = PeftModel.from_pretrained(
                model, config.start, is_trainable=True, autocast_adapter_dtype=False
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{config.start}: no adapter for {config.base} ({reason})"
            ) from error
        rank = adapted.peft_config["default"].r
        if rank != config.lora.rank:
            raise ConfigError(f"{config.start} has rank {rank}; set lora.rank to it")
    moved: PeftModel = adapted.to(next(model.parameters()).dtype)
    return moved


def save_adapter(adapted: PeftModel, base: Path, folder: Path) -> None:
    """Write an adapter; it names its base by the folder's name alone, which is the same everywhere."""
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path = base.name
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty form of a card
