"""Approximates a fine-tuned model by a LoRA adapter: `python -m training extract <config.toml>`.

The inverse of `training.finetune.merge`. Weight differences after fine-tuning have few large
singular values, and the best approximation of a given rank (Eckart and Young 1936,
https://doi.org/10.1007/BF02288367) is a LoRA adapter. So several judges can share one checkpoint.
The log reports the share of the difference that the adapter represents; evaluate the result, since
the adapter is exact at full rank only.
"""

import logging
import warnings
from pathlib import Path
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
from training.finetune.merge import atomic_folder, check_output
from training.stages import refuse_resume

logger = logging.getLogger(__name__)


class Config(FrozenModel):
    """`[extract]`: two checkpoints and the rank of the adapter."""

    base: Path | str
    """Base of the adapter: checkpoint folder or Hub ID."""
    tuned: Path | str
    """Checkpoint of the same architecture that base plus adapter approximates."""
    output: Path
    """Folder for the adapter."""
    rank: int = Field(default=32, gt=0)
    """Rank of the adapter: a higher one is closer to `tuned` and larger."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the adapter; a dry run checks that both checkpoints exist.

    Both checkpoints and their difference are held in memory in fp32.

    Raises:
        ConfigError: The output folder is not empty, or the checkpoints are equal.
        CheckpointError: A checkpoint cannot be loaded, or the architectures differ.
    """
    refuse_resume(resume, "an extraction cannot be resumed")
    for source in (config.base, config.tuned):
        check_base(source)
    check_output(config.output)
    if dry_run:
        return
    base, tuned = (
        load_base(source, "fp32", "fp32", None, torch.device("cpu"))
        for source in (config.base, config.tuned)
    )
    _check_same_architecture(base, tuned, config)
    adapted, explained = extract_adapter(base, tuned, config.rank)
    logger.info("rank %d explains %.1f %% of the squared difference", config.rank, 100 * explained)
    with atomic_folder(config.output) as folder:
        adapted.save_pretrained(str(folder), save_embedding_layers=False)


@torch.no_grad()
def extract_adapter(
    base: PreTrainedModel, tuned: PreTrainedModel, rank: int
) -> tuple[PeftModel, float]:
    """Wrap `base` with the adapter of a given rank that approximates `tuned` best.

    Linear layers and embeddings get LoRA; tied embeddings get the same adapter on both sides. Norms,
    biases and convolutions stay those of `base`.

    Args:
        base: Wrapped, not copied.
        tuned: Model of the same architecture.
        rank: Rank in every layer. Layers with a dimension of at most `rank` are reproduced exactly.

    Returns:
        The wrapped model, and the share of the summed squared difference it represents, in [0, 1].

    Raises:
        ConfigError: No linear layer or embedding differs.
    """
    # named_parameters lists a tied matrix once, under the name of the first layer.
    differences = {
        name: after - before
        for (name, before), after in zip(base.named_parameters(), tuned.parameters(), strict=True)
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
        # peft warns about merging adapters of tied layers, which `training.finetune.merge` refuses.
        # Its remedy, `ensure_weight_tying`, works for the first adapter of a model only.
        warnings.filterwarnings("ignore", message=TIED_WARNING)
        adapted: Any = get_peft_model(base, settings)
    factors = {source: low_rank_factors(differences[source], rank) for source in {*layers.values()}}
    for name, source in layers.items():
        left, right = factors[source]
        layer = adapted.base_model.model.get_submodule(name)
        if isinstance(layer.get_base_layer(), nn.Embedding):
            layer.lora_embedding_A["default"].copy_(left.T)
            layer.lora_embedding_B["default"].copy_(right.T)
        else:
            layer.lora_A["default"].weight.copy_(right)
            layer.lora_B["default"].weight.copy_(left)
    explained = sum(float((left @ right).square().sum()) for left, right in factors.values())
    return adapted, explained / total


def low_rank_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of a matrix by one of a given rank.

    Args:
        matrix: Shape (rows, columns).
        rank: If it exceeds the smaller dimension, the factors are padded with zeros.

    Returns:
        Shapes (rows, rank) and (rank, columns). Both are scaled by the square roots of the singular
        values, so neither dominates when stored in low precision.
    """
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    roots = singular[:rank].sqrt()
    missing = rank - len(roots)
    first, second = left[:, :rank] * roots, roots[:, None] * right[:rank]
    return nn.functional.pad(first, (0, missing)), nn.functional.pad(second, (0, 0, 0, missing))


def _check_same_architecture(base: PreTrainedModel, tuned: PreTrainedModel, config: Config) -> None:
    before, after = (
        {(name, tuple(weight.shape)) for name, weight in model.named_parameters()}
        for model in (base, tuned)
    )
    if different := sorted({name for name, _ in before ^ after}):
        raise CheckpointError(
            f"{config.tuned} has another architecture than {config.base}: {len(different)} weights "
            f"differ in name or shape, the first is {different[0]}"
        )
