"""Trains the byte-level BPE of COMPEER-nano: `python -m training tokenizer <config.toml>`."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import TAGS
from training.data.corpus import Source, mixed_documents
from training.finetune.chat_tokens import (
    SPECIAL_TOKENS,
    VERDICT_WORDS,
    byte_level_bpe,
    chat_tokenizer,
    label_lines,
)
from training.stages import refuse_resume


class Config(FrozenModel):
    """`[tokenizer]`: texts and vocabulary size."""

    data_dir: Path
    """Folder of the corpora."""
    output: Path
    """Folder for the tokenizer's files."""
    sources: tuple[Source, ...]
    vocabulary_size: int = 4096
    """Total number of tokens, including the added ones."""
    max_position_embeddings: int = 2048
    label_repeats: int = 2000
    """Copies of each label line in the training texts, so that labels become few tokens."""
    seed: int = 0


def train_tokenizer(
    documents: Iterable[str], vocabulary_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, with tags, verdict words and ChatML tokens added.

    Raises:
        ConfigError: `vocabulary_size` is too small for the 256 bytes and the added tokens.
    """
    added = len(TAGS) + len(VERDICT_WORDS) + len(SPECIAL_TOKENS)
    if vocabulary_size < 256 + added:
        raise ConfigError(f"vocabulary_size must be at least {256 + added}, got {vocabulary_size}")
    bpe = byte_level_bpe(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(TAGS) - len(VERDICT_WORDS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    bpe.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in VERDICT_WORDS])
    return chat_tokenizer(bpe, max_length)


def run(config: Config, *, resume: Path | None = None, dry_run: bool = False) -> None:
    """Train and save the tokenizer; a dry run only reads the corpora."""
    refuse_resume(resume, "tokenizer training cannot be resumed")
    documents = mixed_documents(config.data_dir, config.sources, config.seed)
    if dry_run:
        return
    documents += label_lines() * config.label_repeats
    tokenizer = train_tokenizer(documents, config.vocabulary_size, config.max_position_embeddings)
    config.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(config.output)
