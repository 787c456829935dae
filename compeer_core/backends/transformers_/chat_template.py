"""Adapt conversations to what a checkpoint's chat template accepts.

Templates accept content as blocks or as plain text, with a system message or without, and none
declares which. So each template is tried with short messages when its model is loaded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from compeer_core.backends.protocol import Message
from compeer_core.errors import BackendError, CheckpointError
from compeer_core.images import Image

PROBE = "words to try the template with"

TEMPLATE_ERRORS = (TemplateError, KeyError, TypeError, ValueError)
"""Errors that a chat template raises on messages it does not support."""


class ChatTemplate:
    """The chat template of one checkpoint.

    Attributes:
        has_images: Whether the processor can prepare images.
    """

    def __init__(self, name: str, processor: Any) -> None:
        """Find out what a template accepts.

        Args:
            name: The model's name in error messages.
            processor: The model's processor, which applies the template.

        Raises:
            CheckpointError: There is no chat template, or it cannot be used.
        """
        self.has_images = getattr(processor, "image_processor", None) is not None
        self._name = name
        self._processor = processor
        if not getattr(processor, "chat_template", None):
            raise CheckpointError(
                f"{name}: there is no chat template (chat_template.jinja); use an instruction-tuned "
                "checkpoint, or add a template to its folder"
            )
        question = Message("user", (PROBE,))
        # Newer templates accept blocks of text and images; text-only ones would print the list.
        self._content_is_text = False
        text = self.tried([question])
        if PROBE not in text or "'type'" in text:
            self._content_is_text = True
            text = self.tried([question])
        if PROBE not in text:
            raise CheckpointError(
                f"{name}: the chat template cannot render one user message; "
                "check chat_template.jinja"
            )
        self._accepts_system = PROBE in self.tried(
            [Message("system", (PROBE,)), Message("user", ("Hi",))]
        )

    def render(
        self, messages: Sequence[Message], *, reply: bool, thinking: bool | None = None
    ) -> str:
        """Return the conversation as text, with one placeholder per image.

        Args:
            messages: The conversation.
            reply: Whether the text ends where an assistant's turn begins.
            thinking: The template's `enable_thinking`; None does not set it.

        Raises:
            BackendError: The template does not accept the conversation, or its images.
        """
        if not self._accepts_system:
            messages = _without_system(messages)
        if any(isinstance(part, Image) for message in messages for part in message.content) and (
            not self.has_images or self._content_is_text
        ):
            raise BackendError(f"{self._name} cannot see images; send the message without one")
        try:
            return self._apply(messages, reply=reply, thinking=thinking)
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message.role for message in messages)
            raise BackendError(
                f"{self._name}: the chat template does not accept these messages ({roles}): {error}"
            ) from error

    def tried(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """Return the rendered messages, or an empty text if the template rejects them."""
        try:
            return self._apply(messages, reply=reply)
        except TEMPLATE_ERRORS:
            return ""

    def _apply(
        self, messages: Sequence[Message], *, reply: bool = False, thinking: bool | None = None
    ) -> str:
        conversation = [
            {
                "role": message.role,
                "content": message.text
                if self._content_is_text
                else [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                    for part in _joined(message.content)
                ],
            }
            for message in messages
        ]
        rendered: str = self._processor.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=reply,
            **({} if thinking is None else {"enable_thinking": thinking}),
        )
        return rendered


def _joined(content: Sequence[str | Image]) -> list[str | Image]:
    """Join consecutive texts, so that templates put nothing between them."""
    joined: list[str | Image] = []
    for part in content:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the system text in front of the first user message."""
    words = "\n\n".join(message.text for message in messages if message.role == "system")
    others = [message for message in messages if message.role != "system"]
    if not words:
        return others
    for at, message in enumerate(others):
        if message.role == "user":
            others[at] = replace(message, content=(f"{words}\n\n", *message.content))
            return others
    return [Message("user", (words,)), *others]
