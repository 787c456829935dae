"""A LoRA adapter becomes part of its weights: `python -m training merge <config.toml>`.

What is trained next can then begin from one checkpoint: GRPO from an SFT that trained an adapter, with an
adapter of its own on top. An adapter that was trained on weights of 4 bits is merged into those that were
not quantised, so the result differs from what was trained by what quantising had changed.
"""

import warnings
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

ADAPTER = "adapter_config.json"


class Config(FrozenModel):
    """`[merge]`: what goes into what."""

    base: Path | str
    """Checkpoint, or name on the hub, that the adapter was trained on."""
    adapter: Path
    """Folder of the adapter."""
    output: Path
    """Folder that receives the checkpoint, with tokenizer and image processor."""
    weights: Weights = "bf16"
    """The precision to compute in and to store."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Merge and write; a dry run looks whether base and adapter are there.

    Raises:
        ConfigError: There is no adapter, there is something in the output folder, or the adapter
            moves embeddings that input and output share.
        CheckpointError: The base cannot be loaded, or the adapter is not for it.
    """
    if resume is not None:
        raise ConfigError("a merge cannot be resumed: begin it again")
    check_base(config.base)
    if not (config.adapter / ADAPTER).is_file():
        raise ConfigError(f"adapter: {config.adapter} holds no {ADAPTER}")
    if config.output.exists() and any(config.output.iterdir()):
        raise ConfigError(f"{config.output}: something is already there; choose another output")
    if dry_run:
        return
    processor = open_processor(config.base)
    base = load_base(config.base, config.weights, config.weights, None, torch.device("cpu"))
    adapted: Any = _adapted(base, config)
    _check_embeddings(adapted, config)
    merged = adapted.merge_and_unload()
    config.output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=config.output.parent) as folder:
        whole = Path(folder) / "model"
        merged.save_pretrained(whole)
        processor.save_pretrained(whole)
        whole.replace(config.output)


def _adapted(base: PreTrainedModel, config: Config) -> PeftModel:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=TIED_WARNING)  # refused, not warned of
            adapted = PeftModel.from_pretrained(base, config.adapter)
        given = load_peft_weights(str(config.adapter), device="cpu")
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        if different := sorted(expected.keys() ^ given.keys()):
            # peft would only warn, and leave what is missing as it was drawn
            raise ValueError(f"{len(different)} weights differ, first {different[0]}")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{config.adapter} does not fit {config.base} ({reason}); name the base that it was "
            "trained on"
        ) from error
    return adapted


def _check_embeddings(adapted: PeftModel, config: Config) -> None:
    model: Any = adapted.get_base_model()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    is_moved = any(isinstance(end, BaseTunerLayer) for end in ends)
    if is_moved and model.config.get_text_config().tie_word_embeddings:
        raise ConfigError(
            f"{config.adapter} moves the embeddings, and those of input and output are one matrix in "
            f"{config.base}: merging would move it twice; leave the adapter beside its base"
        )
