"""Constrained decoding of replies: no short sentence twice in a conversation.

A small model has favourite sentences ("That must hurt."), and in a conversation they come back. Once the reply's
current sentence is word for word one that the supporter has said before, in an earlier reply or in this one, it may not end
there: the next token must go on. Only sentences of at most `MOST_WORDS` words count, since longer ones
are about something, and hardly come back by accident. Sentences with a character that the tokenizer splits
into several tokens are free.
"""

import re
from collections.abc import Sequence

import torch

from compeer_core.backends.transformers_.exact_quotations import TokenTexts
from compeer_core.redundancy import reply_length

MOST_WORDS = 8
_REPLY = "<reply>"
_END = re.compile(r"(?<=[.!?。！？])")


class FreshSentences:
    """The constraint of one turn; see `turn_constraints.Constraint`."""

    def __init__(self, vocabulary: TokenTexts, replies: Sequence[str]) -> None:
        """Begin a turn.

        Args:
            vocabulary: Of the model.
            replies: The supporter's earlier replies.
        """
        self._vocabulary = vocabulary
        self._known: set[str] = set()
        for reply in replies:
            for sentence in _END.split(reply):
                self._learn(sentence)
        self._text = ""
        self._in_reply = False

    def push(self, token: int) -> None:
        """Take a token that was generated."""
        texts = self._vocabulary.texts
        self.write(texts[token] if token < len(texts) else "")  # models may pad their vocabulary

    def write(self, text: str) -> None:
        """Take text of the turn."""
        self._text += text
        if not self._in_reply:
            _, tag, self._text = self._text.rpartition(_REPLY)
            self._in_reply = bool(tag)
        if self._in_reply:
            *sentences, self._text = _END.split(self._text)
            for sentence in sentences:
                self._learn(sentence)

    def mask(self, scores: torch.Tensor) -> None:
        """Forbid the end of a sentence that is known.

        Args:
            scores: Logits of the next token, shape (vocabulary,); modified.
        """
        if self._in_reply and _plain(self._text) in self._known:
            scores[self._vocabulary.ending] = -torch.inf

    def _learn(self, sentence: str) -> None:
        plain = _plain(sentence)
        if plain and reply_length(plain) <= MOST_WORDS:
            self._known.add(plain)


def _plain(sentence: str) -> str:
    """Return a sentence's words without what ends it, in lower case. In linear time: a caller may send any text."""
    end = len(sentence)
    while end and not sentence[end - 1].isalnum():
        end -= 1
    return " ".join(sentence[:end].lower().split())
