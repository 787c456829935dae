"""Starters: example situations, offered in an empty conversation."""

from collections.abc import Mapping
from typing import Any

import gradio as gr

from ui_components.shared.texts import ASSETS, Texts

STARTERS = (1, 2, 3)
PICTURE_STARTER = 4
"""Comes with `PICTURE`."""
CHAT_STARTERS = (*STARTERS, PICTURE_STARTER)
PICTURE = ASSETS / "starters" / "table.png"


def with_starter(message: Mapping[str, Any] | None, number: int | None, texts: Texts) -> Any:
    """Return the content of the message box after a starter was selected.

    It replaces another starter; the visitor's own text stays in front.

    Args:
        message: The current content: `text` and `files`.
        number: One of `CHAT_STARTERS`; anything else changes nothing.
        texts: The words.
    """
    if number not in CHAT_STARTERS:
        return gr.skip()
    offered = {texts(f"chat.starter_{each}") for each in CHAT_STARTERS}
    typed = (message or {}).get("text") or ""
    starter = texts(f"chat.starter_{number}")
    text = starter if not typed.strip() or typed in offered else f"{typed}\n{starter}"
    return {"text": text, "files": (message or {}).get("files") or []}
