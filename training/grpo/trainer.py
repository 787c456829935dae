"""trl's GRPOTrainer with what the paper needs and the library leaves open, in a few overrides.

`_calculate_rewards`
    Calls the one reward function. The library's own would write whole conversations to the log where
    a reward is missing.
`_generate_and_score_completions`
    Puts our advantages in the place of trl's: the same numbers where a group's standard deviation is
    above the floor (trl adds 1e-4 to it; see `training.grpo.advantage`).
`_tokenize_prompts`
    Says "no pictures" as an empty list. trl says None, which image processors refuse where other
    prompts of the batch have some.
`_generate_single_turn`
    With `rollouts = "shared"`: reads a prompt once for its group, and with `rollout_weights` has a
    copy of the weights do so.
`_get_per_token_logps_and_entropies`
    With `update = "shared"`: the same in the update.

The rest is trl's: the loss of Eq. 2, the old policy's probabilities, accumulation, distribution.
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

_OF_PICTURES = frozenset(
    {"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "mm_token_type_ids"}
)


class GroupTrainer(GRPOTrainer):
    """GRPO on histories."""

    def __init__(
        self,
        *,
        book: PromptBook,
        reward: GroupReward,
        settings: GRPOSettings,
        kept: RolloutLog | None = None,
        writer: RolloutModel | None = None,
        **options: Any,
    ) -> None:
        """Take what trl does not know.

        Args:
            book: What the numbers in the column `row` stand for.
            reward: The reward function.
            settings: How to train and to sample.
            kept: Where a sample of what was written goes.
            writer: What completions are written with; None is the weights that are trained.
            options: Those of trl's trainer.
        """
        self._book = book
        self._reward = reward
        self._settings = settings
        self._kept = kept
        self._writer = writer
        self._rows: list[int] = []
        self._rewards: torch.Tensor | None = None
        self._chat: ChatModel | None = None
        super().__init__(reward_funcs=[reward], **options)
        assert self.model is not None
        self.model.register_forward_pre_hook(_without_empty_pictures, with_kwargs=True)

    # --- rewards and advantages ------------------------------------------------------------------

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """Return the rewards of all processes, shape (completions, 1), NaN where unknown."""
        rewards = self._reward(
            completions=completions,
            row=[one["row"] for one in inputs],
            log_metric=self._log_metric,
        )
        known = [[torch.nan if reward is None else reward] for reward in rewards]
        self._rewards = gather(
            torch.tensor(known, dtype=torch.float32, device=self.accelerator.device)
        )
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._rows = [int(one["row"]) for one in inputs]
        output = super()._generate_and_score_completions(inputs)
        assert self._rewards is not None
        advantages = batch_advantages(
            self._rewards[:, 0].double().cpu().numpy(),
            self._settings.group_size,
            self._settings.scale,
            self._settings.std_floor,
        )
        begin = self.accelerator.process_index * len(inputs)
        own = advantages[begin : begin + len(inputs)]
        output["advantages"] = torch.tensor(own).to(output["advantages"])
        if self._kept is not None and self._is_training:
            self._kept.write(
                self.state.global_step + 1, self._reward.last, own.tolist(), self._book.histories
            )
        return output

    @property
    def _is_training(self) -> bool:
        assert self.model is not None
        return self.model.training

    # --- sampling --------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: Any) -> Any:
        ids, images, fields = super()._tokenize_prompts(prompts)
        return ids, images and [of_prompt or [] for of_prompt in images], fields

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        begun = time.perf_counter()
        with fail_together():
            if self._settings.rollouts == "shared":
                ids: Any = self._written(prompt_ids)
                found: Any = (ids, None)
            else:
                if self.is_fsdp_enabled:
                    run_equally_often(self.accelerator.unwrap_model(self.model))
                found = super()._generate_single_turn(
                    prompt_ids, images, multimodal_fields, num_generations, has_tool_images
                )
        self._log_metric("seconds/rollouts", time.perf_counter() - begun)
        return found

    def _written(self, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Write a completion for each row; rows of one prompt that stand together share its cache."""
        runs = _runs(self._rows)
        # Before the weights are made ready to write, which ends `_is_training`.
        seeds = [[self._seed(place) for place in range(begin, end)] for begin, end in runs]
        written: list[list[int]] = []
        with self._for_generation() as chat:
            prompts = []
            for begin, _ in runs:
                encoded = chat.encode(self._book.messages(self._rows[begin]))
                if encoded.ids != tuple(prompt_ids[begin]):
                    raise BackendError(
                        f"{chat.name}: the prompt that would be sampled from is not the one that "
                        "would be trained on; use training.rollouts = 'plain'"
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
        for of_prompt in turns:
            written += [list(turn.ids) for turn in of_prompt]
        return written

    def _seed(self, place: int) -> int:
        """Return what a completion is drawn from, the same however many processes there are.

        In training: the run's seed, the step, and the place among the completions of all
        processes. Held-out prompts are answered from the same seeds each time.
        """
        at = self.accelerator.process_index * len(self._rows) + place
        if self._is_training:
            state = (0, self.args.seed, self.state.global_step, at)
        else:
            state = (1, self.args.seed, self._rows[place], at % self._settings.group_size)
        return int(np.random.SeedSequence(state).generate_state(1, np.uint64)[0])

    @contextmanager
    def _for_generation(self) -> Iterator[ChatModel]:
        """Give the weights of this step as a model that writes, and put back what that changes."""
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
            if self._writer is not None:
                self._writer.follow(model)
                yield self._chat_model(self._writer.model)
                return
            inner = model.get_base_model() if isinstance(model, PeftModel) else model
            was_training, generation = model.training, inner.generation_config
            modules = [module for module in inner.modules() if "rope_deltas" in vars(module)]
            offsets = [module.rope_deltas for module in modules]
            model.eval()
            try:
                # As the forward pass of the update: what is sampled from is what is trained.
                with self.accelerator.autocast():
                    yield self._chat_model(inner)
            finally:
                model.train(was_training)
                inner.generation_config = generation
                for module, offset in zip(modules, offsets, strict=True):
                    module.rope_deltas = offset

    def _chat_model(self, model: Any) -> ChatModel:
        """Return the model around these weights."""
        if self._chat is None:
            name = str(getattr(model.config, "_name_or_path", "") or "the policy")
            owner = OwnerThread("unused")  # all of this runs on the trainer's own thread
            self._chat = ChatModel(name, model, self.processing_class, owner)
        self._chat.model = model
        # The checkpoint's own sampling habits would be merged into ours.
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
            probabilities, entropies = completion_logprobs(
                policy,
                input_ids,
                attention_mask,
                logits_to_keep,
                pictures,
                self._settings.temperature,
            )
        return probabilities, entropies, None  # a mixture of experts would have a third


def _without_empty_pictures(
    module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out pictures where there are none.

    trl cuts a generation into passes. A pass of prompts without a picture gets an empty tensor if
    another one has some, which image towers cannot read.
    """
    pixels = named.get("pixel_values")
    if pixels is None or pixels.shape[0]:
        return given, named
    return given, {name: value for name, value in named.items() if name not in _OF_PICTURES}


def run_equally_often(model: Any) -> None:
    """Have a process whose completions have ended go on until those of all processes have.

    Weights that are split by FSDP are put together in every forward pass, by all processes: one that
    stopped early would leave the others waiting. transformers' `generate` knows a model that
    transformers has split by this mark; accelerate, which splits ours, sets none (1.15).
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    inner._is_fsdp_managed_module = True


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return where rows of one prompt that stand together begin and end.

    Example:
        >>> _runs([7, 7, 3, 3, 3])
        [(0, 2), (2, 5)]
    """
    starts = [n for n, row in enumerate(rows) if n == 0 or row != rows[n - 1]]
    return list(zip(starts, [*starts[1:], len(rows)], strict=True))
