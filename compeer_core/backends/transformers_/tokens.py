"""Tokens of one tokenizer: labels, control tokens, and text from tokens as they arrive."""

import unicodedata
from collections.abc import Sequence
from typing import Any

from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.errors import ConfigError
from compeer_core.messages import Message

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes to where bytes are not (or not yet) a character."""


class LabelTokens:
    """Tokens of labels such as "True", for one tokenizer and chat template.

    A verdict is read from one position, so each label must be one token. Loading a judge checks
    this, and so does training one.
    """

    def __init__(self, name: str, template: ChatTemplate, tokenizer: Any) -> None:
        self._name = name
        self._template = template
        self._tokenizer = tokenizer
        self._tokens_by_label: dict[str, int] = {}

    def __call__(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Return the token of each label at the beginning of an assistant's turn.

        Raises:
            ConfigError: A label is not one token, or two labels are the same token.
        """
        offenders = []
        for label in labels:
            if label in self._tokens_by_label:
                continue
            token = self._first_token(label)
            if token is None:
                offenders.append(repr(label))
            else:
                self._tokens_by_label[label] = token
        if offenders:
            raise ConfigError(
                f"{self._name}: {', '.join(offenders)} must be one token each for this tokenizer, "
                "since a verdict is read from one position; choose other words or another model"
            )
        tokens = tuple(self._tokens_by_label[label] for label in labels)
        if len(set(tokens)) < len(set(labels)):
            raise ConfigError(f"{self._name}: two of {', '.join(labels)} are the same token")
        return tokens

    def _first_token(self, word: str) -> int | None:
        """Return the token of a word as an assistant's whole turn, or None if it is several tokens."""
        question = Message("user", ("Hi",))
        begun = self._tokens(self._template.render([question], reply=True))
        answered = [question, Message("assistant", (word,))]
        whole = self._tokens(self._template.render(answered, reply=False))
        if whole[: len(begun)] == begun:
            token = whole[len(begun)] if len(whole) > len(begun) else None
            is_word = token is not None and self._tokenizer.decode([token]).strip() == word
            return token if is_word else None
        # The template begins past answers differently from the next one.
        tokens = self._tokens(word)
        return tokens[0] if len(tokens) == 1 else None

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the control tokens of a model, which untrusted text must not contain.

    `prompts.neutralise` defuses them: too few, and a seeker can end their own message or open a
    tag; too many, and plain words are damaged. Control tokens are those that the tokenizer marks as
    special, and all added tokens but plain words. (Some words, such as a small model's verdicts, are
    added so that each is one token.)
    """
    added = tokenizer.added_tokens_decoder.values()
    control = {str(token) for token in added if token.special or not _is_plain(str(token))}
    control.update(tokenizer.all_special_tokens)
    return tuple(sorted(token for token in control if token.strip()))


def _is_plain(token: str) -> bool:
    """Whether a token is plain words, in any script: some write vowels as combining marks."""
    return all(
        character.isspace() or character in "'’-" or unicodedata.category(character)[0] in "LMN"
        for character in token
    )


class TextDecoder:
    """Decodes tokens as they arrive, as early as possible but never half a character.

    Text that ends in replacement characters may be the beginning of a character whose other bytes
    are in the next tokens; it is held back until then.
    """

    def __init__(self, tokenizer: Any, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self.restart([])

    def restart(self, context: Sequence[int]) -> None:
        """Restart after some tokens, whose text is not returned again."""
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
        """The number of tokens behind the last piece of text, and that text."""
        return len(self._group), self._emitted

    def _decode(self, ids: Sequence[int]) -> str:
        shown = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
