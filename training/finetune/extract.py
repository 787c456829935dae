"""What a training changed becomes a LoRA adapter: `python -m training extract <config.toml>`.

The way back from `training.finetune.merge`. A model whose weights were all trained differs from a near relative
by little, and by matrices with few large singular values; their best approximations of a given rank
(Eckart and Young 1936, https://doi.org/10.1007/BF02288367) are what an adapter holds. So several judges
are one checkpoint and an adapter each. What is left out is reported, and what it costs has to be measured:
the adapter is an approximation unless its rank is full.
"""

import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.model_pool import TIED_WARNING
from training.finetune.base_model import check_base, load_base

logger = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[extract]`: the difference of what from what."""

    base: Path | str
    """Checkpoint, or name on the hub, that the adapter will lie on."""
    tuned: Path | str
    """Checkpoint of the same architecture that base and adapter shall come near to."""
    output: Path
    """Folder that receives the adapter."""
    rank: int = Field(default=32, gt=0)
    """Of the adapter. Storage grows with it, and so does the likeness to `tuned`."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Take the difference apart and write the adapter; a dry run looks whether both are there.

    Both checkpoints and their difference are held in memory in 32 bits.

    Raises:
        ConfigError: There is something in the output folder, or the two do not differ.
        CheckpointError: One of them cannot be loaded, or they are not of one architecture.
    """
    if resume is not None:
        raise ConfigError("an extraction cannot be resumed: begin it again")
    for source in (config.base, config.tuned):
        check_base(source)
    if config.output.exists() and any(config.output.iterdir()):
        raise ConfigError(f"{config.output}: something is already there; choose another output")
    if dry_run:
        return
    base, tuned = (
        load_base(source, "fp32", "fp32", None, torch.device("cpu"))
        for source in (config.base, config.tuned)
    )
    _check_alike(base, tuned, config)
    adapted, kept = extracted(base, tuned, config.rank)
    logger.info(
        "an adapter of rank %d has %.1f %% of the squared difference", config.rank, 100 * kept
    )
    config.output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=config.output.parent) as folder:
        whole = Path(folder) / "adapter"
        adapted.save_pretrained(str(whole), save_embedding_layers=False)
        whole.replace(config.output)


@torch.no_grad()
def extracted(base: PreTrainedModel, tuned: PreTrainedModel, rank: int) -> tuple[PeftModel, float]:
    """Put an adapter on `base` that brings it as near to `tuned` as the rank allows.

    Linear layers and embeddings get LoRA; where the embeddings of input and output are one matrix,
    each of the two gets the same. Norms, biases and convolutions stay those of `base`.

    Args:
        base: Is wrapped, not copied.
        tuned: Of the same architecture.
        rank: Of every layer; a layer with a side that is no longer is met exactly.

    Returns:
        The wrapped model, and its share of the sum of all squared differences, 0 to 1.

    Raises:
        ConfigError: No layer differs that could have an adapter.
    """
    # A matrix that two layers share stands here once, under the name of the first.
    differences = {
        name: theirs - ours
        for (name, ours), theirs in zip(base.named_parameters(), tuned.parameters(), strict=True)
    }
    total = sum(float(difference.square().sum()) for difference in differences.values())
    shared = {id(weight): name for name, weight in base.named_parameters()}
    layers = {
        name: source
        for name, layer in base.named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding)
        if differences[source := shared[id(layer.weight)]].any()
    }
    if not layers:
        raise ConfigError("no linear layer and no embedding differs: there is nothing to extract")
    settings = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=sorted(layers), task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        # peft would tie the adapters of tied layers (`ensure_weight_tying`), but only those of the first
        # adapter of a model; without, it warns of merging, which `training.finetune.merge` refuses.
        warnings.filterwarnings("ignore", message=TIED_WARNING)
        adapted: Any = get_peft_model(base, settings)
    parts = {source: factors(differences[source], rank) for source in set(layers.values())}
    for name, source in layers.items():
        left, right = parts[source]
        layer = adapted.base_model.model.get_submodule(name)
        if isinstance(layer.get_base_layer(), nn.Embedding):
            layer.lora_embedding_A["default"].copy_(left.T)
            layer.lora_embedding_B["default"].copy_(right.T)
        else:
            layer.lora_A["default"].weight.copy_(right)
            layer.lora_B["default"].weight.copy_(left)
    kept = sum(float((left @ right).square().sum()) for left, right in parts.values())
    return adapted, kept / total


def factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return two matrices whose product is nearest to `matrix` among those of a rank.

    Args:
        matrix: Of shape (rows, columns).
        rank: If it is more than the smaller side, the factors are filled up with zeros.

    Returns:
        Of shapes (rows, rank) and (rank, columns). Each has the roots of the singular values, so that
        neither is much larger than the other when they are stored in few bits.
    """
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    roots = singular[:rank].sqrt()
    missing = rank - len(roots)
    first, second = left[:, :rank] * roots, roots[:, None] * right[:rank]
    return nn.functional.pad(first, (0, missing)), nn.functional.pad(second, (0, 0, 0, missing))


def _check_alike(base: PreTrainedModel, tuned: PreTrainedModel, config: Config) -> None:
    ours, theirs = (
        {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        for model in (base, tuned)
    )
    if different := sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    ):
        raise CheckpointError(
            f"{config.tuned} is not of the architecture of {config.base}: {len(different)} weights differ in "
            f"shape or name, first {different[0]}"
        )
