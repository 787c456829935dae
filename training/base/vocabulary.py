"""Reduces a byte-level BPE to the tokens that given texts use.

Most of the vocabulary never occurs in conversations, but its rows are a fifth of a small model's weights.
The reduced vocabulary tokenises the texts as before: a token is kept together with all tokens that it is
merged from, and removed merges never apply to these texts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compeer_core.errors import ConfigError
from compeer_core.reasoning import TAGS
from training.finetune.chat_tokens import (
    SPECIAL_TOKENS,
    VERDICT_WORDS,
    byte_level_bpe,
    chat_tokenizer,
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the merges that form them."""

    tokens: tuple[str, ...]
    """In the byte-level alphabet, without added tokens."""
    merges: tuple[str, ...]


def build_tokenizer(vocabulary: Vocabulary, special: Sequence[str] = ()) -> Tokenizer:
    """Return the tokenizer of a vocabulary.

    Args:
        vocabulary: Tokens and merges.
        special: Those of its tokens that are never the result of merging text.
    """
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    pairs = [_pair(merge) for merge in vocabulary.merges]
    tokenizer = byte_level_bpe(models.BPE(vocab=ids, merges=pairs))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def count_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Counter[str]:
    """Return the number of occurrences of each token in texts."""
    uses: Counter[int] = Counter()
    for start in range(0, len(texts), 1000):
        batch = list(texts[start : start + 1000])
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            uses.update(encoding.ids)
    return Counter({str(tokenizer.id_to_token(token)): count for token, count in uses.items()})


def cut_vocabulary(
    vocabulary: Vocabulary, uses: Mapping[str, int], required: Sequence[str], size: int
) -> Vocabulary:
    """Return the most used tokens, in their original order, followed by missing single bytes.

    SmolLM2 has no token for 21 of the 256 bytes, for example the first bytes of some Unicode planes, so
    texts that contain them would be altered.

    Args:
        vocabulary: The original vocabulary.
        uses: Number of occurrences of each token.
        required: Tokens to keep in any case.
        size: Maximum number of tokens. The result is smaller if fewer are used, or if the next token
            needs more ancestors than there is room for.

    Raises:
        ConfigError: `size` is too small for the bytes and the required tokens.
    """
    parts: dict[str, tuple[str, str]] = {}
    for merge in vocabulary.merges:
        left, right = _pair(merge)
        parts.setdefault(left + right, (left, right))
    chosen = {*pre_tokenizers.ByteLevel.alphabet()}
    for token in required:
        chosen |= _with_ancestors(token, parts)
    if len(chosen) > size:
        raise ConfigError(f"vocabulary_size must be at least {len(chosen)} tokens, got {size}")
    for token in sorted((t for t in uses if t in parts), key=lambda t: (-uses[t], t)):
        family = _with_ancestors(token, parts)
        if len(chosen | family) <= size:
            chosen |= family
    merges = tuple(
        merge
        for merge in vocabulary.merges
        if {*merge.split(" "), merge.replace(" ", "")} <= chosen
    )
    old = tuple(token for token in vocabulary.tokens if token in chosen)
    return Vocabulary((*old, *sorted(chosen - {*old})), merges)


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _with_ancestors(token: str, parts: Mapping[str, tuple[str, str]]) -> set[str]:
    family, waiting = set(), [token]
    while waiting:
        member = waiting.pop()
        if member not in family:
            family.add(member)
            waiting += parts.get(member, ())
    return family


def added_tokens(vocabulary: Vocabulary) -> tuple[str, ...]:
    """Return the tags, and the verdict words that are not single tokens already."""
    return (*TAGS, *(word for word in VERDICT_WORDS if word not in vocabulary.tokens))


def shipped_tokenizer(vocabulary: Vocabulary, max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a checkpoint: special tokens, then the vocabulary, then added tokens.

    Args:
        vocabulary: A vocabulary without special tokens.
        max_length: Context length of the model, in tokens.
    """
    complete = Vocabulary((*SPECIAL_TOKENS, *vocabulary.tokens), vocabulary.merges)
    bpe = build_tokenizer(complete, SPECIAL_TOKENS)
    bpe.add_tokens(
        [
            AddedToken(token, normalized=False, single_word=token not in TAGS)
            for token in added_tokens(vocabulary)
        ]
    )
    return chat_tokenizer(bpe, max_length)
