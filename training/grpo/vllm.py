"""Rollouts by vLLM: trl's arguments, and the checks before anything is loaded.

With `rollouts = "vllm"` trl sends prompts to vLLM and copies the policy's weights to it after each step.

`colocate`
    vLLM runs in the training processes and uses `memory_share` of each GPU.
`server`
    vLLM runs on its own GPUs. Start it first:

    ```text
    VLLM_SERVER_DEV_MODE=1 vllm serve BASE --weight-transfer-config '{"backend": "nccl"}' \
        --logprobs-mode processed_logprobs --max-logprobs -1
    ```

vLLM's probabilities differ slightly from those of the policy's own forward pass. `correction` weights
completions by the ratio of both and drops those where it exceeds 3, as trl does by default.

Completions are not sampled from our seeds, so two runs of one config differ.
"""

import importlib.metadata
import re
from typing import Any, Literal

import torch
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError

OLDEST, NEWEST = "0.22.0", "0.31.0"
"""Versions that trl 1.16 supports, as in the extra `vllm` of pyproject.toml."""


class VllmRollouts(FrozenModel):
    """`[training.vllm]`: where vLLM runs and what it may use."""

    mode: Literal["colocate", "server"] = "colocate"
    """In the training processes, or on a separate server."""
    url: str = Field(default="http://localhost:8000", pattern=r"^https?://[^\s/]+")
    """URL of the server."""
    timeout_seconds: float = Field(default=240.0, gt=0)
    """Time to wait for the server."""
    memory_share: float = Field(default=0.3, gt=0, lt=1)
    """Share of each GPU's memory, `colocate` only. Weights and cache must fit in it."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one copy of the weights, `colocate` only."""
    sleep: bool = False
    """Free vLLM's memory during updates of the policy, `colocate` only."""
    context: int | None = Field(default=None, gt=0)
    """Tokens of prompt and completion, `colocate` only; None is the model's context, whose cache may
    not fit."""
    correction: bool = True
    """Weight completions by the ratio of the policy's and vLLM's probabilities."""


def vllm_arguments(settings: VllmRollouts) -> dict[str, Any]:
    """Return trl's arguments."""
    common: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": settings.mode,
        "vllm_importance_sampling_correction": settings.correction,
    }
    if settings.mode == "server":
        return {
            **common,
            "vllm_server_base_url": settings.url,
            "vllm_server_timeout": settings.timeout_seconds,
        }
    return {
        **common,
        "vllm_gpu_memory_utilization": settings.memory_share,
        "vllm_tensor_parallel_size": settings.tensor_parallel,
        "vllm_enable_sleep_mode": settings.sleep,
        "vllm_max_model_length": settings.context,
    }


def check_vllm(settings: VllmRollouts, processes: int, needed: int, quantize: str | None) -> None:
    """Check that vLLM can be used.

    Args:
        settings: Where and how.
        processes: Number of training processes.
        needed: Most tokens of a prompt and its completion; 0 if unknown.
        quantize: Quantisation of the policy's weights.

    Raises:
        ConfigError: It cannot; the message says what to do.
    """
    if quantize is not None:
        raise ConfigError(
            "training.rollouts = 'vllm' copies the policy's weights to vLLM, which cannot take those of "
            f"quantize = {quantize!r}; use 'shared', or remove quantize"
        )
    if settings.mode == "colocate":
        if processes % settings.tensor_parallel:
            raise ConfigError(
                f"training.vllm.tensor_parallel = {settings.tensor_parallel} must divide the "
                f"{processes} processes"
            )
        if settings.context is not None and settings.context < needed:
            raise ConfigError(
                f"training.vllm.context = {settings.context} is less than the {needed} tokens of "
                "longest_prompt and max_new_tokens"
            )
    _check_version()
    if not torch.cuda.is_available():
        raise ConfigError(
            "training.rollouts = 'vllm' needs a CUDA device: weights are copied from GPU to GPU"
        )


def _check_version() -> None:
    """Check that an installed vLLM has a version that trl supports."""
    advice = "run `pip install 'compeer[vllm]'`"
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"training.rollouts = 'vllm': vLLM is not installed; {advice}, or use 'shared'"
        ) from None
    if not _numbers(OLDEST) <= _numbers(version) <= _numbers(NEWEST):
        raise ConfigError(
            f"training.rollouts = 'vllm': trl supports vLLM {OLDEST} to {NEWEST}, and {version} is "
            f"installed; {advice}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without build or candidate suffixes.

    Example:
        >>> _numbers("0.25.1rc2+cu129")
        (0, 25, 1)
    """
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
