"""Writes the files of a checkpoint or adapter to ship: `python -m training export <config.toml>`.

Weights are stored in bf16 as safetensors; those of a packed checkpoint are copied. Other files of
the run (optimiser state, metrics) are not exported, and local paths are removed from the configs.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from compeer_core.backends.transformers_.packed_weights import PACKED
from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from training.stages import refuse_resume

CARD_SUFFIX = ".md"
"""Model cards in the output folder are not deleted."""

_COPIED = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


class Config(FrozenModel):
    """`[export]`: what to export, and where to."""

    source: Path
    """Folder of a checkpoint (`model.safetensors`) or an adapter (`adapter_model.safetensors`)."""
    output: Path
    """Folder for the shipped files."""
    base: str = ""
    """For an adapter: the path of its base, relative to the output folder."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Write the folder to ship.

    Raises:
        ConfigError: The source has no weights, or an adapter's `base` is not set.
    """
    refuse_resume(resume, "an export cannot be resumed")
    packed = config.source / PACKED
    if packed.is_file():
        if not dry_run:
            _clear(config.output)
            for name in (*_COPIED, PACKED):
                shutil.copyfile(config.source / name, config.output / name)
        return
    adapter = config.source / "adapter_model.safetensors"
    checkpoint = config.source / "model.safetensors"
    index = config.source / f"{checkpoint.name}.index.json"
    weights = adapter if adapter.is_file() else checkpoint
    if not weights.is_file() and not index.is_file():
        raise ConfigError(f"{config.source}: contains neither {checkpoint.name} nor {adapter.name}")
    if weights is adapter and not config.base:
        raise ConfigError("base: an adapter needs the path of its base, relative to `output`")
    tensors = {
        name: tensor.to(getattr(torch, config.dtype)).contiguous()
        for file in ([weights] if weights.is_file() else _shards(index))
        for name, tensor in load_file(file).items()
    }
    if dry_run:
        return
    _clear(config.output)
    if weights is adapter:
        settings = _read(config.source / "adapter_config.json")
        settings["base_model_name_or_path"] = config.base
        _write(config.output / "adapter_config.json", settings)
    else:
        for name in _COPIED:
            if (config.source / name).is_file():
                shutil.copyfile(config.source / name, config.output / name)
        settings = _read(config.source / "config.json")
        settings.pop("_name_or_path", None)
        for part in (
            settings,
            *(settings.get(key, {}) for key in ("text_config", "vision_config")),
        ):
            if "dtype" in part:
                part["dtype"] = config.dtype
        _write(config.output / "config.json", settings)
    if weights is adapter:
        save_file(tensors, config.output / weights.name, metadata={"format": "pt"})
    else:
        save_torch_state_dict(tensors, config.output)  # several files above 5 GB


def _clear(folder: Path) -> None:
    """Create a folder, or delete all its files except model cards."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.suffix != CARD_SUFFIX:
            file.unlink()


def _shards(index: Path) -> list[Path]:
    return [index.parent / name for name in sorted(set(_read(index)["weight_map"].values()))]


def _read(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
