"""Which handler answers which event, said the same way for every screen."""

import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import gradio as gr
from gradio.components import Component

from ui_components.server.admission import call_of

Handler = Callable[..., Any]


def on(
    event: Callable[..., object],
    handler: Handler,
    inputs: Sequence[Component],
    outputs: Sequence[Component],
    *,
    streams: bool = False,
) -> None:
    """Let a handler answer an event.

    Gradio's queue lets everyone in at once: who waits for a model waits in `waiting.AdmissionQueue`.

    Args:
        event: The method of a component that names the event, such as ``button.click``.
        handler: A function, or an asynchronous generator where ``streams`` is set.
        inputs: What it reads.
        outputs: What it may change.
        streams: It yields more than once; only such handlers need the queue. It begins when its page
            listens for what it yields.
    """
    event(
        _once_heard(handler) if streams else handler,
        list(inputs),
        list(outputs),
        queue=streams,
        show_progress="hidden",
        api_visibility="private",
        concurrency_limit=None,
    )


def _once_heard(handler: Handler) -> Handler:
    """Begin only when somebody listens: nothing is kept or written for who does not.

    When they leave, gradio closes the handler the next time that it yields.
    """

    @functools.wraps(handler)  # gradio reads the signature
    async def heard(*values: Any) -> AsyncGenerator[Any, None]:
        call = next((call_of(each) for each in values if isinstance(each, gr.Request)), None)
        if call is not None and not await call.heard():
            return
        async with aclosing(handler(*values)) as updates:
            async for update in updates:
                yield update

    return heard
