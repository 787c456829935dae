"""What a step quotes of a conversation, and whether somebody really said it."""

import re
from collections.abc import Iterator, Sequence

_QUOTATION = re.compile(r'"([^"]*)"')


def quotations(text: str) -> list[str]:
    """Return what stands between double quotation marks."""
    return _QUOTATION.findall(text)


def invented(text: str, messages: Sequence[str]) -> Iterator[str]:
    """Yield each quotation of a text that is not, letter for letter, in a message.

    Its first letter may be of the other case: a quotation may begin a sentence, or be taken from the beginning of one.

    Example:
        >>> list(invented('They say "my boss" and "my job".', ["My boss shouted."]))
        ['my job']
    """
    for quotation in quotations(text):
        spellings = {quotation, quotation[:1].swapcase() + quotation[1:]}
        if not any(spelling in message for spelling in spellings for message in messages):
            yield quotation
