"""Messages of a chat, as every model reads them."""

from dataclasses import dataclass
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
