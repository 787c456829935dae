"""Text from tokens while they come, for pages that show a turn as it is written."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes to where bytes are not (or not yet) a character."""


class TextDecoder:
    """Tokens in, text out, as early as possible but never half a character.

    Text that ends in replacement characters may be the beginning of a character whose other bytes
    come with the next tokens; it is held back until they do.
    """

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self.restart([])

    def restart(self, context: Sequence[int]) -> None:
        """Begin anew behind some tokens, whose text is not repeated."""
        self._context = list(context)
        self._known = self._decode(self._context)
        self._group: list[int] = []
        self._emitted = ""
        self._pending = False

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        if self._emitted and not self._pending:
            self._context, self._known = self._group, self._decode(self._group)
            self._group, self._emitted = [], ""
        self._group.append(token)
        text = self._decode(self._context + self._group)[len(self._known) :]
        certain = text.rstrip(REPLACEMENT)
        self._pending = len(certain) < len(text)
        new = certain[len(self._emitted) :]
        if new:
            self._emitted = certain
        return new

    @property
    def group(self) -> tuple[int, str]:
        """How many tokens the last piece of text came from, and that text."""
        return len(self._group), self._emitted

    def _decode(self, ids: Sequence[int]) -> str:
        shown = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
