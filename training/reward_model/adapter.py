"""A judge as a LoRA adapter on a small base: `python -m training reward adapter <config.toml>`.

Learns the same conversations as `training.reward_model.train`, without trl and several times faster on a
CPU. All conversations about one history are one row (`shared_prefix`), so there is no padding and the
history is read once. Logits are computed only where a verdict is predicted. Only the layers from
`first_layer` on are trained: the states that enter them never change, so they are computed once and
stored (`LowerStates`). Judges and seeds share the stored states of rows that are equal. With `start`, a judge
begins with the adapter of the policy, which can already read a conversation and the output grammar.

Right steps outnumber wrong ones, so verdicts are weighted by `class_weights`. At each evaluation the
adapter is saved if its mean AUROC on the valid split is the best so far, with the temperatures that
calibrate it (`CALIBRATION`).

    torchrun --nproc-per-node 2 -m training reward adapter training/configs/small/reward_adapter.toml

`--resume` continues a run from its last checkpoint, see `training.sft.adapter`.
"""

import copy
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.cer import CerRecord, Split
from compeer_core.errors import ConfigError
from compeer_core.reasoning import STEPS, Part
from compeer_core.unifireward import PREFERENCES, VERDICTS
from training.common.calibration import calibration_error, fit_temperature
from training.common.fingerprints import digest, fingerprint
from training.common.processes import gather_from_processes, is_first
from training.data.pictures import Pictures
from training.data.records import drawn, read_records
from training.finetune.shared_prefix import (
    Branches,
    SharedPrefixRow,
    TokenisedSample,
    padded_rows,
    row_embeddings,
    row_of_places,
    run_layers,
)
from training.finetune.small_adapter import (
    AdapterConfig,
    AdapterRun,
    check_folders,
    split_to_fit,
    steps_of,
)
from training.finetune.tokenise import SampleReader
from training.reward_model.conversations import Kind, conversations, questions
from training.reward_model.train import WORDS

_log = logging.getLogger(__name__)

CALIBRATION = "calibration.json"
"""File of a run: the measures of the saved adapter, and its temperatures for models.toml."""
LARGEST_WEIGHT = 3.0
"""Limit of a class weight: a handful of verdicts of a rare word must not dominate a step."""

Verdicts = Sequence[tuple[Part, str]]
"""A part that was judged, and its verdict; one or more of a conversation."""


class Config(AdapterConfig):
    """`[reward adapter]`: rows, base and schedule. The run directory also receives `calibration.json`."""

    validation: tuple[Path, ...] = ()
    """Files whose valid split chooses the adapter and its temperatures; empty uses `records`."""
    kind: Kind = Kind.UNIFIED
    """`unified` (UnifiReward), `process` (PRM) or `outcome` (ORM)."""
    findings: bool = False
    """Tell the judge what a rule finds in a step (`compeer_core.findings`); set the same in models.toml."""
    first_layer: int = Field(default=0, ge=0)
    """The first layer to train; the layers below are computed once per row. 0 trains all layers."""
    states: Path | None = None
    """Folder of the stored states, 2 bytes per number; None is `states` in the run directory. Several
    runs may share it, one after the other or at once."""
    cases_per_step: int = Field(default=8, gt=0)
    """Histories per step, of all processes together."""
    validation_cases: int | None = Field(default=None, gt=0)
    """Number of histories of the valid split to measure on, drawn by `seed`; None uses all."""

    @model_validator(mode="after")
    def _stored_states_are_of_one_row(self) -> Self:
        if self.batch_tokens is not None and self.first_layer:
            raise ValueError(
                "batch_tokens computes several rows at once, whose states are not stored: set first_layer = 0 "
                "or leave batch_tokens out"
            )
        return self


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train to `config.steps`, or continue a run; Ctrl-C saves first; a dry run counts verdicts."""
    check_folders(config)
    cases = read_cases(config.records, "train", config.kind)
    validation_files = config.validation or config.records
    held_out = read_cases(validation_files, "valid", config.kind)
    weights = class_weights(verdict for case in cases for verdict in _verdicts(case, config.kind))
    for split, of_split, files in (
        ("train", cases, config.records),
        ("valid", held_out, validation_files),
    ):
        if not of_split:
            raise ConfigError(
                f"{', '.join(map(str, files))}: no row of the {split} split teaches a reward model of kind "
                f"'{config.kind}'"
            )
        counts = Counter(v for case in of_split for v in _verdicts(case, config.kind))
        shown = ", ".join(f"{part} {word} {n}" for (part, word), n in sorted(counts.items()))
        _log.info("%s: %d histories; verdicts: %s", split, len(of_split), shown)
    if dry_run:
        return
    training = AdapterRun(config, first_layer=config.first_layer)
    token_of = training.reader.verdict_tokens(WORDS[config.kind])
    best = torch.tensor(-1.0, dtype=torch.float64)
    training.open(resume, {"best": best})
    lower = LowerStates(
        config.states or training.directory.path / "states",
        training.model,
        config.first_layer,
        digest([*map(fingerprint, filter(None, (config.base, config.start))), config.first_layer]),
    )
    judge = _Judge(training.model, lower, config.first_layer, token_of)
    builder = RowBuilder(
        training.reader,
        Pictures(None, config.faces),
        config.kind,
        token_of,
        training.limit,
        findings=config.findings,
    )
    validation = [
        row
        for case in drawn(held_out, config.validation_cases, config.seed)
        for row in builder.rows(case)
    ]
    if not validation:
        raise ConfigError(
            f"longest: each history of the valid split has more than {training.limit} tokens"
        )
    steps = steps_of(range(len(cases)), config.cases_per_step, config.seed, training.step)
    rows_of = training.kept(lambda number: builder.rows(cases[number]))

    def learn() -> tuple[float, int]:
        rows = [row for number in next(steps) for row in rows_of(number)]
        count = max(1, sum(len(row.verdicts) for row in rows))
        return training.add_gradients(rows, lambda row: judge.loss(row, weights) / count, _joined)

    def validate() -> dict[str, float]:
        own = [
            (row.verdicts, judge.probabilities(row))
            for row in training.batches(validation, _joined)
        ]
        measured = measures([pair for of_rank in gather_from_processes(own) for pair in of_rank])
        training.directory.log(
            "%s", ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
        )
        if measured["auroc"] > best.item():
            best.fill_(measured["auroc"])
            training.save()
            if is_first():
                text = json.dumps(measured, indent=2, sort_keys=True) + "\n"
                (training.directory.path / CALIBRATION).write_text(text, encoding="utf-8")
        return measured

    training.train(learn, validate)
    if builder.too_long:
        training.directory.log(
            "conversations of over %d tokens were met %d times", training.limit, builder.too_long
        )


# --- rows --------------------------------------------------------------------------------------


def read_cases(records: Sequence[Path], split: Split, kind: Kind) -> list[list[CerRecord]]:
    """Return the rows of a split that teach a kind of judge, grouped by their history.

    Raises:
        ConfigError: A file is missing or a line is no CER row.
    """
    cases: dict[str, list[CerRecord]] = {}
    for path in records:
        for record in read_records(path, CerRecord):
            if record.case.split == split and any(questions(record, kind)):
                cases.setdefault(record.case.id, []).append(record)
    return list(cases.values())


def _verdicts(case: Sequence[CerRecord], kind: Kind) -> Iterator[tuple[Part, str]]:
    for record in case:
        for asked in questions(record, kind):
            yield from ((answered.part, answered.verdict) for answered in asked)


def class_weights(verdicts: Iterator[tuple[Part, str]]) -> dict[tuple[Part, str], float]:
    """Return the weight of each verdict on each part: all words of a part weigh the same in total.

    A weight is at most `LARGEST_WEIGHT`.

    Example:
        >>> reply = [(Part.REPLY, "First")] * 3 + [(Part.REPLY, "Both")]
        >>> list(class_weights(iter(reply)).values())
        [0.6666666666666666, 2.0]
    """
    counts = Counter(verdicts)
    words = Counter(part for part, _ in counts)
    totals: Counter[Part] = Counter()
    for (part, _), count in counts.items():
        totals[part] += count
    return {
        (part, word): min(LARGEST_WEIGHT, totals[part] / (words[part] * count))
        for (part, word), count in counts.items()
    }


@dataclass(frozen=True)
class VerdictRow:
    """The conversations about one history as one row."""

    row: SharedPrefixRow
    """Its targets are the verdicts."""
    verdicts: Verdicts
    """The part and the word of each target."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.row.length

    def to(self, device: str) -> "VerdictRow":
        """Return the row on a device."""
        return replace(self, row=self.row.to(device))


_Tokenised = tuple[TokenisedSample, tuple[int, ...], Verdicts]


class RowBuilder:
    """Makes rows of judged histories.

    Attributes:
        too_long: How many conversations were left out because they are longer than a row may be.
    """

    def __init__(
        self,
        reader: SampleReader,
        pictures: Pictures,
        kind: Kind,
        token_of: Mapping[str, int],
        longest: int,
        *,
        findings: bool = False,
    ) -> None:
        self.too_long = 0
        self._findings = findings
        self._reader = reader
        self._pictures = pictures
        self._kind = kind
        self._token_of = token_of
        self._longest = longest

    def rows(self, case: Sequence[CerRecord]) -> list[VerdictRow]:
        """Return the rows of one history; more than one only if it is too long for one.

        Raises:
            ConfigError: A picture cannot be opened.
        """
        shown = self._pictures.shown(case[0].case.history)
        tokenised: list[_Tokenised] = []
        for record in case:
            for messages, asked in zip(
                conversations(record, self._kind, shown, findings=self._findings),
                questions(record, self._kind),
                strict=True,
            ):
                sample, places = self._reader.read_verdicts(messages, self._token_of)
                verdicts = [(answered.part, answered.verdict) for answered in asked]
                tokenised.append((replace(sample, first_picture=None), places, verdicts))
        rows, dropped = split_to_fit(tokenised, _row, self._longest)
        self.too_long += dropped
        return rows


def _row(tokenised: Sequence[_Tokenised]) -> VerdictRow:
    first, *others = (sample for sample, _, _ in tokenised)
    # All conversations show the same pictures, in the shared history.
    row = row_of_places(
        [first, *(replace(o, pixels=None, grid=None) for o in others)],
        [places for _, places, _ in tokenised],
    )
    return VerdictRow(row, [verdict for _, _, verdicts in tokenised for verdict in verdicts])


def _joined(rows: Sequence[VerdictRow]) -> VerdictRow:
    verdicts = [verdict for row in rows for verdict in row.verdicts]
    return VerdictRow(padded_rows([row.row for row in rows]), verdicts)


# --- the model ---------------------------------------------------------------------------------


def _part_of_layers(text: Any, layers: Sequence[nn.Module], norm: nn.Module) -> Any:
    """Return a language model with some of another's layers; the weights are shared."""
    part = copy.copy(text)
    part._modules = {**text._modules, "layers": nn.ModuleList(layers), "norm": norm}
    return part


class LowerStates:
    """The states that enter the first trained layer, stored in a folder by the row's content."""

    def __init__(
        self, folder: Path, model: Qwen2_5_VLForConditionalGeneration, first_layer: int, key: str
    ) -> None:
        """Use a folder, which may hold the states of other rows and bases.

        `key` identifies the base and `first_layer`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._model = model
        self._key = key
        text = model.model.language_model
        self._lower = _part_of_layers(text, text.layers[:first_layer], nn.Identity())

    @torch.no_grad()
    def of(self, row: SharedPrefixRow) -> Tensor:
        """Return the states of a row, shape (rows, L, width), computed if they are not stored."""
        if not len(self._lower.layers):
            return row_embeddings(self._model, row)
        path = self._folder / f"{self._name(row)}.npy"
        weight = self._model.lm_head.weight
        if path.is_file():
            return torch.from_numpy(np.load(path)).to(weight.device, weight.dtype)
        states = run_layers(self._lower, row_embeddings(self._model, row), row)
        halves = states.half()
        stored = halves if halves.isfinite().all() else states.float()
        temporary = path.with_suffix(f".{os.getpid()}.new")
        with temporary.open("wb") as file:
            np.save(file, stored.cpu().numpy())
        temporary.replace(path)
        return stored.to(weight.dtype)

    def _name(self, row: SharedPrefixRow) -> str:
        content = hashlib.sha256(self._key.encode())
        branches = row.branches
        assert isinstance(branches, Branches)  # `Config` refuses padded rows here
        layout = torch.tensor([branches.trunk, *branches.shared, *branches.lengths])
        for tensor in (row.tokens, row.positions, layout, row.pixels):
            if tensor is not None:
                content.update(tensor.cpu().contiguous().numpy().tobytes())
        return content.hexdigest()


class _Judge:
    """The verdicts of a model on rows."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        lower: LowerStates,
        first_layer: int,
        token_of: Mapping[str, int],
    ) -> None:
        text = model.model.language_model
        self._lower = lower
        self._upper = _part_of_layers(text, text.layers[first_layer:], text.norm)
        self._head = model.lm_head
        self._words = list(token_of)
        self._tokens = list(token_of.values())

    def loss(self, row: VerdictRow, weights: Mapping[tuple[Part, str], float]) -> Tensor:
        """Return the sum of the losses of the verdicts, in nats.

        The first term makes the right word likelier than the other verdicts on the question; the second
        makes any of them likelier than other words, for servers that decode greedily.
        """
        logits, choices = self._logits(row)
        right = torch.tensor([self._words.index(word) for _, word in row.verdicts])
        losses = functional.cross_entropy(choices, right.to(choices.device), reduction="none")
        weight = torch.tensor([weights[verdict] for verdict in row.verdicts], device=losses.device)
        among_words = choices.logsumexp(-1) - logits.logsumexp(-1)
        return (weight * losses - among_words).sum()

    def probabilities(self, row: VerdictRow) -> list[list[float]]:
        """Return the probabilities of the verdicts on each question, in the order of their words."""
        _, choices = self._logits(row)
        return [
            [p for p, word in zip(of_one, self._words, strict=True) if word in _words_on(part)]
            for of_one, (part, _) in zip(choices.softmax(-1).tolist(), row.verdicts, strict=True)
        ]

    def _logits(self, row: VerdictRow) -> tuple[Tensor, Tensor]:
        """Return the logits of all tokens, and of the words; those of other questions are minus infinity."""
        hidden = run_layers(self._upper, self._lower.of(row.row), row.row)
        logits = self._head(hidden.flatten(0, 1)[row.row.predicting]).float()
        others = [[word not in _words_on(part) for word in self._words] for part, _ in row.verdicts]
        mask = torch.tensor(others, device=logits.device)
        return logits, logits[:, self._tokens].masked_fill(mask, -torch.inf)


def _words_on(part: Part) -> tuple[str, ...]:
    return PREFERENCES if part is Part.REPLY else VERDICTS


# --- measures ----------------------------------------------------------------------------------


def measures(judged: Sequence[tuple[Verdicts, Sequence[Sequence[float]]]]) -> dict[str, float]:
    """Return the measures of verdicts on held-out rows.

    `auroc` is the mean over parts of a part's AUROC, that of the reply for First against Second.
    Temperatures are those of `calibration`; a balanced accuracy is at the threshold 1/2.

    Args:
        judged: The verdicts of some rows, with the probabilities of the words.
    """
    pairs: dict[Part, tuple[list[bool], list[float]]] = {}
    for verdicts, probabilities in judged:
        for (part, word), given in zip(verdicts, probabilities, strict=True):
            first, second, *_ = _words_on(part)
            if word not in {first, second}:
                continue
            labels, scores = pairs.setdefault(part, ([], []))
            labels.append(word == first)
            scores.append(given[0] / max(given[0] + given[1], 1e-9))
    measured: dict[str, float] = {}
    aurocs = []
    for part, (labels, scores) in pairs.items():
        if len(set(labels)) == 2:
            aurocs.append(float(roc_auc_score(labels, scores)))
            measured[f"auroc_{part}"] = aurocs[-1]
            predicted = [score >= 0.5 for score in scores]
            measured[f"balanced_accuracy_{part}"] = float(
                balanced_accuracy_score(labels, predicted)
            )
        measured[f"ece_{part}"] = calibration_error(scores, labels)
    for name, parts in (("steps", STEPS), ("replies", (Part.REPLY,))):
        together = [pairs[part] for part in parts if part in pairs]
        if together:
            labels = [label for of_part, _ in together for label in of_part]
            scores = [score for _, of_part in together for score in of_part]
            measured[f"temperature_{name}"] = fit_temperature(scores, labels)
    return {"auroc": float(np.mean(aurocs)) if aurocs else 0.0} | measured
