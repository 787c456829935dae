"""Wiring of handlers to events, and reading of what a page's scripts send."""

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

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
    trigger_mode: Literal["once", "multiple", "always_last"] | None = None,
) -> None:
    """Register a handler for an event.

    Gradio's queue admits everyone at once: visitors wait for a model in an `AdmissionQueue`.

    Args:
        event: The method of a component that names the event, such as ``button.click``.
        handler: A function, or an asynchronous generator if ``streams`` is set.
        inputs: What it reads.
        outputs: What it may change.
        streams: It yields more than once, so it needs gradio's queue. It starts once its page listens.
        trigger_mode: What happens to an event during an earlier one; None is gradio's default.
    """
    event(
        _once_heard(handler) if streams else handler,
        list(inputs),
        list(outputs),
        queue=streams,
        show_progress="hidden",
        api_visibility="private",
        concurrency_limit=None,
        trigger_mode=trigger_mode,
    )


def _once_heard(handler: Handler) -> Handler:
    """Start only when the page listens: nothing is stored or generated for one that does not.

    When the page leaves, gradio closes the handler at its next yield.
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


def event_data(event: gr.EventData) -> Mapping[str, Any]:
    """Return what a script sent with an event, empty if it is not an object."""
    return event._data if isinstance(event._data, Mapping) else {}


def number_in(data: Mapping[str, Any], name: str) -> int:
    """Return an integer that a script sent, -1 for anything else."""
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def text_in(data: Mapping[str, Any], name: str) -> str:
    """Return a string that a script sent, empty for anything else."""
    value = data.get(name)
    return value if isinstance(value, str) else ""
