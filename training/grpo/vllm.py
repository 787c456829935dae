"""Rollouts by vLLM: what trl is told, and what is looked for before anything is loaded.

With `rollouts = "vllm"` trl sends prompts to vLLM and gives it the policy's weights after each step.

`colocate`
    vLLM runs in the training processes and takes `memory_share` of each GPU.
`server`
    vLLM runs on GPUs of its own, started beforehand:

    ```text
    VLLM_SERVER_DEV_MODE=1 vllm serve BASE --weight-transfer-config '{"backend": "nccl"}' \
        --logprobs-mode processed_logprobs --max-logprobs -1
    ```

vLLM computes probabilities a little otherwise than the policy's own forward pass. `correction` weighs
completions by the ratio of both and leaves out those where it is above 3, as trl does by default.

Completions are not drawn from seeds of ours: two runs of one config differ.
"""

import importlib.metadata
import re
from typing import Any, Literal

import torch
from pydantic import Field

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError

OLDEST, NEWEST = "0.22.0", "0.31.0"
"""What trl 1.16 supports; the extra `vllm` of pyproject.toml says the same."""

SERVE = (
    'VLLM_SERVER_DEV_MODE=1 vllm serve BASE --weight-transfer-config \'{"backend": "nccl"}\' '
    "--logprobs-mode processed_logprobs --max-logprobs -1"
)
"""How a server is started whose weights trl can set."""


class VllmRollouts(FrozenModel):
    """`[training.vllm]`: where vLLM runs and what it may take."""

    mode: Literal["colocate", "server"] = "colocate"
    """In the training processes, or a server of its own."""
    url: str = Field(default="http://localhost:8000", pattern=r"^https?://[^\s/]+")
    """Of the server."""
    timeout_seconds: float = Field(default=240.0, gt=0)
    """How long to wait for the server."""
    memory_share: float = Field(default=0.3, gt=0, lt=1)
    """Share of each GPU's memory, `colocate` only. Weights and cache must fit in it."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one copy of the weights, `colocate` only."""
    sleep: bool = False
    """Free vLLM's memory while the policy is updated, `colocate` only."""
    context: int | None = Field(default=None, gt=0)
    """Tokens of prompt and completion, `colocate` only; None is what the model can read, whose
    cache may not fit."""
    correction: bool = True
    """Weigh completions by how likely the policy finds them and vLLM found them."""


def vllm_arguments(settings: VllmRollouts) -> dict[str, Any]:
    """Return trl's arguments."""
    found: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": settings.mode,
        "vllm_importance_sampling_correction": settings.correction,
    }
    if settings.mode == "server":
        return {
            **found,
            "vllm_server_base_url": settings.url,
            "vllm_server_timeout": settings.timeout_seconds,
        }
    return {
        **found,
        "vllm_gpu_memory_utilization": settings.memory_share,
        "vllm_tensor_parallel_size": settings.tensor_parallel,
        "vllm_enable_sleep_mode": settings.sleep,
        "vllm_max_model_length": settings.context,
    }


def check_vllm(settings: VllmRollouts, processes: int, needed: int, quantize: str | None) -> None:
    """See that vLLM can be used.

    Args:
        settings: Where and how.
        processes: How many train together.
        needed: Tokens that a prompt and its completion may have; 0 where that is not known.
        quantize: How the policy's weights are held.

    Raises:
        ConfigError: It cannot; the message says what to do.
    """
    if quantize is not None:
        raise ConfigError(
            "training.rollouts = 'vllm' gives vLLM the policy's weights, and it cannot take those of "
            f"quantize = {quantize!r}; use 'shared', or leave quantize out"
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
            "training.rollouts = 'vllm' needs a CUDA device: weights are handed over from GPU to GPU"
        )


def _check_version() -> None:
    """See that vLLM is installed in a version that trl knows."""
    wanted = "`pip install 'compeer[vllm]'` brings one that fits"
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"training.rollouts = 'vllm': vLLM is not installed; {wanted}, or use 'shared'"
        ) from None
    fits = _numbers(OLDEST) <= _numbers(found) <= _numbers(NEWEST)
    if not fits:
        raise ConfigError(
            f"training.rollouts = 'vllm': trl supports vLLM {OLDEST} to {NEWEST}, and {found} is "
            f"installed; {wanted}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what marks it as a build or a candidate.

    Example:
        >>> _numbers("0.25.1rc2+cu129")
        (0, 25, 1)
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
