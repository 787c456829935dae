"""trl's GRPOTrainer with a few overrides for what the paper needs.

`_calculate_rewards`
    Calls our reward function. trl's own method would log whole conversations where a reward is
    missing.
`_generate_and_score_completions`
    Replaces trl's advantages by ours. They are equal where a group's standard deviation is above the
    floor (trl adds 1e-4 to it; see `training.grpo.advantage`).
`_tokenize_prompts`
    Represents "no pictures" by an empty list. trl uses None, which image processors reject where
    other prompts of the batch have pictures.
`_generate_single_turn`
    With `rollouts = "shared"`: reads a prompt once for its group, by the rollout model if there is
    one (`rollout_weights`).
`_get_per_token_logps_and_entropies`
    With `update = "shared"`: does the same in the update.

trl does the rest: the loss of Eq. 2, the old policy's log-probabilities, accumulation, distribution.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather
from peft import PeftModel
from transformers import GenerationConfig
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.grpo_trainer import GRPOTrainer

from compeer_core.backends.protocol import Sampling
from compeer_core.backends.transformers_.batch_generation import generate_encoded
from compeer_core.backends.transformers_.model import ChatModel
from compeer_core.backends.transformers_.owner_thread import OwnerThread
from compeer_core.errors import BackendError
from training.common.processes import fail_together
from training.grpo.advantage import batch_advantages
from training.grpo.prompts import PromptBook
from training.grpo.reward import GroupReward
from training.grpo.rollout_log import RolloutLog
from training.grpo.rollout_model import RolloutModel
from training.grpo.settings import GRPOSettings
from training.grpo.shared_update import PromptPictures, completion_logprobs

_PICTURE_FIELDS = frozenset(
    {"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "mm_token_type_ids"}
)


class GroupTrainer(GRPOTrainer):
    """GRPO on the histories of CER rows."""

    def __init__(
        self,
        *,
        book: PromptBook,
        reward: GroupReward,
        settings: GRPOSettings,
        rollout_log: RolloutLog | None = None,
        rollout_model: RolloutModel | None = None,
        **options: Any,
    ) -> None:
        """Take what trl does not know.

        Without a rollout model the trained weights generate.
        """
        self._book = book
        self._reward = reward
        self._settings = settings
        self._rollout_log = rollout_log
        self._rollout_model = rollout_model
        self._rows: list[int] = []
        self._rewards: torch.Tensor | None = None
        self._chat: ChatModel | None = None
        super().__init__(reward_funcs=[reward], **options)
        assert self.model is not None
        self.model.register_forward_pre_hook(_drop_empty_pictures, with_kwargs=True)

    # --- rewards and advantages ------------------------------------------------------------------

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """Return the rewards of all processes, shape (completions, 1), NaN where unknown."""
        rewards = self._reward(
            completions=completions,
            row=[example["row"] for example in inputs],
            log_metric=self._log_metric,
        )
        known = [[torch.nan if reward is None else reward] for reward in rewards]
        self._rewards = gather(
            torch.tensor(known, dtype=torch.float32, device=self.accelerator.device)
        )
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._rows = [int(example["row"]) for example in inputs]
        output = super()._generate_and_score_completions(inputs)
        assert self._rewards is not None
        advantages = batch_advantages(
            self._rewards[:, 0].double().cpu().numpy(),
            self._settings.group_size,
            self._settings.scale,
            self._settings.std_floor,
        )
        first = self.accelerator.process_index * len(inputs)
        own = advantages[first : first + len(inputs)]
        output["advantages"] = torch.tensor(own).to(output["advantages"])
        if self._rollout_log is not None and self._is_training:
            self._rollout_log.write(
                self.state.global_step + 1, self._reward.last, own.tolist(), self._book.records
            )
        return output

    @property
    def _is_training(self) -> bool:
        assert self.model is not None
        return self.model.training

    # --- sampling --------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: Any) -> Any:
        ids, images, fields = super()._tokenize_prompts(prompts)
        return ids, images and [pictures or [] for pictures in images], fields

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        start = time.perf_counter()
        with fail_together():
            result: Any
            if self._settings.rollouts == "shared":
                result = (self._generate_shared(prompt_ids), None)
            else:
                if self.is_fsdp_enabled:
                    run_equally_often(self.accelerator.unwrap_model(self.model))
                result = super()._generate_single_turn(
                    prompt_ids, images, multimodal_fields, num_generations, has_tool_images
                )
        self._log_metric("seconds/rollouts", time.perf_counter() - start)
        return result

    def _generate_shared(self, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Generate a completion per row; adjacent rows of one prompt share its cache."""
        runs = _runs(self._rows)
        # Draw seeds first: preparing the weights for generation ends `_is_training`.
        seeds = [[self._seed(index) for index in range(start, end)] for start, end in runs]
        completions: list[list[int]] = []
        with self._for_generation() as chat:
            prompts = []
            for start, _ in runs:
                encoded = chat.encode(self._book.messages(self._rows[start]))
                if encoded.ids != tuple(prompt_ids[start]):
                    raise BackendError(
                        f"{chat.name}: the prompt to sample from differs from the one to train on; "
                        "use training.rollouts = 'plain'"
                    )
                prompts.append(encoded)
            turns = generate_encoded(
                chat,
                None,
                prompts,
                seeds,
                Sampling(
                    temperature=self._settings.temperature,
                    top_p=self._settings.top_p,
                    max_new_tokens=self._settings.max_new_tokens,
                ),
                threading.Event(),
            )
        for group in turns:
            completions += [list(turn.ids) for turn in group]
        return completions

    def _seed(self, index: int) -> int:
        """Return the seed of a completion, which does not depend on the number of processes.

        In training it depends on the run's seed, the step, and the index among the completions of
        all processes; for held-out prompts it is the same at every evaluation.
        """
        global_index = self.accelerator.process_index * len(self._rows) + index
        if self._is_training:
            state = (0, self.args.seed, self.state.global_step, global_index)
        else:
            member = global_index % self._settings.group_size
            state = (1, self.args.seed, self._rows[index], member)
        return int(np.random.SeedSequence(state).generate_state(1, np.uint64)[0])

    @contextmanager
    def _for_generation(self) -> Iterator[ChatModel]:
        """Provide the current weights as a generating model, then restore what that changed."""
        arguments: Any = self.args
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=arguments.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=arguments.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            if self._rollout_model is not None:
                self._rollout_model.update_from(model)
                yield self._chat_model(self._rollout_model.model)
                return
            inner = model.get_base_model() if isinstance(model, PeftModel) else model
            was_training, generation = model.training, inner.generation_config
            modules = [module for module in inner.modules() if "rope_deltas" in vars(module)]
            offsets = [module.rope_deltas for module in modules]
            model.eval()
            try:
                # In the precision of the update, so the sampled policy is the trained one.
                with self.accelerator.autocast():
                    yield self._chat_model(inner)
            finally:
                model.train(was_training)
                inner.generation_config = generation
                for module, offset in zip(modules, offsets, strict=True):
                    module.rope_deltas = offset

    def _chat_model(self, model: Any) -> ChatModel:
        """Wrap these weights."""
        if self._chat is None:
            name = str(getattr(model.config, "_name_or_path", "") or "the policy")
            owner = OwnerThread("unused")  # everything runs on the trainer's thread
            self._chat = ChatModel(name, model, self.processing_class, owner)
        self._chat.model = model
        # The checkpoint's own sampling defaults would be merged into ours.
        model.generation_config = GenerationConfig()
        return self._chat

    # --- the update ------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *positional: Any,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        num_images: Sequence[int] | None = None,
        **named: Any,
    ) -> Any:
        if self._settings.update == "plain":
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                *positional,
                pixel_values=pixel_values,
                image_grid_thw=image_grid_thw,
                num_images=num_images,
                **named,
            )
        pictures = None
        if pixel_values is not None and image_grid_thw is not None and num_images is not None:
            pictures = PromptPictures(pixel_values, image_grid_thw, num_images)
        policy: Any = self.accelerator.unwrap_model(model)
        policy = policy.get_base_model() if isinstance(policy, PeftModel) else policy
        with self.accelerator.autocast():
            logprobs, entropies = completion_logprobs(
                policy,
                input_ids,
                attention_mask,
                logits_to_keep,
                pictures,
                self._settings.temperature,
            )
        return logprobs, entropies, None  # the third is the auxiliary loss of a mixture of experts


def _drop_empty_pictures(
    module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove picture fields that hold no picture.

    trl splits a generation into passes. A pass without pictures gets an empty tensor if another pass
    has some, which image towers cannot read.
    """
    pixels = named.get("pixel_values")
    if pixels is None or pixels.shape[0]:
        return arguments, named
    return arguments, {name: v for name, v in named.items() if name not in _PICTURE_FIELDS}


def run_equally_often(model: Any) -> None:
    """Make every process generate until all processes are done.

    FSDP gathers split weights from all processes in every forward pass, so a process that stopped
    early would leave the others waiting. transformers' `generate` recognises models that
    transformers itself split by this mark; accelerate 1.15, which splits ours, does not set it.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    inner._is_fsdp_managed_module = True


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and end of each run of adjacent rows of one prompt.

    Example:
        >>> _runs([7, 7, 3, 3, 3])
        [(0, 2), (2, 5)]
    """
    starts = [n for n, row in enumerate(rows) if n == 0 or row != rows[n - 1]]
    return list(zip(starts, [*starts[1:], len(rows)], strict=True))
