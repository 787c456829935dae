"""The byte-level BPE of COMPEER-nano: `python -m training tokenizer <config.toml>`."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compeer_core.config import FrozenModel
from compeer_core.errors import ConfigError
from compeer_core.reasoning import TAGS
from training.data.corpus import Source, mixed_documents
from training.finetune.chat_tokens import SPECIAL_TOKENS, VERDICT_WORDS, chat_tokenizer, label_lines


class Config(FrozenModel):
    """`[tokenizer]`: what is learnt from what."""

    data_dir: Path
    """Folder of the corpora."""
    output: Path
    """Folder that receives tokenizer.json and its companions."""
    sources: tuple[Source, ...]
    vocabulary_size: int = 4096
    """Tokens in all, the added ones included."""
    max_position_embeddings: int = 2048
    label_repeats: int = 2000
    """How often each label line of the grammar is added, so that label words become few tokens."""
    seed: int = 0


def train_tokenizer(
    documents: Iterable[str], vocabulary_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with the tags, verdict words and ChatML tokens added.

    Raises:
        ConfigError: `vocabulary_size` leaves no room for the 256 bytes and the added tokens.
    """
    added = len(TAGS) + len(VERDICT_WORDS) + len(SPECIAL_TOKENS)
    if vocabulary_size < 256 + added:
        raise ConfigError(f"vocabulary_size must be at least {256 + added}, got {vocabulary_size}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
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
    if resume is not None:
        raise ConfigError("a tokenizer cannot be resumed: begin it again")
    documents = mixed_documents(config.data_dir, config.sources, config.seed)
    if dry_run:
        return
    documents += label_lines() * config.label_repeats
    tokenizer = train_tokenizer(documents, config.vocabulary_size, config.max_position_embeddings)
    config.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(config.output)
