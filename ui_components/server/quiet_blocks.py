"""Blocks whose errors tell nothing of a visitor: one sentence for the page, type and place for the log.

Gradio prints a traceback for whatever a handler or a component raises. The message at its end often
quotes the value that came in, and any malformed call causes one.
"""

import logging
import traceback
from typing import Any

import gradio as gr

logger = logging.getLogger(__name__)

SENTENCE = "the request cannot be used: a value has a wrong type, or none of those that are offered"


class QuietBlocks(gr.Blocks):
    """`gradio.Blocks` that turns every error into a `gradio.Error` which is not printed."""

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
            logger.error("a handler ended in a %s\n%s", type(error).__name__, places)
            raise gr.Error(SENTENCE, print_exception=False) from None
