"""All turns of a dialogue in one row, so that its history is read once.

A dialogue of ten supporter turns makes ten samples, and each repeats the history of the one before.
Here a row holds the history once, the *trunk*, and behind it what is each sample's own, the
*branches*: a branch sees the trunk up to where it leaves it, and itself. Positions are those of the
sample by itself, so the model computes what it would compute for the samples one by one. Of the
tokens of ESConv's first 40 dialogues with whole histories, 60 % are spared (89,081 of 220,729 are
left).

A mask over whole rows would do, but by arithmetic attention of each token to all of a row of 2,000 costs
a model of this size about as much as is saved. `shared_prefix_attention` therefore attends to the trunk and to each branch
apart. It is registered as an attention implementation of transformers under `ATTENTION`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, Qwen2_5_VLForConditionalGeneration

ATTENTION = "shared_prefix"
"""The name under which transformers knows `shared_prefix_attention`."""


@dataclass(frozen=True)
class TokenisedSample:
    """A prompt and the completion that is to be learnt."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    positions: Tensor
    """Rotary positions (time, height, width) of all tokens, shape (3, prompt + completion)."""
    first_picture: int | None = None
    """Place of the first token of the prompt that belongs to a picture of its own: from there on nothing
    is shared. None where there is no picture, or where all samples of a row show the same ones: then
    one of them brings the pixels."""
    pixels: Tensor | None = None
    """Patches of the prompt's pictures, as the processor gives them."""
    grid: Tensor | None = None
    """Patches of each picture along time, height and width, shape (pictures, 3)."""


@dataclass(frozen=True)
class Branches:
    """Where the branches of a row lie, and what they see."""

    trunk: int
    """Tokens of the trunk; the branches follow, in order and without gaps."""
    shared: tuple[int, ...]
    """How many tokens of the trunk each branch sees, from the first on."""
    lengths: tuple[int, ...]
    """Tokens of each branch."""
    unseen: Tensor
    """0 where a token sees a key, minus infinity where not, for a branch as long as the longest that
    sees the whole trunk: shape (longest, trunk + longest). Those of the others are cut from it."""


@dataclass(frozen=True)
class SharedPrefixRow:
    """The samples of a dialogue as one row of L tokens."""

    tokens: Tensor
    """Shape (1, L)."""
    positions: Tensor
    """Rotary positions, shape (3, 1, L)."""
    branches: Branches
    predicting: Tensor
    """Places of the tokens whose successor is to be learnt, shape (learnt,)."""
    targets: Tensor
    """Those successors, shape (learnt,)."""
    pixels: Tensor | None
    grid: Tensor | None

    def to(self, device: str) -> "SharedPrefixRow":
        """Return the row on a device."""
        there = {name: _moved(value, device) for name, value in vars(self).items()}
        return SharedPrefixRow(**there)


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Branches):
        return Branches(**{name: _moved(part, device) for name, part in vars(value).items()})
    return value.to(device) if isinstance(value, Tensor) else value


def shared_prefix_row(samples: Sequence[TokenisedSample]) -> SharedPrefixRow:
    """Put samples into one row; what they have in common with the longest prompt is there once.

    Args:
        samples: At least one. They may differ from their first token on; then nothing is spared.
    """
    longest = max(samples, key=_text_length)
    stem = longest.prompt[: _text_length(longest)]
    shared = [_shared(sample, stem) for sample in samples]
    trunk = max(shared)
    tokens, positions = [torch.tensor(stem[:trunk])], [longest.positions[:, :trunk]]
    lengths, predicting, targets = [], [], []
    start = trunk
    for sample, begin in zip(samples, shared, strict=True):
        own = (*sample.prompt, *sample.completion)[begin:]
        tokens.append(torch.tensor(own))
        positions.append(sample.positions[:, begin:])
        lengths.append(len(own))
        learnt = len(sample.completion)
        end = start + len(own)
        predicting.append(torch.arange(end - learnt - 1, end - 1))
        targets.append(torch.tensor(sample.completion))
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
    )


def _text_length(sample: TokenisedSample) -> int:
    """Return how much of a prompt may be shared: its text, and not the token that begins the turn.

    The last token of the prompt predicts the first of the completion, and each branch learns its own.
    """
    end = len(sample.prompt) - 1
    return end if sample.first_picture is None else min(end, sample.first_picture)


def _shared(sample: TokenisedSample, stem: Sequence[int]) -> int:
    own = sample.prompt[: _text_length(sample)]
    pairs = zip(own, stem, strict=False)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(own))


def _branches(trunk: int, shared: Sequence[int], lengths: Sequence[int]) -> Branches:
    longest = max(lengths)
    unseen = torch.full((longest, longest), -torch.inf, dtype=torch.bfloat16).triu(1)
    unseen = functional.pad(unseen, (trunk, 0))
    return Branches(trunk, tuple(shared), tuple(lengths), unseen)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shared_prefix_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    branches: Branches,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend within one row of a trunk and its branches.

    Args:
        module: The attention layer, of which the share of heads to a key is read.
        query: Shape (1, heads, L, width).
        key: Shape (1, key heads, L, width).
        value: As `key`.
        attention_mask: Not looked at.
        scaling: Factor on the products of queries and keys.
        branches: Where the branches lie.

    Returns:
        The attended values, shape (1, L, heads, width), and no weights.
    """
    trunk, groups = branches.trunk, module.num_key_value_groups
    heads, width = key.shape[1], key.shape[3]
    dtype = value.dtype
    # A key serves several heads: their queries are laid one after another, no key is copied.
    asking = (query[0] * scaling).to(dtype).unflatten(0, (heads, groups))
    parts = [trunk, *branches.lengths]
    of_trunk, *own_asking = asking.split(parts, dim=2)
    trunk_keys, *own_keys = key[0].to(dtype).split(parts, dim=1)
    trunk_values, *own_values = value[0].split(parts, dim=1)
    attended = [
        functional.scaled_dot_product_attention(
            of_trunk.flatten(0, 1)[None],
            trunk_keys[None].repeat_interleave(groups, dim=1),
            trunk_values[None].repeat_interleave(groups, dim=1),
            is_causal=True,
            scale=1.0,
        )[0].transpose(0, 1)
    ]
    for length, shared, queries, keys, values in zip(
        branches.lengths, branches.shared, own_asking, own_keys, own_values, strict=True
    ):
        keys = torch.cat([trunk_keys[:, :shared], keys], dim=1)
        values = torch.cat([trunk_values[:, :shared], values], dim=1)
        scores = (queries.flatten(1, 2) @ keys.mT).unflatten(1, (groups, length))
        unseen = branches.unseen[:length, trunk - shared : trunk + length]
        weights = (scores + unseen).softmax(-1).flatten(1, 2)
        from_keys = (weights @ values).view(heads, groups, length, width)
        attended.append(from_keys.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(attended)[None], None


AttentionInterface.register(ATTENTION, shared_prefix_attention)


def predicted_logits(
    model: Qwen2_5_VLForConditionalGeneration,
    row: SharedPrefixRow,
    image_tokens: Tensor | None = None,
) -> Tensor:
    """Return the logits of all tokens of a row that are to be learnt, shape (learnt, vocabulary).

    Args:
        model: Its language model's attention is `ATTENTION`.
        row: On the model's device.
        image_tokens: Stand for what the image tower would make of the row's pictures, shape (image tokens,
            width).
    """
    inner = model.model
    embedded = inner.get_input_embeddings()(row.tokens)
    if row.pixels is not None:
        if image_tokens is None:
            pictures: Any = inner.get_image_features(row.pixels, row.grid, return_dict=True)
            image_tokens = torch.cat(pictures.pooler_output)
        of_pictures = (row.tokens == model.config.image_token_id)[..., None]
        embedded = embedded.masked_scatter(of_pictures, image_tokens.to(embedded.dtype))
    no_mask: Mapping[str, None] = {"full_attention": None}
    hidden = inner.language_model(
        inputs_embeds=embedded,
        position_ids=row.positions,
        attention_mask=no_mask,
        use_cache=False,
        branches=row.branches,
    ).last_hidden_state
    logits: Tensor = model.lm_head(hidden[0, row.predicting])
    return logits.float()


def row_loss(
    model: Qwen2_5_VLForConditionalGeneration,
    row: SharedPrefixRow,
    image_tokens: Tensor | None = None,
) -> Tensor:
    """Return the sum of the cross-entropies of those tokens in nats; see `predicted_logits`."""
    logits = predicted_logits(model, row, image_tokens)
    return functional.cross_entropy(logits, row.targets, reduction="sum")
