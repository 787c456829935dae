"""Which token stands for a label such as "True": a verdict is read from one position.

Loading a judge asks this, and so does training one: a word of several tokens could be trained, and
would be refused afterwards.
"""

from collections.abc import Sequence
from typing import Any

from compeer_core.backends.protocol import Message
from compeer_core.backends.transformers_.chat_template import ChatTemplate
from compeer_core.errors import ConfigError


class LabelTokens:
    """The tokens of labels for one tokenizer and chat template, each looked up once."""

    def __init__(self, name: str, template: ChatTemplate, tokenizer: Any) -> None:
        self._name = name
        self._template = template
        self._tokenizer = tokenizer
        self._found: dict[str, int] = {}

    def __call__(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Return the token with which an assistant's turn begins that is the label, for each.

        Raises:
            ConfigError: A label is not one token, or two labels are the same; it names them.
        """
        offenders = []
        for label in labels:
            if label in self._found:
                continue
            token = self._first_token(label)
            if token is None:
                offenders.append(repr(label))
            else:
                self._found[label] = token
        if offenders:
            raise ConfigError(
                f"{self._name}: {', '.join(offenders)} must be one token each for this tokenizer, "
                "since a verdict is read from one position; choose other words or another model"
            )
        tokens = tuple(self._found[label] for label in labels)
        if len(set(tokens)) < len(set(labels)):
            raise ConfigError(f"{self._name}: two of {', '.join(labels)} are the same token")
        return tokens

    def _first_token(self, word: str) -> int | None:
        """Return the token that a word is as an assistant's whole turn, or None if it is several."""
        question = Message("user", ("Hi",))
        begun = self._tokens(self._template.render([question], reply=True))
        answered = [question, Message("assistant", (word,))]
        whole = self._tokens(self._template.render(answered, reply=False))
        if whole[: len(begun)] == begun:
            token = whole[len(begun)] if len(whole) > len(begun) else None
            is_word = token is not None and self._tokenizer.decode([token]).strip() == word
            return token if is_word else None
        # The template writes something else before answers of the past than before the next one.
        tokens = self._tokens(word)
        return tokens[0] if len(tokens) == 1 else None

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
