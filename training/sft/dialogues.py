"""SFT of a small policy on whole dialogues: `python -m training sft dialogues <config.toml>`.

The same samples and the same loss as `training.sft.train`, in another order of work: all turns of a
dialogue are one row and its history is read once (`shared_prefix`), the weights are moved by Muon and
AdamW (`training.finetune.optimisation`), and each pass draws the wording of the reasoning and the photos anew.
It is made for models of the size of COMPEER-nano on one processor or one accelerator; for large ones,
for LoRA and for several processes there is `training.sft.train`.

A run stopped at any point continues from its last checkpoint with the same rows.
"""

import itertools
import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.backends.transformers_.packed_weights import load_model
from compeer_core.cer import Split
from compeer_core.errors import ConfigError
from training.data.face_tokens import embeddings_of, sure_tokens, word_vectors
from training.data.faces import FACE_CLASSES, Face, read_faces, read_readings
from training.data.samples import Sample
from training.finetune.base_model import check_base
from training.finetune.optimisation import (
    CHECKPOINT,
    Optimisers,
    Schedule,
    load_checkpoint,
    open_run,
    run_steps,
)
from training.finetune.shared_prefix import ATTENTION, SharedPrefixRow, row_loss, shared_prefix_row
from training.sft.source import SampleSource, drawn_samples, prepare_samples
from training.sft.tokenise import SampleReader

_log = logging.getLogger(__name__)


class Config(SampleSource, Schedule):
    """`[sft dialogues]`: which dialogues, which base, how long."""

    base: Path
    """Checkpoint to start from, a Qwen2.5-VL."""
    output: Path
    """Run directory: `samples.<split>.jsonl`, then `model`."""
    history_characters: int = 100_000
    """Older turns are left out beyond this; but what is left out is no longer shared."""
    dialogues_per_step: int = Field(default=3, gt=0)
    vision_lr: float = Field(default=3e-4, gt=0)
    """Learning rate of the image tower."""
    freeze_vision: bool = False
    """Leave the image tower as it is."""
    freeze_language: bool = False
    """Train the image tower alone: what the policy writes where there is no photo stays as it is, and
    adapters made on its language model go on fitting."""
    sure_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the dialogues in which a face is shown as the image tower would show it if it were sure of what
    it takes it for (`readings`). A language model learns to look at tokens that always tell, and hardly at
    such that tell little more than the words do (docs/experiments.md)."""
    only_faces: bool = False
    """Learn only what is said first in the emotion step of turns with a photo: that is of the face, if there are
    `readings`. The other turns are left out."""
    validation_dialogues: int = Field(default=24, gt=0)
    """The loss is measured on so many dialogues of the validation split."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.freeze_language and self.freeze_vision:
            raise ValueError("with freeze_language and freeze_vision nothing is left to be trained")
        for name in ("sure_share", "only_faces"):
            if getattr(self, name) and self.readings is None:
                raise ValueError(f"{name} needs readings: what the tower takes each photo for")
        return self


@dataclass(frozen=True)
class _Row:
    """A dialogue."""

    row: SharedPrefixRow
    photos: tuple[str, ...]
    """Names, in the order in which the row has their pixels."""


class _SureFaces:
    """Image tokens that say what the tower takes a photo for, as if it were sure."""

    def __init__(self, config: Config, model: Qwen2_5_VLForConditionalGeneration, tokenizer: Any):
        self._read_as = {} if config.readings is None else read_readings(config.readings)
        embeddings = embeddings_of(model)
        length = embeddings.norm(dim=-1).mean().item()
        self._tokens = sure_tokens(word_vectors(embeddings, tokenizer), length).to(config.device)

    def of(self, one: _Row) -> Tensor | None:
        """Return the image tokens of a row, shape (tokens, width); None if it has no photo."""
        if one.row.grid is None:
            return None
        each = [int(sides.prod()) // 4 for sides in one.row.grid]  # 2 x 2 patches are a token
        classes = [FACE_CLASSES.index(self._read_as[name]) for name in one.photos]
        return self._tokens[classes].repeat_interleave(torch.tensor(each), dim=0)


_FIRST_OF_EMOTION = re.compile(r"(?<=<emotion>)[^.]*\.")


def _of_face(completion: str) -> tuple[int, int]:
    """Return where what is said of the face begins and ends in a completion."""
    found = _FIRST_OF_EMOTION.search(completion)
    assert found is not None, "a sample's emotion step has a sentence"
    return found.span()


class _Dialogues:
    """The rows of a split, dialogue by dialogue."""

    def __init__(
        self, config: Config, faces: Sequence[Face], reader: SampleReader, limit: int
    ) -> None:
        self._config = config
        self._faces = faces
        self._reader = reader
        self._limit = limit
        self.too_long = 0
        """Samples left out because they are longer than the model can read."""

    def of(self, split: Split, number: int) -> list[list[Sample]]:
        """Return the samples of each dialogue as pass `number` (from 0) has them."""
        drawn = drawn_samples(self._config, self._faces, split, self._config.seed + number)
        return [list(group) for _, group in itertools.groupby(drawn, lambda s: s.dialogue_id)]

    def row(self, samples: Sequence[Sample]) -> _Row | None:
        """Return one dialogue's row, or None if all of it is too long."""
        if self._config.only_faces:
            samples = [sample for sample in samples if sample.history[-1].face is not None]
        read = [
            (
                self._reader.read(
                    sample, _of_face(sample.completion) if self._config.only_faces else None
                ),
                sample,
            )
            for sample in samples
        ]
        fitting = [
            (one, sample)
            for one, sample in read
            if len(one.prompt) + len(one.completion) <= self._limit
        ]
        self.too_long += len(read) - len(fitting)
        if not fitting:
            return None
        row = shared_prefix_row([one for one, _ in fitting]).to(self._config.device)
        photos = (said.face for _, sample in fitting for said in sample.history)
        return _Row(row, tuple(name for name in photos if name is not None))

    def steps(self, skip: int) -> Iterator[list[tuple[_Row, bool]]]:
        """Yield the rows of each step, and whether their faces are sure, for ever, from step `skip` on."""
        size = self._config.dialogues_per_step
        for number in itertools.count():
            dialogues = self.of("train", number)
            rng = np.random.default_rng([self._config.seed, number])
            order = rng.permutation(len(dialogues)).tolist()
            for start in range(0, len(order) - size + 1, size):
                if skip:
                    skip -= 1
                    continue
                drawn = np.random.default_rng([self._config.seed, number, start]).random(size)
                sure = (drawn < self._config.sure_share).tolist()
                rows = (self.row(dialogues[i]) for i in order[start : start + size])
                yield [(row, each) for row, each in zip(rows, sure, strict=True) if row is not None]


def _validation_loss(
    model: Qwen2_5_VLForConditionalGeneration, rows: Sequence[_Row], config: Config
) -> float:
    """Return the mean loss in nats per token."""
    model.eval()
    with torch.no_grad(), torch.autocast(config.device_type, dtype=torch.bfloat16):
        total = math.fsum(row_loss(model, one.row).item() for one in rows)
    model.train()
    return total / sum(len(one.row.targets) for one in rows)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train to `config.steps`, or continue a run; Ctrl-C saves first; a dry run counts samples."""
    if dry_run:
        check_base(config.base)
        with TemporaryDirectory() as scratch:
            prepare_samples(config, config.seed, Path(scratch))
        return
    model = load_model(config.base, torch.float32)
    faces = read_faces(config.faces)
    reader = SampleReader(config.base, model, {face.file: face.data for face in faces})
    sure_faces = _SureFaces(config, model, reader.processor.tokenizer)
    directory = open_run(config.output, config, resume)
    prepare_samples(config, config.seed, directory.path, keep=resume is not None)
    torch.nn.Module.to(model, config.device)
    language = model.model.language_model
    language.set_attn_implementation(ATTENTION)
    optimisers = Optimisers.of_model(
        model,
        config,
        None if config.freeze_vision else config.vision_lr,
        freeze_language=config.freeze_language,
    )
    step = load_checkpoint(directory.path / CHECKPOINT, model, optimisers.all)
    directory.rewind(step)
    if config.compile:
        for layer in language.layers:
            layer.compile(dynamic=True)
    limit: int = language.config.max_position_embeddings
    dialogues = _Dialogues(config, faces, reader, limit)
    held_out = [
        row
        for samples in dialogues.of("valid", 0)[: config.validation_dialogues]
        if (row := dialogues.row(samples)) is not None
    ]
    if not held_out:
        raise ConfigError(f"{config.esconv}: the validation split has no dialogue that fits")
    steps = dialogues.steps(skip=step)

    def learn() -> tuple[float, int]:
        rows = next(steps)
        learnt = sum(len(one.row.targets) for one, _ in rows) or 1  # no photo in any of them
        total = 0.0
        for one, sure in rows:
            image_tokens = sure_faces.of(one) if sure else None
            with torch.autocast(config.device_type, dtype=torch.bfloat16):
                loss = row_loss(model, one.row, image_tokens) / learnt
            loss.backward()
            total += loss.item()
        return total, sum(one.row.tokens.shape[1] for one, _ in rows)

    model.train()
    run_steps(
        model,
        optimisers,
        config,
        directory,
        step,
        learn,
        lambda: _validation_loss(model, held_out, config),
    )
    if dialogues.too_long:
        directory.log("%d samples were longer than the model can read", dialogues.too_long)
    model.save_pretrained(directory.path / "model")
    reader.processor.save_pretrained(directory.path / "model")
