"""A byte-level BPE cut to the tokens that some texts use.

Most of a small model's vocabulary is never used in conversations, and its rows are a fifth of the weights. What
is left tokenises those texts exactly as before: a token stays together with all tokens that it is merged from,
and a merge that is gone was never made in them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compeer_core.errors import ConfigError
from compeer_core.reasoning import TAGS
from training.finetune.chat_tokens import SPECIAL_TOKENS, VERDICT_WORDS, chat_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in their order, and the merges that make them."""

    tokens: tuple[str, ...]
    """In the alphabet of byte-level BPE; all but the added ones."""
    merges: tuple[str, ...]


def tokenizer_of(vocabulary: Vocabulary, special: Sequence[str] = ()) -> Tokenizer:
    """Return the tokenizer of a vocabulary: digits one by one, then words, as SmolLM2's.

    Args:
        vocabulary: Tokens and merges.
        special: Those of its tokens that no text may be merged into.
    """
    places = {token: place for place, token in enumerate(vocabulary.tokens)}
    pairs = [_pair(merge) for merge in vocabulary.merges]
    tokenizer = Tokenizer(models.BPE(vocab=places, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def counted(tokenizer: Tokenizer, texts: Sequence[str]) -> Counter[str]:
    """Return how often each token is used in texts."""
    uses: Counter[int] = Counter()
    for start in range(0, len(texts), 1000):
        some = list(texts[start : start + 1000])
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            uses.update(encoding.ids)
    return Counter({str(tokenizer.id_to_token(token)): count for token, count in uses.items()})


def cut(
    vocabulary: Vocabulary, uses: Mapping[str, int], kept: Sequence[str], size: int
) -> Vocabulary:
    """Return the vocabulary cut to its most used tokens, in their old order, then bytes that it lacked.

    SmolLM2 has no token for 21 of the 256 bytes, such as that with which the characters of some planes begin.
    A text with one would lose it.

    Args:
        vocabulary: The whole one.
        uses: How often each token is used.
        kept: Tokens that stay, used or not.
        size: How many tokens are to be left. It may come out smaller where fewer are used, and a
            little smaller where the next token needs more ancestors than there is room for.

    Raises:
        ConfigError: Bytes and tokens to be kept are more than `size`.
    """
    parts: dict[str, tuple[str, str]] = {}
    for merge in vocabulary.merges:
        left, right = _pair(merge)
        parts.setdefault(left + right, (left, right))
    chosen = {*pre_tokenizers.ByteLevel.alphabet()}
    for token in kept:
        chosen |= _with_ancestors(token, parts)
    if len(chosen) > size:
        raise ConfigError(f"the vocabulary must hold at least {len(chosen)} tokens, got {size}")
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
    """Return the tags, and the verdict words that are not one token already."""
    return (*TAGS, *(word for word in VERDICT_WORDS if word not in vocabulary.tokens))


def tokenizer_to_ship(vocabulary: Vocabulary, max_length: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a checkpoint: special tokens first, then the vocabulary, then what is added.

    Args:
        vocabulary: Without special tokens.
        max_length: Tokens that the model can read.
    """
    whole = Vocabulary((*SPECIAL_TOKENS, *vocabulary.tokens), vocabulary.merges)
    bpe = tokenizer_of(whole, SPECIAL_TOKENS)
    bpe.add_tokens(
        [
            AddedToken(token, normalized=False, single_word=token not in TAGS)
            for token in added_tokens(vocabulary)
        ]
    )
    return chat_tokenizer(bpe, max_length)
