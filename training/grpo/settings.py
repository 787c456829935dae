"""Settings of GRPO with the paper's words, and the checks that need no model.

The paper: "We set the learning rate to 1 x 10^-6, the batch size to 32, the group size for GRPO to 4,
the alpha to 0.5, and the beta to 5." Whatever it does not state is a choice.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.judgement import Form
from training.finetune.base_model import Weights
from training.finetune.trl_common import WeightTraining
from training.grpo.advantage import STD_FLOOR, Scale
from training.grpo.vllm import VllmRollouts

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
Rollouts = Literal["shared", "plain", "vllm"]
Update = Literal["shared", "plain"]


class RewardSettings(FrozenModel):
    """`[reward]`: the value of a judgement. Paper: +1 or -1 for each step, the reply and the format."""

    form: Form = "hard"
    """`hard` is the paper's +1 and -1; `soft` is 2p - 1, which leaves fewer groups with equal
    rewards."""
    max_failed_share: float = Field(default=0.1, ge=0, le=1)
    """Largest share of complete turns whose judgement may fail, torch errors included. Above it the
    run ends with an error; the last checkpoint stays."""
    give_up_after: int = Field(default=3, ge=1)
    """Window of `max_failed_share`: the latest generations that had a complete turn."""


class GRPOSettings(WeightTraining):
    """`[training]`: one run of GRPO."""

    # --- named by the paper ----------------------------------------------------------------------

    lr: float = Field(default=1e-6, gt=0)
    """Paper: "the learning rate to 1 x 10^-6"."""
    batch_size: int = Field(default=8, gt=0)
    """Completions per forward pass and process."""
    accumulation: int = Field(default=4, gt=0)
    """Forward passes per optimiser step. A step takes batch_size x accumulation x processes
    completions. Paper: "the batch size to 32", without saying whether of completions or prompts. The
    defaults give 32 completions of 8 prompts."""
    group_size: int = Field(default=4, ge=2)
    """G, the completions of one prompt. Paper: "the group size for GRPO to 4"."""

    # --- choices ---------------------------------------------------------------------------------

    adapter: Path | None = None
    """A LoRA adapter on the base to train further, such as one from SFT. `lora` starts a new one
    instead."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the prompts."""
    max_steps: int = -1
    """Optimiser steps; -1 derives them from `epochs`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the initial policy. Eq. 2 has no such term."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Clip range of the ratio around 1. Eq. 2 clips; the paper names no range."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper clip range, if it differs; see DAPO."""
    loss: LossType = "grpo"
    """How to aggregate token losses; `grpo` averages over each completion, then over completions."""
    ratio: Literal["token", "sequence"] = "token"
    """The unit of the probability ratio. Eq. 2 prints the ratio of a whole output. `sequence` is
    GSPO's, the geometric mean over the tokens. Where every completion is used once (`iterations` and
    `generation_steps` are 1) all ratios are 1 and both give the same gradient."""
    scale: Scale = "group"
    """The divisor of advantages. Eq. 3: the standard deviation of the group."""
    std_floor: float = Field(default=STD_FLOOR, gt=0)
    """Smallest divisor; see `training.grpo.advantage`."""
    iterations: int = Field(default=1, ge=1)
    """How often each completion is used (mu of GRPO)."""
    generation_steps: int = Field(default=1, ge=1)
    """Optimiser steps that the completions of one generation feed."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the mean entropy in the objective. It can help where a policy collapses to identical
    groups, which reweighting cannot detect."""
    update: Update = "plain"
    """`shared` reads a prompt once for its completions in the same forward pass
    (`training.grpo.shared_update`), so set `batch_size` to a whole generation; Qwen2.5-VL, one process,
    no gradient checkpointing. `plain` is trl's own way."""
    mask_unfinished: bool = False
    """Exclude truncated completions from the loss. They get the reward of an incomplete turn, so
    without masking a policy learns to finish."""

    # --- sampling --------------------------------------------------------------------------------

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1, completions are no longer sampled from the trained policy."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Longest completion."""
    longest_prompt: int | None = Field(default=None, gt=0)
    """In tokens, picture tokens included. Longer prompts are skipped and counted, as are those that
    leave no room for a completion; truncation could cut a picture in two."""
    rollouts: Rollouts = "shared"
    """`shared` reads a prompt once for its group and samples each completion from its own seed;
    `plain` is trl's own way, which reads the prompt for each completion; `vllm` uses vLLM, see
    `training.grpo.vllm`."""
    rollout_weights: Weights | None = None
    """Precision of a second set of weights that generates, with an adapter merged
    (`training.grpo.rollout_model`): more memory, less time. None generates with the trained weights."""
    vllm: VllmRollouts | None = None
    """Where vLLM runs; None with `rollouts = "vllm"` runs it in the training processes."""

    # --- checkpoints and logs --------------------------------------------------------------------

    save_steps: int = Field(default=50, gt=0)
    """Steps between checkpoints. A run can resume from each, so it must be a multiple of
    `generation_steps` x `iterations`."""
    log_steps: int = Field(default=1, gt=0)
    rollouts_kept: int = Field(default=1, ge=0)
    """Groups of each generation to write to rollouts.jsonl for inspection."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between evaluations on the held-out prompts; 0 never evaluates."""
    report_to: tuple[Literal["tensorboard", "trackio"], ...] = ()
    """Further destinations of the metrics beside metrics.jsonl."""

    @property
    def trains_adapter(self) -> bool:
        """Whether only a LoRA adapter is trained."""
        return self.lora is not None or self.adapter is not None

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.lora is not None and self.adapter is not None:
            raise ValueError(
                "`adapter` continues an adapter and [training.lora] starts a new one; set only one of them"
            )
        return self

    @model_validator(mode="after")
    def _vllm_is_used(self) -> Self:
        if self.vllm is not None and self.rollouts != "vllm":
            raise ValueError(
                f"a [training.vllm] table needs rollouts = 'vllm', not '{self.rollouts}'"
            )
        return self

    @model_validator(mode="after")
    def _rollout_model_fits(self) -> Self:
        if self.rollout_weights is None:
            return self
        if self.rollouts != "shared":
            raise ValueError(f"rollout_weights needs rollouts = 'shared', not '{self.rollouts}'")
        if self.quantize:
            raise ValueError(
                "rollout_weights cannot merge an adapter into 4-bit weights; remove it"
            )
        return self

    @model_validator(mode="after")
    def _shared_update_recomputes_nothing(self) -> Self:
        if self.update == "shared" and self.gradient_checkpointing:
            raise ValueError(
                "update = 'shared' cannot recompute activations: set update = 'plain' or "
                "gradient_checkpointing = false"
            )
        return self

    @property
    def period(self) -> int:
        """Optimiser steps per generation."""
        return self.generation_steps * self.iterations

    def check_batches(self, processes: int) -> None:
        """Check that groups stay whole and that a run can resume from each checkpoint.

        Raises:
            ConfigError: They do not; the message names numbers that fit.
        """
        if self.update == "shared" and processes > 1:
            raise ConfigError(
                f"training.update = 'shared' supports one process, not {processes}; use 'plain'"
            )
        generation = self.batch_size * self.accumulation * processes * self.generation_steps
        product = (
            f"batch_size {self.batch_size} x accumulation {self.accumulation} x "
            f"generation_steps {self.generation_steps} x {processes} processes = {generation}"
        )
        if generation % self.group_size:
            raise ConfigError(
                f"a generation of {product} completions splits a group of {self.group_size}; it must "
                f"be a multiple of group_size"
            )
        if self.save_steps % self.period:
            above = -(-self.save_steps // self.period) * self.period
            raise ConfigError(
                f"save_steps = {self.save_steps} falls between generations, which come every "
                f"{self.period} steps (generation_steps x iterations), so a run could not resume "
                f"with the same completions; use {above}"
            )
        if self.evaluate_every and (self.batch_size * processes) % self.group_size:
            raise ConfigError(
                f"evaluate_every needs whole groups in a forward pass: batch_size "
                f"{self.batch_size} x {processes} processes is not a multiple of group_size "
                f"{self.group_size}"
            )
