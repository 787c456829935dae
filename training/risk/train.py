"""Trains the learned check for signs of danger: `python -m training risk <config.toml>`.

`compeer_core.risk_classifier` defines the model. Training messages are labelled messages and, as everyday
text, lines of corpora in which the phrases of `find_risk` find nothing; those are assumed to be harmless.
The base's unchanged layers read each message once; their output is stored in the run directory.

The lower threshold, for help lines, is the one at which classifier and phrases together flag at most `false_alarms` of the
look-alikes of the threshold writers. Above the higher one no model replies; of the look-alikes without a phrase the
classifier flags at most `withheld_false_alarms` there. Only messages of other writers, other parts and other dialogues are tested. The run directory contains
`risk.safetensors`, and `everyday.jsonl` with the lines of corpora that the classifier flags.
"""

import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.risk_classifier import KINDS, RiskNet, RiskShape, danger, padded, pieces
from compeer_core.row_files import json_lines, parse_json
from compeer_core.safety import RiskKind, find_risk
from compeer_core.stats import bootstrap_weights, estimate, wilson
from training.common import results
from training.common.jsonl import replace_rows
from training.common.run_directory import RunDirectory
from training.data.corpus import Source, SourceKind, check_files, read_documents
from training.finetune.base_model import load_base
from training.finetune.optimisation import (
    CHECKPOINT,
    Optimisers,
    Schedule,
    load_checkpoint,
    open_run,
    run_steps,
)

Lengths = NDArray[np.int64]
_log = logging.getLogger(__name__)
_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_CHINESE = re.compile("[\u4e00-\u9fff]")


class Part(FrozenModel):
    """Labelled messages of one purpose."""

    split: str
    """The value of the field `split`."""
    rows: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of English messages of this split, counted from 0: whole writers, who follow each
    other in the file. For messages without a field `writer`."""
    writers: tuple[str, ...] = ()
    """Values of the field `writer`. With neither rows nor writers, the whole split is meant."""
    file: Path = Path("tests/core/risk_messages.jsonl")


class Everyday(FrozenModel):
    """Lines of users in a corpus."""

    path: str
    kind: SourceKind
    lines: int = Field(gt=0)
    """How many are drawn."""
    shortest: int = 1
    """Least number of words."""


class Config(Schedule):
    """`[risk]`: data, base, shape and schedule."""

    base: Path
    """The checkpoint that the classifier reads with."""
    output: Path
    """Run directory."""
    data_dir: Path
    """Folder of the corpora."""
    train: tuple[Part, ...] = Field(min_length=1)
    threshold: tuple[Part, ...] = Field(min_length=1)
    """Sets the thresholds."""
    test: dict[str, Part] = Field(default_factory=dict)
    """By a name for the results."""
    everyday: tuple[Everyday, ...] = ()
    """Trained on, as harmless."""
    everyday_test: dict[str, Everyday] = Field(default_factory=dict)
    """Lines on which alarms are counted, by a name for the results."""
    shape: RiskShape = RiskShape()
    batch: int = Field(default=24, gt=1)
    false_alarms: float = Field(default=0.05, gt=0, lt=1)
    """Share of the look-alikes that classifier and phrases together may flag at the threshold."""
    withheld_false_alarms: float = Field(default=0.005, gt=0, lt=1)
    """Share of the look-alikes without a phrase that may get no reply."""
    results: Path = results.FOLDER
    """Folder of the results file."""
    command: str = "python -m training risk training/configs/small/risk.toml"
    """Recorded with the numbers."""

    @property
    def resumable_keys(self) -> frozenset[str]:
        """What is tested may change as well: a finished run is tested again when it is resumed."""
        return super().resumable_keys | {"test", "everyday_test", "results", "command"}


@dataclass(frozen=True)
class Message:
    """A message with its label, and what the phrases say."""

    text: str
    kind: RiskKind | None
    phrase: RiskKind | None


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train, choose the thresholds and test; a dry run counts messages."""
    data = _Data(config)
    _log.info("%s", {name: len(rows) for name, rows in data.messages.items()})
    if dry_run:
        return
    torch.manual_seed(config.seed)
    model: Any = load_base(config.base, "fp32", "fp32", None, torch.device("cpu"))
    net = RiskNet(model.requires_grad_(False).model.language_model, config.shape)
    directory = open_run(config.output, config, resume)
    if resume is None:
        shutil.rmtree(directory.path / "states", ignore_errors=True)  # perhaps of another config
    tokenizer = AutoTokenizer.from_pretrained(config.base)
    states = {
        name: _States(rows, net, tokenizer, directory.path / "states" / f"{name}.safetensors")
        for name, rows in data.messages.items()
    }
    head = [*net.norm.parameters(), *net.head.parameters()]
    updates = [*net.down.parameters(), *net.up.parameters()]
    optimisers = Optimisers([], [(head, 2 * config.adamw_lr), (updates, config.adamw_lr)], config)
    step = load_checkpoint(directory.path / CHECKPOINT, net, optimisers.all) if resume else 0
    directory.rewind(step)
    order = itertools.islice(_batches(states["train"].lengths, config), step, None)
    weights = _balanced(data.messages["train"])

    def learn() -> tuple[float, int]:
        chosen = next(order)
        kinds = states["train"].kinds[chosen]
        logits = net(*states["train"].batch(chosen))
        positive = kinds > 0
        # Smoothed labels: some messages can be read either way.
        losses = binary_cross_entropy_with_logits(
            danger(logits), 0.025 + 0.95 * positive.float(), reduction="none"
        )
        loss = (losses * weights[positive.long()]).mean()
        if positive.any():
            loss = loss + 0.3 * cross_entropy(logits[positive, 1:], kinds[positive] - 1)
        loss.backward()
        return loss.item(), int(states["train"].lengths[chosen].sum())

    def validate() -> float:
        odds, _ = _scores(net, states["threshold"])
        labels = (states["threshold"].kinds > 0).float()
        return float(binary_cross_entropy_with_logits(odds, labels))

    net.train()
    run_steps(net, optimisers, config, directory, step, learn, validate)
    odds, _ = _scores(net, states["threshold"])
    rows = data.messages["threshold"]
    hint = _threshold(odds, rows, config.false_alarms)
    silent = [place for place, row in enumerate(rows) if row.phrase is None]
    without_phrase = [rows[place] for place in silent]
    sure = max(hint, _threshold(odds[silent], without_phrase, config.withheld_false_alarms))
    settings = {"threshold": hint, "sure": sure, "shape": config.shape.model_dump()}
    save_file(
        {name: tensor.half().contiguous() for name, tensor in net.state_dict().items()},
        directory.path / "risk.safetensors",
        {"risk": json.dumps(settings)},
    )
    metrics = _tested(directory, data.messages, states, net, hint, sure)
    result = results.made(
        ("scikit-learn", "torch", "transformers"),
        name="risk",
        title="Signs of danger in English messages",
        compared="Check",
        model=f"{config.shape.last} layers of {config.base.name}, {config.shape.last - config.shape.first} "
        f"of them with rank {config.shape.rank}, trained on {len(data.messages['train']):,} messages",
        label_source="llm",
        command=config.command,
        seed=config.seed,
        metrics=tuple(metrics),
    )
    results.save(result, config.results)
    _log.info("%s", results.render(result))


# --- data --------------------------------------------------------------------------------------


class _Data:
    """The messages of each purpose."""

    def __init__(self, config: Config) -> None:
        everyday = [*config.everyday, *config.everyday_test.values()]
        check_files(config.data_dir, [Source(path=e.path, kind=e.kind) for e in everyday])
        train = _of_all(config.train)
        for source in config.everyday:
            lines = _everyday(config.data_dir, source, config.seed)
            train += [line for line in lines if line.phrase is None]
        self.messages = {"train": train, "threshold": _of_all(config.threshold)}
        self.messages |= {f"test {name}": _labelled(part) for name, part in config.test.items()}
        for name, source in config.everyday_test.items():
            self.messages[f"everyday {name}"] = _everyday(config.data_dir, source, config.seed)
        trained = {message.text for message in train}
        for name, rows in self.messages.items():
            if name != "train":
                self.messages[name] = [row for row in rows if row.text not in trained]


def _of_all(parts: Sequence[Part]) -> list[Message]:
    return [message for part in parts for message in _labelled(part)]


def _labelled(part: Part) -> list[Message]:
    rows = [parse_json(where, line) for where, line in json_lines(part.file)]
    rows = [r for r in rows if r["split"] == part.split and not _CHINESE.search(r["text"])]
    if part.rows or part.writers:
        chosen = [row for start, end in part.rows for row in rows[start:end]]
        rows = chosen + [row for row in rows if row.get("writer") in part.writers]
    kinds = {row["kind"] != "none" for row in rows}
    if len(kinds) < 2:
        raise ConfigError(f"{part.file}: split {part.split} needs signs of danger and look-alikes")
    return [_message(r["text"], None if r["kind"] == "none" else RiskKind(r["kind"])) for r in rows]


def _everyday(folder: Path, source: Everyday, seed: int) -> list[Message]:
    documents = read_documents(folder, Source(path=source.path, kind=source.kind))
    turns = (turn for document in documents for turn in _USER_TURN.findall(document))
    split = (line.strip() for turn in turns for line in turn.split("\n"))
    lines = [line for line in split if len(line.split()) >= source.shortest]
    order = np.random.default_rng(seed).permutation(len(lines))[: source.lines]
    return [_message(lines[number], None) for number in order]


def _message(text: str, kind: RiskKind | None) -> Message:
    sign = find_risk(text, "en")
    return Message(text, kind, sign.kind if sign else None)


def _balanced(messages: Sequence[Message]) -> Tensor:
    """Return weights of harmless and dangerous messages that give both the same sum."""
    positive = sum(message.kind is not None for message in messages)
    counts = torch.tensor([len(messages) - positive, positive])
    return len(messages) / 2 / counts


class _States:
    """Messages as the base's unchanged layers read them; stored in 16 bits."""

    def __init__(self, rows: Sequence[Message], net: RiskNet, tokenizer: Any, file: Path) -> None:
        self.kinds = torch.tensor([KINDS.index(row.kind) for row in rows])
        tokens = [pieces(tokenizer, row.text) for row in rows]
        self._prefix = tokens[0][1]
        ids = [torch.tensor(first[0]) for first, _ in tokens]  # of a long message its first piece
        self.lengths = np.array([len(row) for row in ids])
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({"states": torch.cat(_lower(net, ids, self.lengths))}, file)
        self._states = load_file(file)["states"].split(self.lengths.tolist())

    def batch(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of `RiskNet.forward` for the rows chosen."""
        rows = [self._states[number].float() for number in chosen]
        return pad_sequence(rows, batch_first=True), *padded(
            [len(row) for row in rows], self._prefix
        )


def _chunks(lengths: Lengths, size: int) -> Iterator[list[int]]:
    """Yield the numbers of all rows, in batches of similar length."""
    order = np.argsort(lengths, kind="stable").tolist()
    return (order[start : start + size] for start in range(0, len(order), size))


def _lower(net: RiskNet, ids: Sequence[Tensor], lengths: Lengths) -> list[Tensor]:
    states: dict[int, Tensor] = {}
    for chosen in _chunks(lengths, 16):
        hidden = net.lower(pad_sequence([ids[number] for number in chosen], batch_first=True))
        states |= {n: row[: lengths[n]].half() for n, row in zip(chosen, hidden, strict=True)}
    return [states[number] for number in range(len(ids))]


def _batches(lengths: Lengths, config: Config) -> Iterator[list[int]]:
    """Yield rows of similar length, in an order drawn for each epoch."""
    rng = np.random.default_rng(config.seed)
    while True:
        shuffled = rng.permutation(len(lengths))
        window = 8 * config.batch
        batches = []
        for start in range(0, len(shuffled), window):
            near = shuffled[start : start + window]
            near = near[np.argsort(lengths[near], kind="stable")]
            batches += [near[i : i + config.batch] for i in range(0, len(near), config.batch)]
        for number in rng.permutation(len(batches)):
            yield batches[number].tolist()


def _threshold(odds: Tensor, messages: Sequence[Message], false_alarms: float) -> float:
    """Return the least threshold at which phrases and classifier together flag at most that share of look-alikes."""
    harmless = [(float(o), m) for o, m in zip(odds, messages, strict=True) if m.kind is None]
    silent = sorted((o for o, m in harmless if m.phrase is None), reverse=True)
    by_phrases = len(harmless) - len(silent)
    return silent[max(0, int(false_alarms * len(harmless)) - by_phrases)]


# --- results -----------------------------------------------------------------------------------


def _scores(net: RiskNet, states: _States) -> tuple[Tensor, Tensor]:
    """Return each message's log odds of danger, and the place of its likeliest kind in `KINDS`."""
    logits = torch.zeros(len(states.lengths), len(KINDS))
    net.eval()
    with torch.inference_mode():
        for chosen in _chunks(states.lengths, 32):
            logits[chosen] = net(*states.batch(chosen))
    net.train()
    return danger(logits), 1 + logits[:, 1:].argmax(dim=1)


def _tested(
    directory: RunDirectory,
    messages: Mapping[str, Sequence[Message]],
    states: Mapping[str, _States],
    net: RiskNet,
    hint: float,
    sure: float,
) -> Iterator[results.Metric]:
    flagged = []
    for name in messages:
        purpose, _, about = name.partition(" ")
        if purpose not in {"test", "everyday"}:
            continue
        odds, kinds = _scores(net, states[name])
        rows = messages[name]
        by_phrases = np.array([row.phrase is not None for row in rows])
        learned = (odds > hint).numpy()
        checks = {
            "classifier": learned,
            "phrases": by_phrases,
            "either": learned | by_phrases,
            "reply withheld": (odds > sure).numpy() | by_phrases,
        }
        if purpose == "everyday":
            flagged += [
                {"corpus": about, "odds": round(float(value), 2), "text": row.text}
                for row, value, alarm in zip(rows, odds, learned, strict=True)
                if alarm
            ]
            for of, alarms in checks.items():
                share = wilson(int(alarms.sum()), len(rows)).mapped(lambda share: 1000 * share)
                yield results.measured("Alarms per 1,000 lines", share, of=of, about=about)
            continue
        labels = states[name].kinds.numpy()
        positive = labels > 0
        for of, alarms in checks.items():
            for measure, chosen in (("Recall", positive), ("False alarms", ~positive)):
                share = wilson(int(alarms[chosen].sum()), int(chosen.sum()))
                yield results.measured(measure, share, unit="%", of=of, about=about)
        weights = bootstrap_weights(range(len(rows)), 300)
        areas = [roc_auc_score(positive, odds, sample_weight=row) for row in weights]
        area = estimate(np.array(areas), len(rows))
        yield results.measured("AUROC", area, of="classifier", about=about)
        right = wilson(int((kinds.numpy() == labels)[positive].sum()), int(positive.sum()))
        yield results.measured("Kind right", right, unit="%", of="classifier", about=about)
        for of in ("either", "reply withheld"):
            for number, kind in enumerate(KINDS[1:], start=1):
                chosen = labels == number
                if chosen.any():
                    share = wilson(int(checks[of][chosen].sum()), int(chosen.sum()))
                    yield results.measured(
                        f"Recall: {kind}", share, unit="%", of=of, about=f"{about}, by kind"
                    )
    replace_rows(directory.path / "everyday.jsonl", flagged)
