"""Constrained decoding of quotations: a reasoning step can only quote what a message contains.

Between two straight double quotation marks (other marks are free), the next token must continue a passage of
a message, and the closing mark may follow only at the end of a word. So quotations are exact by construction,
whatever the model prefers. The reply is not constrained: it may put words into quotation marks that the
seeker could say.

The constraint needs a byte-level tokenizer, where the text of a token does not depend on its neighbours.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from compeer_core.backends.transformers_.tokens import REPLACEMENT
from compeer_core.errors import ConfigError

MARK = '"'
_REPLY = "<reply>"
_LONGEST = 16
"""Characters of a token within a quotation. A longer token is never needed: shorter ones spell the same text."""
_CLOSER = re.compile(r'[.,!?]?"[^"\w]*')
_ENDING = re.compile(r"\s*(?:[.!?。！？]|<[/|])")
_PASSAGES = re.compile(r'["\n]+')


class TokenTexts:
    """The text of each token of a vocabulary, and the tokens that may open or close a quotation.

    Attributes:
        texts: By token id.
        by_text: Token ids by text, without tokens that hold a quotation mark or part of a character.
        marks: Ids of the tokens that hold a quotation mark, shape (marks,).
        not_opening: Those of `marks` that would begin a quotation with something else than a message.
        closing: Ids of the tokens that may end a quotation.
        ending: Ids of the tokens that would end a sentence or its part of the turn, shape (endings,).
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Decode all tokens, one by one.

        Raises:
            ConfigError: The tokenizer is not byte-level.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if "ByteLevel" not in str(getattr(backend, "decoder", "")):
            raise ConfigError(
                f"{name}: exact_quotations and fresh_sentences need a byte-level tokenizer; remove them from "
                "its entry"
            )
        ids = range(len(tokenizer))
        self.texts: tuple[str, ...] = tuple(
            tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
        )
        self.by_text: dict[str, int] = {}
        for token, text in enumerate(self.texts):
            if text and REPLACEMENT not in text and MARK not in text:
                self.by_text.setdefault(text, token)
        marks = [token for token, text in enumerate(self.texts) if MARK in text]
        self.marks = torch.tensor(marks, dtype=torch.long)
        self.not_opening = torch.tensor(
            [t for t in marks if self.texts[t].count(MARK) > 1 or not self.texts[t].endswith(MARK)],
            dtype=torch.long,
        )
        self.closing = [token for token in marks if _CLOSER.fullmatch(self.texts[token])]
        endings = [token for token, text in enumerate(self.texts) if _ENDING.match(text)]
        self.ending = torch.tensor(endings, dtype=torch.long)


class ExactQuotations:
    """The constraint of one turn; see `turn_constraints.Constraint`."""

    def __init__(self, vocabulary: TokenTexts, messages: Sequence[str]) -> None:
        """Begin a turn.

        Args:
            vocabulary: Of the model.
            messages: What may be quoted.
        """
        self._vocabulary = vocabulary
        self._passages = [p for message in messages for p in _PASSAGES.split(message) if p.strip()]
        self._quotation: str | None = None
        self._tail = ""
        self._in_reply = False

    def push(self, token: int) -> None:
        """Take a token that was generated."""
        texts = self._vocabulary.texts
        self._read(texts[token] if token < len(texts) else "")  # models may pad their vocabulary

    def write(self, text: str) -> None:
        """Take text that was not generated; a quotation that it leaves open is not constrained."""
        self._read(text)
        self._quotation = None

    def mask(self, scores: torch.Tensor) -> None:
        """Set the logits of tokens that would break a quotation to minus infinity.

        Args:
            scores: Logits of the next token, shape (vocabulary,); modified.
        """
        if self._in_reply:
            return
        if self._quotation is None:
            known = self._vocabulary
            scores[known.not_opening if self._passages else known.marks] = -torch.inf
            return
        allowed = torch.tensor(self._allowed(self._quotation), device=scores.device)
        kept = scores[allowed]
        scores.fill_(-torch.inf)
        scores[allowed] = kept

    def _read(self, text: str) -> None:
        for character in text:
            if self._in_reply:
                return
            self._tail = (self._tail + character)[-len(_REPLY) :]
            if self._tail == _REPLY:
                self._in_reply, self._quotation = True, None
            elif character == MARK:
                self._quotation = "" if self._quotation is None else None
            elif self._quotation is not None:
                self._quotation += character

    def _allowed(self, quotation: str) -> list[int]:
        """Return the tokens that may follow; at least one."""
        follow = self._continuations(quotation) if quotation else self._beginnings
        by_text = self._vocabulary.by_text
        texts = {rest[:length] for rest in follow for length in range(1, len(rest) + 1)}
        allowed = {by_text[text] for text in texts if text in by_text}
        if not allowed or (quotation.strip() and any(not rest[:1].isalnum() for rest in follow)):
            allowed.update(self._vocabulary.closing)
        return sorted(allowed)

    def _continuations(self, quotation: str) -> set[str]:
        """Return what follows a text in the messages, up to the longest token that is considered."""
        follow: set[str] = set()
        for passage in self._passages:
            at = passage.find(quotation)
            while at >= 0:
                end = at + len(quotation)
                follow.add(passage[end : end + _LONGEST])
                at = passage.find(quotation, at + 1)
        return follow

    @cached_property
    def _beginnings(self) -> set[str]:
        """What a quotation may begin with: the messages from each start of a word on."""
        return {
            passage[at : at + _LONGEST]
            for passage in self._passages
            for at, character in enumerate(passage)
            if not character.isspace() and not passage[at - 1 : at].isalnum()
        }
