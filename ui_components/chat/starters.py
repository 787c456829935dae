"""The situations that somebody may start from, offered where nothing has been said yet."""

from collections.abc import Mapping
from typing import Any

import gradio as gr

from ui_components.shared.texts import Texts

STARTERS = (1, 2, 3)


def with_starter(message: Mapping[str, Any] | None, number: int | None, texts: Texts) -> Any:
    """Return what stands in a message box once a starter was pressed.

    Another starter gives way to it; words of the visitor's own stay in front.

    Args:
        message: What stands there: `text` and `files`.
        number: Of `STARTERS`; anything else changes nothing.
        texts: The words.
    """
    if number not in STARTERS:
        return gr.skip()
    offered = {texts(f"chat.starter_{each}") for each in STARTERS}
    typed = (message or {}).get("text") or ""
    starter = texts(f"chat.starter_{number}")
    text = starter if not typed.strip() or typed in offered else f"{typed}\n{starter}"
    return {"text": text, "files": (message or {}).get("files") or []}
