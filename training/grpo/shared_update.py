"""Log-probabilities for the update of GRPO, with each prompt read once per forward pass.

trl prepends the prompt to each completion of its group and computes it G times, which is most of an
update on a small model. Here a prompt and its completions form one row
(`training.finetune.shared_prefix`); the log-probabilities are the same up to rounding.
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
    """The pictures of a batch, concatenated as the processor returns them."""

    pixels: Tensor
    """Patches of all pictures."""
    grid: Tensor
    """Patches of each picture along time, height and width, shape (pictures, 3)."""
    counts: Sequence[int]
    """Number of pictures of each prompt."""

    def of(self, prompt: int) -> tuple[Tensor, Tensor] | None:
        """Return the patches and the grid of one prompt; None if it has no picture."""
        start = sum(self.counts[:prompt])
        end = start + self.counts[prompt]
        if start == end:
            return None
        patches = self.grid.prod(-1)
        first = int(patches[:start].sum())
        return self.pixels[first : first + int(patches[start:end].sum())], self.grid[start:end]


def check_model(model: Any) -> None:
    """Check that this model, with or without an adapter, supports `update = "shared"`.

    Raises:
        ConfigError: It does not.
    """
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(model, Qwen2_5_VLForConditionalGeneration):
        raise ConfigError(
            f"training.update = 'shared' supports Qwen2.5-VL only, and the policy is a "
            f"{type(model).__name__}; use 'plain'"
        )


def completion_logprobs(
    model: Qwen2_5_VLForConditionalGeneration,
    ids: Tensor,
    mask: Tensor,
    width: int,
    pictures: PromptPictures | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token of the completions, and the entropy before it.

    Args:
        model: The policy, unwrapped; adapters in it are active.
        ids: Left-padded prompts and right-padded completions, shape (rows, tokens).
        mask: 0 where `ids` is padding, else 1.
        width: Number of columns that belong to the completions.
        pictures: Those of the prompts.
        temperature: Divides the logits.

    Returns:
        Both of shape (rows, width), in nats; 0 at padding.
    """
    prompts = [tuple(row[m].tolist()) for row, m in _rows(ids[:, :-width], mask[:, :-width])]
    completions = [row[m] for row, m in _rows(ids[:, -width:], mask[:, -width:])]
    members: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(number)
    results: list[tuple[Tensor, Tensor]] = [(ids.new_zeros(0), ids.new_zeros(0))] * len(prompts)
    with _attending_to_shared_prefixes(model):
        for prompt, numbers in members.items():
            own_pictures = pictures.of(numbers[0]) if pictures else None
            row = shared_prefix_row(
                _samples(model, prompt, [completions[number] for number in numbers], own_pictures)
            ).to(str(ids.device))
            all_logprobs = (predicted_logits(model, row) / temperature).log_softmax(-1)
            logprobs = all_logprobs.gather(1, row.targets[:, None])[:, 0]
            entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
            lengths = [len(completions[number]) for number in numbers]
            parts = zip(logprobs.split(lengths), entropies.split(lengths), strict=True)
            for number, part in zip(numbers, parts, strict=True):
                results[number] = part
    logprob_rows, entropy_rows = zip(*results, strict=True)
    return _padded(logprob_rows, width), _padded(entropy_rows, width)


def _rows(ids: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(ids.cpu(), mask.cpu().bool(), strict=True)


def _padded(parts: Sequence[Tensor], width: int) -> Tensor:
    padded = pad_sequence(list(parts), batch_first=True)
    return functional.pad(padded, (0, width - padded.shape[1]))


def _samples(
    model: Qwen2_5_VLForConditionalGeneration,
    prompt: tuple[int, ...],
    completions: Sequence[Tensor],
    pictures: tuple[Tensor, Tensor] | None,
) -> list[TokenisedSample]:
    """Return the samples of one prompt; only the first carries its pictures, which all share."""
    tokens = torch.tensor([prompt])
    pixels, grid = pictures or (None, None)
    is_picture = (tokens == model.config.image_token_id).int()
    positions, _ = model.model.get_rope_index(
        tokens, mm_token_type_ids=is_picture, image_grid_thw=None if grid is None else grid.cpu()
    )
    positions = positions[:, 0]
    after = positions.max() + 1
    return [
        TokenisedSample(
            prompt=prompt,
            completion=tuple(completion.tolist()),
            positions=torch.cat(
                [positions, (after + torch.arange(len(completion))).expand(3, -1)], dim=1
            ),
            pixels=None if number else pixels,
            grid=None if number else grid,
        )
        for number, completion in enumerate(completions)
    ]


@contextmanager
def _attending_to_shared_prefixes(model: Qwen2_5_VLForConditionalGeneration) -> Iterator[None]:
    """Use the attention of shared prefixes, then restore the model's own."""
    language: Any = model.model.language_model
    before = language.config._attn_implementation
    language.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        language.set_attn_implementation(before)
