"""The update of GRPO reads a prompt once for all completions of it that a forward pass holds.

trl lays the prompt before each completion of its group and computes it G times. On a small model that is
most of an update. Here a prompt and its completions are one row (`training.finetune.shared_prefix`); the
probabilities are the same up to rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLForConditionalGeneration

from compeer_core.errors import ConfigError
from training.finetune.shared_prefix import (
    ATTENTION,
    TokenisedSample,
    predicted_logits,
    shared_prefix_row,
)


@dataclass(frozen=True)
class PromptPictures:
    """The pictures of a batch, as the processor lays them one after another."""

    pixels: Tensor
    """Patches of all pictures."""
    grid: Tensor
    """Patches of each picture along time, height and width, shape (pictures, 3)."""
    counts: Sequence[int]
    """How many of the pictures each prompt has."""

    def of(self, prompt: int) -> tuple[Tensor, Tensor] | None:
        """Return the patches and the grid of one prompt, None where it has no picture."""
        begin = sum(self.counts[:prompt])
        end = begin + self.counts[prompt]
        if begin == end:
            return None
        patches = self.grid.prod(-1)
        first = int(patches[:begin].sum())
        return self.pixels[first : first + int(patches[begin:end].sum())], self.grid[begin:end]


def check_model(model: Any) -> None:
    """See that prompts can be shared in the update of this model, with an adapter or without.

    Raises:
        ConfigError: They cannot.
    """
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(model, Qwen2_5_VLForConditionalGeneration):
        raise ConfigError(
            f"training.update = 'shared' is written for Qwen2.5-VL, and the policy is a "
            f"{type(model).__name__}; use 'plain'"
        )


def completion_logprobs(
    model: Qwen2_5_VLForConditionalGeneration,
    ids: Tensor,
    mask: Tensor,
    kept: int,
    pictures: PromptPictures | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token of the completions, and the entropy before it.

    Args:
        model: The policy, without wrappers; adapters in it are used.
        ids: Prompts, padded on the left, and completions, padded on the right: shape (rows, tokens).
        mask: 1 where `ids` is no padding.
        kept: How many of the columns are the completions'.
        pictures: Those of the prompts.
        temperature: Logits are divided by it.

    Returns:
        Both of shape (rows, kept), in nats; 0 at padding.
    """
    prompts = [tuple(row[seen].tolist()) for row, seen in _rows(ids[:, :-kept], mask[:, :-kept])]
    completions = [row[seen] for row, seen in _rows(ids[:, -kept:], mask[:, -kept:])]
    members: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(number)
    found: list[tuple[Tensor, Tensor]] = [(ids.new_zeros(0), ids.new_zeros(0))] * len(prompts)
    with _attending_to_shared_prefixes(model):
        for prompt, numbers in members.items():
            seen = pictures.of(numbers[0]) if pictures else None
            row = shared_prefix_row(
                _samples(model, prompt, [completions[number] for number in numbers], seen)
            ).to(str(ids.device))
            logs = (predicted_logits(model, row) / temperature).log_softmax(-1)
            of_tokens = logs.gather(1, row.targets[:, None])[:, 0]
            entropies = -(logs.exp() * logs).sum(-1)
            lengths = [len(completions[number]) for number in numbers]
            parts = zip(of_tokens.split(lengths), entropies.split(lengths), strict=True)
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part
    return _padded([one for one, _ in found], kept), _padded([one for _, one in found], kept)


def _rows(ids: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(ids.cpu(), mask.cpu().bool(), strict=True)


def _padded(parts: Sequence[Tensor], width: int) -> Tensor:
    padded = pad_sequence(list(parts), batch_first=True)
    return functional.pad(padded, (0, width - padded.shape[1]))


def _samples(
    model: Qwen2_5_VLForConditionalGeneration,
    prompt: tuple[int, ...],
    completions: Sequence[Tensor],
    seen: tuple[Tensor, Tensor] | None,
) -> list[TokenisedSample]:
    """Return the completions of one prompt; all show the same pictures, which the first one brings."""
    tokens = torch.tensor([prompt])
    pixels, grid = seen or (None, None)
    of_pictures = (tokens == model.config.image_token_id).int()
    of_prompt, _ = model.model.get_rope_index(
        tokens, mm_token_type_ids=of_pictures, image_grid_thw=None if grid is None else grid.cpu()
    )
    of_prompt = of_prompt[:, 0]
    after = of_prompt.max() + 1
    return [
        TokenisedSample(
            prompt=prompt,
            completion=tuple(completion.tolist()),
            positions=torch.cat(
                [of_prompt, (after + torch.arange(len(completion))).expand(3, -1)], dim=1
            ),
            pixels=None if number else pixels,
            grid=None if number else grid,
        )
        for number, completion in enumerate(completions)
    ]


@contextmanager
def _attending_to_shared_prefixes(model: Qwen2_5_VLForConditionalGeneration) -> Iterator[None]:
    """Put the attention of shared prefixes in the place of the model's own, and that back again."""
    language: Any = model.model.language_model
    before = language.config._attn_implementation
    language.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        language.set_attn_implementation(before)
