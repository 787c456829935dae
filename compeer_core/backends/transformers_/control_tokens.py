"""Which tokens steer a model: what a visitor's text must not contain.

The prompts disarm them in whatever a person or another model wrote (`prompts.neutralise`). Too
few, and a seeker can end their own message or open a tag; too many, and plain words are damaged.
"""

import unicodedata
from typing import Any


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens that steer a model, which no text of somebody else's may contain.

    They are those that the tokenizer marks special, and all that were added to it but plain words.
    Words are added so that each is one token, as COMPEER-nano's verdicts are; "First" and "True"
    steer nothing, and a seeker must be able to say them.
    """
    added = tokenizer.added_tokens_decoder.values()
    steering = {str(token) for token in added if token.special or not _is_plain(str(token))}
    named = steering.union(tokenizer.all_special_tokens)
    return tuple(sorted(token for token in named if token.strip()))


def _is_plain(token: str) -> bool:
    """Whether a token is words alone, in any script: some write vowels as combining marks."""
    return all(
        character.isspace() or character in "'’-" or unicodedata.category(character)[0] in "LMN"
        for character in token
    )
