"""LoRA adapters on a small frozen base: the run, fp32 masters, and rows shared between processes.

Policies (`sft adapter`) and judges (`reward adapter`) are trained with these parts. Base and adapter
compute in bf16 where the CPU multiplies it natively, else in fp32: on a CPU without such instructions bf16
is nine times slower (measured on AVX2). In bf16 small updates would be rounded away, so the optimiser
always updates an fp32 copy of the adapter (`Masters`).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from peft import (
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from pydantic import Field
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.errors import CheckpointError, ConfigError
from training.common.processes import (
    is_first,
    join_processes,
    process_count,
    process_rank,
    sum_over_processes,
)
from training.finetune.base_model import LoraShape, Weights, check_base, load_base, lora_config
from training.finetune.optimisation import (
    CHECKPOINT,
    Optimisers,
    Schedule,
    load_checkpoint,
    open_run,
    run_steps,
)
from training.finetune.shared_prefix import ATTENTION
from training.finetune.tokenise import SampleReader

T = TypeVar("T")


class Row(Protocol):
    """What one forward pass reads: a `SharedPrefixRow`, perhaps with more."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        ...

    def to(self, device: str) -> Self:
        """Return the row on a device."""
        ...


R = TypeVar("R", bound=Row)


# --- the run -----------------------------------------------------------------------------------


class AdapterConfig(Schedule):
    """Rows, base and adapter of a stage that trains an adapter."""

    records: tuple[Path, ...] = Field(min_length=1)
    """Files of CER rows; training uses the train split."""
    base: Path
    """Checkpoint to train the adapter on, a Qwen2.5-VL."""
    output: Path
    """Run directory, which receives `adapter`."""
    start: Path | None = None
    """Adapter to start from, of the shape `lora`; None starts from one that changes nothing."""
    faces: Path | None = None
    """Folder of the packed faces, for rows that show one."""
    lora: LoraShape = LoraShape()
    compute: Weights | None = None
    """Precision of the base and the adapter in memory; None picks the faster one of the device, see
    `fastest_precision`."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens of rows that are computed at once, with padding; set it on an accelerator,
    for instance to 16384, which also keeps rows in memory between passes. None computes each row by itself."""
    longest: int = Field(default=2048, gt=0)
    """Tokens of a row; a longer row is split. A turn or conversation that is longer by itself is left out
    and counted."""


class AdapterRun:
    """A run that trains an adapter, in one process or several.

    Attributes:
        device: Device of this process.
        model: The base with the adapter in it.
        reader: Tokenises for the model.
        limit: Maximum number of tokens of a row.
    """

    def __init__(self, config: AdapterConfig, *, first_layer: int = 0) -> None:
        """Load the base and add the adapter; writes nothing.

        Below `first_layer`, the adapter stays as it starts.

        Raises:
            CheckpointError: The base or `config.start` cannot be loaded.
            ConfigError: The base has no such layer.
        """
        self._config = config
        self.device = join_processes(config.device)
        torch.manual_seed(config.seed)  # all processes begin with the same adapter
        precision = config.compute or fastest_precision(config.device_type)
        self.model = load_small_base(config.base, precision)
        self.reader = SampleReader(config.base, self.model)
        self._adapted = add_adapter(self.model, config.lora, config.base, config.start)
        _freeze_below(self.model, first_layer)
        positions = self.model.model.language_model.config.max_position_embeddings
        self.limit = min(config.longest, positions)

    def open(self, resume: Path | None, state: Mapping[str, Tensor] | None = None) -> None:
        """Open the run directory, and load the last checkpoint of a run that is resumed.

        Sets `directory` and `step`, the number of steps done.

        Args:
            resume: Run directory to resume; None starts a new run.
            state: Further tensors that checkpoints contain; updated in place.

        Raises:
            ConfigError: See `open_run`.
        """
        config = self._config
        self.directory = open_run(config.output, config, resume)
        nn.Module.to(self.model, self.device)
        self.model.model.language_model.set_attn_implementation(ATTENTION)
        masters = Masters([weight for weight in self._adapted.parameters() if weight.requires_grad])
        for name, tensor in (state or {}).items():
            masters.register_buffer(name, tensor)
        self._masters = masters
        self._optimisers = Optimisers([], [([masters.flat], config.adamw_lr)], config)
        self.step = 0
        if resume is not None:
            checkpoint = self.directory.path / CHECKPOINT
            self.step = load_checkpoint(checkpoint, masters, self._optimisers.all)
            masters.publish()
        self._optimisers.all[0].register_step_post_hook(lambda *_: masters.publish())
        self.directory.rewind(self.step)

    def kept(self, rows_of: Callable[[int], list[R]]) -> Callable[[int], list[R]]:
        """Return a function that makes the rows of an item, once per item where rows stay in memory.

        Args:
            rows_of: Makes the rows of an item from its number.
        """
        return rows_of if self._config.batch_tokens is None else functools.cache(rows_of)

    def batches(self, rows: Sequence[R], join: Callable[[Sequence[R]], R]) -> Iterator[R]:
        """Yield this process's share of some rows on the device, several at once if `batch_tokens` allows.

        Args:
            rows: Of all processes.
            join: Makes one row of several.
        """
        own, most = own_rows(rows), self._config.batch_tokens
        for batch in ([row] for row in own) if most is None else padded_batches(own, most):
            yield (batch[0] if len(batch) == 1 else join(batch)).to(self.device)

    def add_gradients(
        self,
        rows: Sequence[R],
        loss_of: Callable[[R], Tensor],
        join: Callable[[Sequence[R]], R],
    ) -> tuple[float, int]:
        """Compute the gradients of a step; each process takes its share of the rows. Collective.

        Args:
            rows: Of all processes.
            loss_of: Returns the loss of a row on the device, which is summed over rows.
            join: Makes one row of several, see `batches`.

        Returns:
            The loss and the number of tokens, both over all processes.
        """
        total = torch.zeros(1, device=self.device)
        self._masters.forget()
        for row in self.batches(rows, join):
            loss = loss_of(row)
            loss.backward()
            self._masters.collect()
            total += loss.detach()
        sum_over_processes(self._masters.gradient)
        return sum_over_processes(total).item(), sum(row.length for row in rows)

    def train(
        self,
        learn: Callable[[], tuple[float, int]],
        validate: Callable[[], float | Mapping[str, float]],
    ) -> None:
        """Run the remaining steps; see `run_steps`. `validate` runs without gradients."""

        def evaluate() -> float | Mapping[str, float]:
            self.model.eval()
            with torch.no_grad():
                measured = validate()
            self.model.train()
            return measured

        self.model.train()
        run_steps(
            self._masters,
            self._optimisers,
            self._config,
            self.directory,
            self.step,
            learn,
            evaluate,
        )

    def save(self) -> None:
        """Write the adapter into the run directory. Only rank 0 writes."""
        if is_first():
            save_adapter(self._adapted, self._config.base, self.directory.path / "adapter")


# --- the adapter -------------------------------------------------------------------------------


class Masters(nn.Module):
    """The fp32 copy of an adapter's weights, one behind the other: what is moved and saved.

    With gradients of fp32 too, as a sum of many rows in bf16 would lose the small ones.
    """

    def __init__(self, adapter: Sequence[nn.Parameter]) -> None:
        """Copy the weights of an adapter."""
        super().__init__()
        self._adapter = tuple(adapter)
        self._sizes = [weight.numel() for weight in adapter]
        self.flat = nn.Parameter(torch.cat([weight.detach().float().ravel() for weight in adapter]))

    @property
    def gradient(self) -> Tensor:
        """What was collected since `forget`."""
        assert self.flat.grad is not None
        return self.flat.grad

    def forget(self) -> None:
        """Begin a sum of gradients."""
        self.flat.grad = torch.zeros_like(self.flat)

    def collect(self) -> None:
        """Add the adapter's gradients to the sum; the adapter has none then."""
        for weight, part in zip(self._adapter, self.gradient.split(self._sizes), strict=True):
            if weight.grad is not None:
                part += weight.grad.ravel()
                weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Give the adapter its values, rounded to its own type."""
        for weight, part in zip(self._adapter, self.flat.split(self._sizes), strict=True):
            weight.copy_(part.view_as(weight))


def _freeze_below(model: Qwen2_5_VLForConditionalGeneration, first_layer: int) -> None:
    """Freeze the adapter in the layers below `first_layer`."""
    layers = model.model.language_model.layers
    if first_layer >= len(layers):
        raise ConfigError(f"first_layer: {first_layer}, but the base has {len(layers)} layers")
    for layer in layers[:first_layer]:
        layer.requires_grad_(False)


def fastest_precision(device: str) -> Weights:
    """Return the precision in which a device multiplies matrices fastest.

    That is bf16, except on a CPU without instructions for it.
    """
    if device != "cpu":
        return "bf16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict[str, Any])()  # torch 2.11 has none
    names = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
    return "bf16" if any(capabilities.get(name) for name in names) else "fp32"


def load_small_base(base: Path, precision: Weights) -> Qwen2_5_VLForConditionalGeneration:
    """Load a Qwen2.5-VL on the CPU.

    Raises:
        CheckpointError: It cannot be loaded, or is another model.
    """
    model = load_base(base, precision, precision, None, torch.device("cpu"))
    if not isinstance(model, Qwen2_5_VLForConditionalGeneration):
        raise CheckpointError(f"{base}: a {type(model).__name__}; only a Qwen2.5-VL is trained so")
    return model


def check_folders(config: AdapterConfig) -> None:
    """Check the base, and that `start` is an adapter of the shape `lora`.

    Raises:
        CheckpointError: The base is neither a folder nor a Hub ID.
        ConfigError: `start` is no adapter, or of another shape.
    """
    check_base(config.base)
    if config.start is not None:
        _check_shape(config.start, config.lora)


def _check_shape(start: Path, lora: LoraShape) -> None:
    if not (start / "adapter_config.json").is_file():
        raise ConfigError(f"start: {start} holds no adapter_config.json")
    settings: Any = PeftConfig.from_pretrained(str(start))
    shape = (getattr(settings, "r", None), getattr(settings, "lora_alpha", None))
    if shape != (lora.rank, lora.alpha):
        raise ConfigError(
            f"start: {start} has rank and alpha {shape[0]} and {shape[1]}, but lora asks for "
            f"{lora.rank} and {lora.alpha}; set those"
        )


def add_adapter(model: Any, lora: LoraShape, base: Path, start: Path | None = None) -> PeftModel:
    """Put an adapter in a model, in the type of its weights; nothing else can be trained then.

    Args:
        model: The base; its modules are replaced.
        lora: Shape of the adapter.
        base: Folder of the base, for errors.
        start: Adapter to start from; None starts from one that changes nothing.

    Raises:
        CheckpointError: `start` has other weights.
    """
    shape = lora_config(model, lora, freeze_vision=True)
    adapted = get_peft_model(model, shape, autocast_adapter_dtype=False)
    assert isinstance(adapted, PeftModel)
    if start is not None:
        weights = load_peft_weights(str(start), device="cpu")
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        stored, required = (
            {(name, tensor.shape) for name, tensor in tensors.items()}
            for tensors in (weights, expected)
        )
        if different := sorted(stored ^ required):
            raise CheckpointError(
                f"{start} does not fit {base}: {len(different)} weights differ, first "
                f"{different[0][0]}; name the base that it was trained on"
            )
        set_peft_model_state_dict(adapted, weights)
    return adapted


def save_adapter(adapted: PeftModel, base: Path, folder: Path) -> None:
    """Write the adapter in bf16; it names its base by the folder's name alone, which is the same everywhere."""
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path = base.name
    weights = {name: w.bfloat16() for name, w in adapted.state_dict().items() if "lora_" in name}
    adapted.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's form of a card, not filled in


# --- the rows of a step --------------------------------------------------------------------------


def steps_of(dialogues: Sequence[T], size: int, seed: int, skip: int) -> Iterator[list[T]]:
    """Yield the dialogues of each step, for ever, from step `skip` on; each pass has an order of its own."""
    size = min(size, len(dialogues))
    for number in itertools.count():
        order = np.random.default_rng([seed, number]).permutation(len(dialogues)).tolist()
        for start in range(0, len(order) - size + 1, size):
            if skip:
                skip -= 1
                continue
            yield [dialogues[place] for place in order[start : start + size]]


def shared_out(lengths: Sequence[int], processes: int) -> list[list[int]]:
    """Return which items each process takes, so that all have about as much to do.

    The longest go first, one to each process there and back again.

    >>> shared_out([5, 9, 1, 7, 3], 2)
    [[1, 4, 2], [3, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    there_and_back = itertools.cycle([*range(processes), *reversed(range(processes))])
    shares: list[list[int]] = [[] for _ in range(processes)]
    for item, taker in zip(order, there_and_back, strict=False):
        shares[taker].append(item)
    return shares


def own_rows(rows: Sequence[R]) -> list[R]:
    """Return the rows that are this process's."""
    shares = shared_out([row.length for row in rows], process_count())
    return [rows[item] for item in shares[process_rank()]]


def padded_batches(rows: Sequence[R], most: int) -> Iterator[list[R]]:
    """Yield rows in batches of similar length, the longest first; each row is in one batch.

    Args:
        rows: In any order.
        most: Maximum number of tokens of a batch when its rows are padded to the longest; a longer row is a
            batch by itself.
    """
    batch: list[R] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if batch and batch[0].length * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def split_to_fit(
    samples: Sequence[T], row_of: Callable[[Sequence[T]], R], longest: int
) -> tuple[list[R], int]:
    """Return the row of some samples, or several rows of fewer samples if it is too long.

    Args:
        samples: At least one.
        row_of: Makes a row of samples.
        longest: Maximum number of tokens of a row.

    Returns:
        The rows in the order of the samples, and how many samples are too long by themselves and left out.
    """
    row = row_of(samples)
    if row.length <= longest:
        return [row], 0
    half = len(samples) // 2
    if not half:
        return [], 1
    first, first_dropped = split_to_fit(samples[:half], row_of, longest)
    second, second_dropped = split_to_fit(samples[half:], row_of, longest)
    return first + second, first_dropped + second_dropped
