"""DPO of a LoRA adapter on a small frozen base: `python -m training sft preference <config.toml>`.

Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290) on pairs of turns that answer
one history: the policy's own turn, and the same turn corrected (`cer corrected`). SFT teaches what a good turn looks
like; only a pair also shows what is wrong with the policy's own. The reference is the adapter that the run starts from.

The reply of a pair is usually wrong late, so both turns share their beginning, which is computed once and cancels in
the loss. `small_adapter` describes precision, processes and resuming.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from compeer_core.cer import Case, CerRecord, Split
from compeer_core.errors import ConfigError
from compeer_core.taxonomy import Preference
from training.common.processes import sum_over_processes
from training.data.pictures import Pictures
from training.data.records import drawn, read_records
from training.finetune.base_model import LoraShape
from training.finetune.shared_prefix import (
    SharedPrefixRow,
    TokenisedSample,
    padded_rows,
    predicted_logits,
    shared_prefix_row,
)
from training.finetune.small_adapter import (
    AdapterConfig,
    AdapterRun,
    check_folders,
    steps_of,
)
from training.finetune.tokenise import SampleReader

_log = logging.getLogger(__name__)


class Config(AdapterConfig):
    """`[sft preference]`: pairs, base, starting adapter and schedule. The valid split is held out."""

    start: Path
    """Adapter to start from, which is also the reference."""
    lora: LoraShape = LoraShape(rank=16, alpha=32)
    beta: float = Field(default=0.1, gt=0)
    """Weight of the distance to the reference; smaller allows the policy to move further."""
    imitation: float = Field(default=0.1, ge=0)
    """Weight of the better turn's NLL in nats/token after the shared beginning. Without it DPO may make both turns
    less probable."""
    pairs_per_step: int = Field(default=16, gt=0)
    """Of all processes together."""
    validation_pairs: int = Field(default=128, gt=0)
    """Number of pairs of the validation split that are measured, drawn by `seed`."""


@dataclass(frozen=True)
class TurnPair:
    """Two turns that answer a case, in the output grammar."""

    case: Case
    better: str
    worse: str


@dataclass(frozen=True)
class PairRow:
    """The row of a pair, the better turn first, or of several pairs.

    Attributes:
        numbers: Places of the pairs among all of the run.
        row: Both turns of each pair after their shared beginning.
        sizes: Number of targets of the better and of the worse turn of each pair.
    """

    numbers: tuple[int, ...]
    row: SharedPrefixRow
    sizes: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.row.length

    def to(self, device: str) -> "PairRow":
        """Return the row on a device."""
        return replace(self, row=self.row.to(device))


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train to `config.steps`, or continue a run; Ctrl-C saves first; a dry run counts pairs."""
    check_folders(config)
    learnt, held_out = (read_pairs(config.records, split) for split in ("train", "valid"))
    held_out = drawn(held_out, config.validation_pairs, config.seed)
    _log.info("%d pairs to learn, %d held out", len(learnt), len(held_out))
    if dry_run:
        return
    training = AdapterRun(config)
    model, limit = training.model, training.limit
    builder = _RowBuilder(training.reader, Pictures(None, config.faces))
    rows = [builder.row(number, pair) for number, pair in enumerate([*learnt, *held_out])]
    to_learn = [row for row in rows[: len(learnt)] if row.length <= limit]
    validation = [row for row in rows[len(learnt) :] if row.length <= limit]
    if not to_learn or not validation:
        raise ConfigError(f"longest: each pair of a split has more than {limit} tokens")
    reference = torch.full((len(rows), 2), torch.nan, dtype=torch.float64)
    training.open(resume, {"reference": reference})
    training.directory.log("%d pairs are too long", len(rows) - len(to_learn) - len(validation))
    if reference.isnan().all():  # otherwise the checkpoint has it
        reference.copy_(_log_probabilities_of_all(training, [*to_learn, *validation], len(rows)))
    steps = steps_of(to_learn, config.pairs_per_step, config.seed, training.step)

    def learn() -> tuple[float, int]:
        of_step = next(steps)

        def loss(row: PairRow) -> Tensor:
            turns = log_probabilities(row, predicted_logits(model, row.row))
            dpo = preference_loss(turns, reference[list(row.numbers)].to(turns), config.beta)
            return (dpo + config.imitation * _better_nll(row, turns)).sum() / len(of_step)

        return training.add_gradients(of_step, loss, _joined)

    def validate() -> dict[str, float]:
        totals = torch.zeros(3, dtype=torch.float64)
        for row in training.batches(validation, _joined):
            turns = log_probabilities(row, predicted_logits(model, row.row)).cpu()
            known = reference[list(row.numbers)].to(turns)
            gained_more = (turns - known).diff(dim=-1)[:, 0] < 0  # worse minus better
            dpo = preference_loss(turns, known, config.beta)
            totals += torch.stack([dpo, gained_more, _better_nll(row, turns)]).sum(-1)
        sum_over_processes(totals)
        names = ("validation_loss", "better_gained_more", "better_nll")
        return dict(zip(names, (totals / len(validation)).tolist(), strict=True))

    training.train(learn, validate)
    training.save()


def _log_probabilities_of_all(training: AdapterRun, rows: Sequence[PairRow], count: int) -> Tensor:
    """Return the log-probabilities of the pairs by number, under the weights as they are. Collective.

    Returns:
        Shape (count, 2); 0 where a pair has no row.
    """
    values = torch.zeros((count, 2), dtype=torch.float64)
    training.model.eval()
    with torch.no_grad():
        for row in training.batches(rows, _joined):
            logits = predicted_logits(training.model, row.row)
            values[list(row.numbers)] = log_probabilities(row, logits).double().cpu()
    return sum_over_processes(values)


# --- the maths ---------------------------------------------------------------------------------


def log_probabilities(row: PairRow, logits: Tensor) -> Tensor:
    """Return the log-probability of the better and of the worse turn of each pair, shape (pairs, 2), in nats.

    Only tokens after the shared beginning count: those before are equally probable.

    Args:
        row: The pairs.
        logits: Of all targets of the row, shape (targets, vocabulary).
    """
    targets = row.row.targets.to(logits.device)
    of_tokens = -functional.cross_entropy(logits, targets, reduction="none")
    of_turns = of_tokens.split([size for sizes in row.sizes for size in sizes])
    return torch.stack([tokens.sum() for tokens in of_turns]).view(-1, 2)


def preference_loss(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Return the loss of DPO for each pair, Eq. 7 of arXiv 2305.18290.

    Args:
        policy: Log-probabilities of the better and of the worse turn, shape (..., 2), in nats.
        reference: The same under the reference.
        beta: Positive.

    Example:
        >>> equal = torch.tensor([-3.0, -3.0])
        >>> round(preference_loss(equal, equal, 0.1).item(), 4)  # ln 2
        0.6931
    """
    better, worse = (policy - reference).unbind(-1)
    return -functional.logsigmoid(beta * (better - worse))


# --- pairs -------------------------------------------------------------------------------------


def read_pairs(records: Sequence[Path], split: Split) -> list[TurnPair]:
    """Return the pairs of a split, in the order of the files.

    A pair is a row with two turns: the reply of one is preferred, or no reply is and only the other has a wrong step.

    Raises:
        ConfigError: A file is missing, a line is no row of CER, or there is no pair.
    """
    pairs: list[TurnPair] = []
    for path in records:
        for record in read_records(path, CerRecord):
            second = record.second
            if record.case.split != split or second is None:
                continue
            turns = (record.first.turn, second.turn)
            if turns[0] is None or turns[1] is None or turns[0] == turns[1]:
                continue
            is_wrong = [False in (candidate.steps or ()) for candidate in (record.first, second)]
            match record.preference, is_wrong:
                case (Preference.FIRST, _) | (None, [False, True]):
                    pairs.append(TurnPair(record.case, turns[0], turns[1]))
                case (Preference.SECOND, _) | (None, [True, False]):
                    pairs.append(TurnPair(record.case, turns[1], turns[0]))
    if not pairs:
        files = ", ".join(map(str, records))
        raise ConfigError(
            f"{files}: no row of the {split} split has two turns of which one is better; "
            "`cer corrected` writes such rows"
        )
    return pairs


class _RowBuilder:
    """Makes rows of pairs."""

    def __init__(self, reader: SampleReader, pictures: Pictures) -> None:
        self._reader = reader
        self._pictures = pictures

    def row(self, number: int, pair: TurnPair) -> PairRow:
        """Return the row of a pair.

        Raises:
            ConfigError: A picture cannot be opened.
        """
        dialogue = self._pictures.dialogue(pair.case)
        better, worse = without_shared_beginning(
            self._reader.read_turn(dialogue, pair.better),
            self._reader.read_turn(dialogue, pair.worse),
        )
        sizes = (len(better.completion), len(worse.completion))
        return PairRow((number,), shared_prefix_row([better, worse]), (sizes,))


def _joined(rows: Sequence[PairRow]) -> PairRow:
    return PairRow(
        numbers=tuple(number for row in rows for number in row.numbers),
        row=padded_rows([row.row for row in rows]),
        sizes=tuple(sizes for row in rows for sizes in row.sizes),
    )


def _better_nll(row: PairRow, turns: Tensor) -> Tensor:
    """Return the NLL of the better turns in nats/token, shape (pairs,)."""
    better, _ = zip(*row.sizes, strict=True)
    return -turns[:, 0] / torch.tensor(better, device=turns.device)


def without_shared_beginning(
    better: TokenisedSample, worse: TokenisedSample
) -> tuple[TokenisedSample, TokenisedSample]:
    """Move the tokens with which both completions begin to the prompts, which are equal.

    Both completions keep at least one token. The pictures remain in the first sample alone.
    """
    shortest = min(len(better.completion), len(worse.completion)) - 1
    pairs = zip(better.completion[:shortest], worse.completion, strict=False)
    shared = next((n for n, (one, other) in enumerate(pairs) if one != other), shortest)
    prompt = (*better.prompt, *better.completion[:shared])
    return (
        replace(better, prompt=prompt, completion=better.completion[shared:], first_picture=None),
        replace(
            worse,
            prompt=prompt,
            completion=worse.completion[shared:],
            first_picture=None,
            pixels=None,
            grid=None,
        ),
    )
