"""Merges a LoRA adapter into its base model: `python -m training merge <config.toml>`.

The next stage can then start from a single checkpoint, for example GRPO with an adapter of its own
on a merged SFT model. An adapter trained on 4-bit weights is merged into the unquantised ones, so
the result differs from the trained model by the quantisation error.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.model_pool import TIED_WARNING
from training.finetune.base_model import Weights, check_base, load_base
from training.finetune.trl_common import open_processor
from training.stages import refuse_resume

ADAPTER = "adapter_config.json"


class Config(FrozenModel):
    """`[merge]`: base, adapter and output."""

    base: Path | str
    """The model that the adapter was trained on: checkpoint folder or Hub ID."""
    adapter: Path
    """Folder of the adapter."""
    output: Path
    """Folder for the checkpoint, with tokenizer and image processor."""
    weights: Weights = "bf16"
    """Precision of the computation and of the stored weights."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the merged checkpoint; a dry run checks that base and adapter exist.

    Raises:
        ConfigError: There is no adapter, the output folder is not empty, or the adapter changes tied
            embeddings.
        CheckpointError: The base cannot be loaded, or the adapter does not fit it.
    """
    refuse_resume(resume, "a merge cannot be resumed")
    check_base(config.base)
    if not (config.adapter / ADAPTER).is_file():
        raise ConfigError(f"adapter: {config.adapter} contains no {ADAPTER}")
    check_output(config.output)
    if dry_run:
        return
    processor = open_processor(config.base)
    base = load_base(config.base, config.weights, config.weights, None, torch.device("cpu"))
    adapted: Any = _load_adapter(base, config)
    _check_embeddings(adapted, config)
    merged = adapted.merge_and_unload()
    with atomic_folder(config.output) as folder:
        merged.save_pretrained(folder)
        processor.save_pretrained(folder)


def check_output(folder: Path) -> None:
    """Refuse an output folder that already has content.

    Raises:
        ConfigError: The folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: the folder is not empty; choose another output")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` once the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as parent:
        folder = Path(parent) / "new"
        yield folder
        folder.replace(path)


def _load_adapter(base: PreTrainedModel, config: Config) -> PeftModel:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=TIED_WARNING
            )  # `_check_embeddings` refuses it
            adapted = PeftModel.from_pretrained(base, config.adapter)
        stored = load_peft_weights(str(config.adapter), device="cpu")
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        if different := sorted(expected.keys() ^ stored.keys()):
            # peft only warns, and leaves missing weights randomly initialised
            raise ValueError(f"{len(different)} weights differ, the first is {different[0]}")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{config.adapter} does not fit {config.base} ({reason}); set `base` to the model it was "
            "trained on"
        ) from error
    return adapted


def _check_embeddings(adapted: PeftModel, config: Config) -> None:
    model: Any = adapted.get_base_model()
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    is_adapted = any(isinstance(layer, BaseTunerLayer) for layer in embeddings)
    if is_adapted and model.config.get_text_config().tie_word_embeddings:
        raise ConfigError(
            f"{config.adapter} adapts the embeddings, which {config.base} ties: merging would change "
            "the shared matrix twice; use the adapter unmerged"
        )
