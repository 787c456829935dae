"""Quotations in reasoning steps, and whether the conversation contains them."""

import re
from collections.abc import Iterator, Sequence

_QUOTATION = re.compile(r'"([^"]*)"')


def quotations(text: str) -> list[str]:
    """Return the texts between double quotation marks."""
    return _QUOTATION.findall(text)


def invented(text: str, messages: Sequence[str]) -> Iterator[str]:
    """Yield each quotation of a text that no message contains verbatim.

    The case of its first letter may differ: a quotation may begin a sentence, or be the beginning of one.

    Example:
        >>> list(invented('They say "my boss" and "my job".', ["My boss shouted."]))
        ['my job']
    """
    for quotation in quotations(text):
        spellings = {quotation, quotation[:1].swapcase() + quotation[1:]}
        if not any(spelling in message for spelling in spellings for message in messages):
            yield quotation
