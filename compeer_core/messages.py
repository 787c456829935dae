"""Messages of a chat, as every model reads them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from compeer_core.images import Image

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One message: text and images in the order in which the model reads them."""

    role: Role
    content: tuple[str | Image, ...]

    @property
    def text(self) -> str:
        """The text without the images."""
        return "".join(part for part in self.content if isinstance(part, str))


def without_images(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages without their images, for a model that sees none."""
    return tuple(
        replace(message, content=tuple(part for part in message.content if isinstance(part, str)))
        for message in messages
    )
