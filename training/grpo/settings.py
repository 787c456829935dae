"""Settings of GRPO, each with what the paper says about it, and the checks that need no model.

The paper: "We set the learning rate to 1 x 10^-6, the batch size to 32, the group size for GRPO to 4,
the alpha to 0.5, and the beta to 5." What it does not say is marked as a choice.
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
    """`[reward]`: what a judgement is worth. Paper: +1 or -1 for each step, the reply and the form."""

    form: Form = "hard"
    """`hard` is the paper's +1 and -1; `soft` is 2p - 1, which leaves fewer groups without a
    difference to learn from."""
    give_up_after: int = Field(default=3, ge=1)
    """After so many generations in a row of which the judge could score no complete turn, the run
    ends with an error: nothing is learnt without rewards. The last checkpoint stays."""


class GRPOSettings(WeightTraining):
    """`[training]`: one run of GRPO."""

    # --- what the paper names --------------------------------------------------------------------

    lr: float = Field(default=1e-6, gt=0)
    """Paper: "the learning rate to 1 x 10^-6"."""
    batch_size: int = Field(default=8, gt=0)
    """Completions per forward pass and process."""
    accumulation: int = Field(default=4, gt=0)
    """Forward passes per optimiser step. A step takes batch_size x accumulation x processes
    completions. Paper: "the batch size to 32"; whether it counts completions or prompts is not
    said. Here the defaults make 32 completions, which are 8 prompts."""
    group_size: int = Field(default=4, ge=2)
    """G, the completions of one prompt. Paper: "the group size for GRPO to 4"."""

    # --- choices ---------------------------------------------------------------------------------

    adapter: Path | None = None
    """A LoRA adapter on the base, such as the SFT stage leaves: it is trained further. `lora` begins
    a new one instead."""
    epochs: float = Field(default=1.0, gt=0)
    """How often each prompt comes."""
    max_steps: int = -1
    """Optimiser steps; -1 leaves it to `epochs`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the starting policy. Eq. 2 has no such term."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """How far a ratio may be from 1 before it is clipped. Eq. 2 clips; the paper names no range."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper range, if another; see DAPO."""
    loss: LossType = "grpo"
    """How losses of tokens are put together; `grpo` is the mean over a completion, then over
    completions."""
    ratio: Literal["token", "sequence"] = "token"
    """What a ratio of probabilities is taken of. Eq. 2 prints that of a whole output. `sequence` is
    GSPO's, its geometric mean over the tokens. Where every completion is used once (`iterations` and
    `generation_steps` are 1) all ratios are 1 and both have the same gradient."""
    scale: Scale = "group"
    """What advantages are divided by. Eq. 3: the standard deviation of the group."""
    std_floor: float = Field(default=STD_FLOOR, gt=0)
    """The least that is divided by; see `training.grpo.advantage`."""
    iterations: int = Field(default=1, ge=1)
    """How often each completion is used (mu of GRPO)."""
    generation_steps: int = Field(default=1, ge=1)
    """Optimiser steps that the completions of one generation feed."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the mean entropy, added to the objective: one cure where a policy collapses and
    reweighting cannot see it, because all of a group are alike."""
    update: Update = "plain"
    """`shared` reads a prompt once for those of its completions that are in the same forward pass
    (`training.grpo.shared_update`), so let `batch_size` hold a whole generation; Qwen2.5-VL, one
    process, no gradient checkpointing. `plain` is trl's own way."""
    mask_unfinished: bool = False
    """Leave completions that spent their budget out of the loss. Their reward is that of an
    incomplete turn, so without masking a policy learns to come to an end."""

    # --- sampling --------------------------------------------------------------------------------

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 the completions are no longer drawn from the policy that is trained."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Budget of a completion."""
    longest_prompt: int | None = Field(default=None, gt=0)
    """In tokens, those of pictures included; longer prompts are left out and counted, as are those
    that leave no room for a completion. Cutting one could cut a picture in two."""
    rollouts: Rollouts = "shared"
    """`shared` reads a prompt once for its whole group, and draws every completion from a seed of
    its own; `plain` is trl's own way, which reads it once for each; `vllm` leaves it to vLLM, see
    `training.grpo.vllm`."""
    rollout_weights: Weights | None = None
    """With it completions are written by a copy of the weights in this precision, an adapter merged
    into it (`training.grpo.rollout_model`): more memory, less time. None writes with the weights that
    are trained."""
    vllm: VllmRollouts | None = None
    """Where vLLM runs; None with `rollouts = "vllm"` is in the training processes."""

    # --- what is kept and watched ----------------------------------------------------------------

    save_steps: int = Field(default=50, gt=0)
    """A run can go on from each of them, so they must be a multiple of
    `generation_steps` x `iterations`."""
    log_steps: int = Field(default=1, gt=0)
    rollouts_kept: int = Field(default=1, ge=0)
    """Groups of each generation that are written to rollouts.jsonl, to be read by a person."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between two looks at the held-out prompts; 0 never looks."""
    report_to: tuple[Literal["tensorboard", "trackio"], ...] = ()
    """Where metrics go beside metrics.jsonl."""

    @property
    def trains_adapter(self) -> bool:
        """Whether a LoRA adapter is trained, and the weights below it stay."""
        return self.lora is not None or self.adapter is not None

    @model_validator(mode="after")
    def _one_adapter(self) -> Self:
        if self.lora is not None and self.adapter is not None:
            raise ValueError(
                "`adapter` is trained further as it is; a [training.lora] table would begin another"
            )
        return self

    @model_validator(mode="after")
    def _vllm_is_used(self) -> Self:
        if self.vllm is not None and self.rollouts != "vllm":
            raise ValueError(
                f"a [training.vllm] table belongs to rollouts = 'vllm', not '{self.rollouts}'"
            )
        return self

    @model_validator(mode="after")
    def _copy_can_be_made(self) -> Self:
        if self.rollout_weights is None:
            return self
        if self.rollouts != "shared":
            raise ValueError(
                f"rollout_weights belongs to rollouts = 'shared', not '{self.rollouts}'"
            )
        if self.quantize:
            raise ValueError(
                "rollout_weights cannot merge an adapter into weights of 4 bits; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _shared_update_recomputes_nothing(self) -> Self:
        if self.update == "shared" and self.gradient_checkpointing:
            raise ValueError(
                "update = 'shared' cannot recompute activations (gradient_checkpointing); use one "
                "of them"
            )
        return self

    @property
    def period(self) -> int:
        """Optimiser steps from one generation to the next."""
        return self.generation_steps * self.iterations

    def check_batches(self, processes: int) -> None:
        """See that groups stay whole and that a run can go on from each checkpoint.

        Raises:
            ConfigError: They do not; the message says which numbers would fit.
        """
        if self.update == "shared" and processes > 1:
            raise ConfigError(
                f"training.update = 'shared' is for one process, and these are {processes}; use 'plain'"
            )
        generation = self.batch_size * self.accumulation * processes * self.generation_steps
        told = (
            f"batch_size {self.batch_size} x accumulation {self.accumulation} x "
            f"generation_steps {self.generation_steps} x {processes} processes = {generation}"
        )
        if generation % self.group_size:
            raise ConfigError(
                f"a generation of {told} completions splits a group of {self.group_size}; it must "
                f"be a multiple of group_size"
            )
        if self.save_steps % self.period:
            above = -(-self.save_steps // self.period) * self.period
            raise ConfigError(
                f"save_steps = {self.save_steps} lies between two generations, which come every "
                f"{self.period} steps (generation_steps x iterations): a run could not go on from "
                f"there with the same completions. The next one that fits is {above}"
            )
        if self.evaluate_every and (self.batch_size * processes) % self.group_size:
            raise ConfigError(
                f"evaluate_every needs whole groups in a forward pass: batch_size "
                f"{self.batch_size} x {processes} processes is no multiple of group_size "
                f"{self.group_size}"
            )
