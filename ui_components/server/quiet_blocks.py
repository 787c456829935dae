"""Blocks whose errors reveal nothing about a visitor.

Gradio prints a traceback for every exception of a handler or component. Its message often quotes
the input, and any malformed call causes one. Here the page gets one sentence, the log type and
place.
"""

import logging
import traceback
from typing import Any

import gradio as gr

logger = logging.getLogger(__name__)

SENTENCE = "the request is invalid: a value has a wrong type or is not one of the choices"


class QuietBlocks(gr.Blocks):
    """`gradio.Blocks` that turns every error into a `gradio.Error` without a printed traceback."""

    async def process_api(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a handler.

        Raises:
            gradio.Error: The handler's own, or one in place of any other exception.
        """
        try:
            return await super().process_api(*args, **kwargs)
        except gr.Error as error:
            error.print_exception = False
            raise
        except Exception as error:  # noqa: BLE001  (the last resort of every handler)
            places = "".join(traceback.format_tb(error.__traceback__, limit=-3))
            logger.error("a handler failed: %s\n%s", type(error).__name__, places)
            raise gr.Error(SENTENCE, print_exception=False) from None
