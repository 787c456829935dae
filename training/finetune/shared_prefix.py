"""Packs all turns of a dialogue into one row, so that the shared history is computed once.

A dialogue with ten supporter turns gives ten samples with overlapping histories. A row contains the
history once (the *trunk*), followed by the remaining tokens of each sample (its *branch*). A branch
attends to the trunk up to the point where it diverges, and to itself. Position ids are those of the
separate samples, so the result is the same. For ESConv's first 40 dialogues with full histories this
saves 60 % of the tokens (89,081 instead of 220,729).

A mask over full rows would be simpler, but full attention over a row of 2,000 tokens costs a model of
this size about as much as is saved. `shared_prefix_attention` therefore computes trunk and branches
separately. It is registered in transformers as the attention implementation `ATTENTION`.

On an accelerator it is the other way round: the many small operations of the branches cost more than full
rows. There `padded_rows` puts the rows of several dialogues into one pass, with a mask (`PaddedLayout`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Qwen2_5_VLForConditionalGeneration

ATTENTION = "shared_prefix"
"""Name of `shared_prefix_attention` in transformers."""


@dataclass(frozen=True)
class TokenisedSample:
    """A prompt and the completion to train on."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    positions: Tensor
    """Rotary positions (time, height, width) of all tokens, shape (3, prompt + completion)."""
    first_picture: int | None = None
    """Index of the first image token of an image that other samples of the row do not have: nothing
    is shared from there on. None if there is no such image; of images shared by all samples of a row,
    only one sample has the pixels."""
    pixels: Tensor | None = None
    """Patches of the prompt's images, as the processor returns them."""
    grid: Tensor | None = None
    """Patches of each image along time, height and width, shape (images, 3)."""
    weights: tuple[float, ...] | None = None
    """Weight of each token of the completion in the loss; None if all count the same."""


@dataclass(frozen=True)
class Branches:
    """Layout of the branches of a row, and their attention mask."""

    trunk: int
    """Number of tokens of the trunk; the branches follow, in order and without gaps."""
    shared: tuple[int, ...]
    """Length of the prefix of the trunk that each branch attends to."""
    lengths: tuple[int, ...]
    """Number of tokens of each branch."""
    mask: Tensor
    """Additive mask (0 or minus infinity) of the longest branch over the full trunk and itself, shape
    (longest, trunk + longest). The masks of other branches are slices of it."""


@dataclass(frozen=True)
class PaddedLayout:
    """Which tokens of several rows of equal length L see which."""

    part: Tensor
    """Number of the trunk (0) or branch that each token is in, -1 for padding; shape (rows, L)."""
    shared: Tensor
    """How many tokens of the trunk each token sees, at most; shape (rows, L)."""

    @cached_property
    def mask(self) -> Tensor:
        """Whether a token (second to last dimension) sees another, shape (rows, 1, L, L); the same in all layers."""
        place = torch.arange(self.part.shape[1], device=self.part.device)
        same_part = self.part[:, :, None] == self.part[:, None, :]
        in_trunk = place < self.shared[:, :, None]
        return ((same_part | in_trunk) & (place <= place[:, None]))[:, None]


@dataclass(frozen=True)
class SharedPrefixRow:
    """The samples of a dialogue as one row of L tokens, or several such rows (`padded_rows`)."""

    tokens: Tensor
    """Shape (rows, L); rows is 1 unless the layout is padded."""
    positions: Tensor
    """Rotary positions, shape (3, rows, L)."""
    branches: Branches | PaddedLayout
    predicting: Tensor
    """Indices in the flattened `tokens` of those that predict a target, shape (targets,)."""
    targets: Tensor
    """Token ids to predict, shape (targets,)."""
    pixels: Tensor | None
    grid: Tensor | None
    weights: Tensor
    """Weight of each target in the loss, shape (targets,)."""

    @property
    def length(self) -> int:
        """Number of tokens, padding included."""
        return self.tokens.numel()

    def to(self, device: str) -> "SharedPrefixRow":
        """Return the row on a device."""
        return SharedPrefixRow(**{name: _moved(v, device) for name, v in vars(self).items()})


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Branches | PaddedLayout):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value)(**{name: _moved(part, device) for name, part in parts.items()})
    return value.to(device) if isinstance(value, Tensor) else value


def shared_prefix_row(samples: Sequence[TokenisedSample]) -> SharedPrefixRow:
    """Pack samples into one row; the trunk is a prefix of the longest prompt.

    Args:
        samples: At least one. If they differ from their first token on, nothing is shared.
    """
    longest = max(samples, key=_text_length)
    stem = longest.prompt[: _text_length(longest)]
    shared = [_shared(sample, stem) for sample in samples]
    trunk = max(shared)
    tokens, positions = [torch.tensor(stem[:trunk])], [longest.positions[:, :trunk]]
    lengths, predicting, targets, weights = [], [], [], []
    start = trunk
    for sample, fork in zip(samples, shared, strict=True):
        branch = (*sample.prompt, *sample.completion)[fork:]
        tokens.append(torch.tensor(branch))
        positions.append(sample.positions[:, fork:])
        lengths.append(len(branch))
        end = start + len(branch)
        predicting.append(torch.arange(end - len(sample.completion) - 1, end - 1))
        targets.append(torch.tensor(sample.completion))
        weights.append(torch.tensor(sample.weights or (1.0,) * len(sample.completion)))
        start = end
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    grids = [sample.grid for sample in samples if sample.grid is not None]
    return SharedPrefixRow(
        tokens=torch.cat(tokens)[None],
        positions=torch.cat(positions, dim=1)[:, None],
        branches=_branches(trunk, shared, lengths),
        predicting=torch.cat(predicting),
        targets=torch.cat(targets),
        pixels=torch.cat(pixels) if pixels else None,
        grid=torch.cat(grids) if grids else None,
        weights=torch.cat(weights),
    )


def row_of_places(
    samples: Sequence[TokenisedSample], places: Sequence[Sequence[int]]
) -> SharedPrefixRow:
    """Pack samples into one row whose targets are some tokens of their completions.

    Args:
        samples: As `shared_prefix_row` takes them.
        places: For each sample, the indices in its completion of the tokens to predict.
    """
    row = shared_prefix_row(samples)
    targets, start = [], 0
    for sample, of_sample in zip(samples, places, strict=True):
        targets += [start + place for place in of_sample]
        start += len(sample.completion)
    return replace(
        row,
        predicting=row.predicting[targets],
        targets=row.targets[targets],
        weights=row.weights[targets],
    )


def _text_length(sample: TokenisedSample) -> int:
    """Return how many tokens of a prompt may be shared.

    The last one is not: it predicts the first token of the completion, which differs per branch.
    """
    end = len(sample.prompt) - 1
    return end if sample.first_picture is None else min(end, sample.first_picture)


def _shared(sample: TokenisedSample, stem: Sequence[int]) -> int:
    prefix = sample.prompt[: _text_length(sample)]
    pairs = zip(prefix, stem, strict=False)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), len(prefix))


def _branches(trunk: int, shared: Sequence[int], lengths: Sequence[int]) -> Branches:
    longest = max(lengths)
    mask = torch.full((longest, longest), -torch.inf, dtype=torch.bfloat16).triu(1)
    return Branches(trunk, tuple(shared), tuple(lengths), functional.pad(mask, (trunk, 0)))


def padded_rows(rows: Sequence[SharedPrefixRow]) -> SharedPrefixRow:
    """Put several rows into one pass; what is predicted is the same, in the order of the rows.

    Args:
        rows: At least one, none of them padded.
    """
    count, length = len(rows), max(row.length for row in rows)
    tokens = torch.zeros((count, length), dtype=torch.long)
    positions = torch.zeros((3, count, length), dtype=torch.long)
    part, shared = torch.full((count, length), -1), torch.zeros((count, length), dtype=torch.long)
    for number, row in enumerate(rows):
        layout = row.branches
        assert isinstance(layout, Branches)
        tokens[number, : row.length] = row.tokens[0]
        positions[:, number, : row.length] = row.positions[:, 0]
        lengths = torch.tensor([layout.trunk, *layout.lengths])
        part[number, : row.length] = torch.arange(len(lengths)).repeat_interleave(lengths)
        seen = torch.tensor([layout.trunk, *layout.shared])
        shared[number, : row.length] = seen.repeat_interleave(lengths)
    pixels = [row.pixels for row in rows if row.pixels is not None]
    grids = [row.grid for row in rows if row.grid is not None]
    return SharedPrefixRow(
        tokens=tokens,
        positions=positions,
        branches=PaddedLayout(part, shared),
        predicting=torch.cat([n * length + row.predicting for n, row in enumerate(rows)]),
        targets=torch.cat([row.targets for row in rows]),
        pixels=torch.cat(pixels) if pixels else None,
        grid=torch.cat(grids) if grids else None,
        weights=torch.cat([row.weights for row in rows]),
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shared_prefix_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    branches: Branches | PaddedLayout,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention within one shared-prefix row, or within several padded ones.

    Args:
        module: The attention layer; its `num_key_value_groups` is used.
        query: Shape (rows, heads, L, width).
        key: Shape (rows, key heads, L, width).
        value: Shape of `key`.
        attention_mask: Ignored.
        scaling: Factor of the attention scores.
        branches: Layout of the rows.

    Returns:
        The output, shape (rows, L, heads, width), and no attention weights.
    """
    groups = module.num_key_value_groups
    if isinstance(branches, PaddedLayout):
        attended = functional.scaled_dot_product_attention(
            query.to(value.dtype),
            key.to(value.dtype).repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            branches.mask,
            scale=scaling,
        )
        return attended.transpose(1, 2), None
    trunk = branches.trunk
    heads, width = key.shape[1], key.shape[3]
    dtype = value.dtype
    # Grouped-query attention: the queries that share a key are batched instead of copying the key.
    grouped = (query[0] * scaling).to(dtype).unflatten(0, (heads, groups))
    parts = [trunk, *branches.lengths]
    trunk_queries, *branch_queries = grouped.split(parts, dim=2)
    trunk_keys, *branch_keys = key[0].to(dtype).split(parts, dim=1)
    trunk_values, *branch_values = value[0].split(parts, dim=1)
    outputs = [
        functional.scaled_dot_product_attention(
            trunk_queries.flatten(0, 1)[None],
            trunk_keys[None].repeat_interleave(groups, dim=1),
            trunk_values[None].repeat_interleave(groups, dim=1),
            is_causal=True,
            scale=1.0,
        )[0].transpose(0, 1)
    ]
    for length, shared, queries, keys, values in zip(
        branches.lengths, branches.shared, branch_queries, branch_keys, branch_values, strict=True
    ):
        keys = torch.cat([trunk_keys[:, :shared], keys], dim=1)
        values = torch.cat([trunk_values[:, :shared], values], dim=1)
        scores = (queries.flatten(1, 2) @ keys.mT).unflatten(1, (groups, length))
        mask = branches.mask[:length, trunk - shared : trunk + length]
        weights = (scores + mask).softmax(-1).flatten(1, 2)
        output = (weights @ values).view(heads, groups, length, width)
        outputs.append(output.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)[None], None


AttentionInterface.register(ATTENTION, shared_prefix_attention)


def row_embeddings(
    model: Qwen2_5_VLForConditionalGeneration,
    row: SharedPrefixRow,
    image_tokens: Tensor | None = None,
) -> Tensor:
    """Return the embedded tokens of a row, shape (rows, L, width); see `predicted_logits`."""
    inner = model.model
    embedded: Tensor = inner.get_input_embeddings()(row.tokens)
    if row.pixels is not None:
        if image_tokens is None:
            features: Any = inner.get_image_features(row.pixels, row.grid, return_dict=True)
            image_tokens = torch.cat(features.pooler_output)
        is_image = (row.tokens == model.config.image_token_id)[..., None]
        embedded = embedded.masked_scatter(is_image, image_tokens.to(embedded.dtype))
    return embedded


def run_layers(text: nn.Module, states: Tensor, row: SharedPrefixRow) -> Tensor:
    """Return the output of a language model for a row, shape (rows, L, width).

    Args:
        text: A language model that uses the attention implementation `ATTENTION`, or some of its layers.
        states: Its input, shape (rows, L, width).
        row: The row.
    """
    no_mask: Mapping[str, None] = {"full_attention": None}
    output: Tensor = text(
        inputs_embeds=states,
        position_ids=row.positions,
        attention_mask=no_mask,
        use_cache=False,
        branches=row.branches,
    ).last_hidden_state
    return output


def predicted_logits(
    model: Qwen2_5_VLForConditionalGeneration,
    row: SharedPrefixRow,
    image_tokens: Tensor | None = None,
) -> Tensor:
    """Return the logits of all targets of a row, shape (targets, vocabulary).

    Args:
        model: Model whose language model uses the attention implementation `ATTENTION`.
        row: A row on the model's device.
        image_tokens: Precomputed output of the image tower, shape (image tokens, width); None runs
            the tower.
    """
    states = row_embeddings(model, row, image_tokens)
    hidden = run_layers(model.model.language_model, states, row)
    logits: Tensor = model.lm_head(hidden.flatten(0, 1)[row.predicting])
    return logits.float()


def row_loss(
    model: Qwen2_5_VLForConditionalGeneration,
    row: SharedPrefixRow,
    image_tokens: Tensor | None = None,
    *,
    weighted: bool = False,
) -> Tensor:
    """Return the summed cross-entropy of the targets, in nats, by their weights if asked; see `predicted_logits`."""
    logits = predicted_logits(model, row, image_tokens)
    losses = functional.cross_entropy(logits, row.targets, reduction="none")
    return (losses * row.weights).sum() if weighted else losses.sum()
