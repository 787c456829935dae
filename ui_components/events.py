"""Which handler answers which event, said the same way for every screen."""

from collections.abc import Callable, Sequence

from gradio.components import Component


def on(
    event: Callable[..., object],
    handler: Callable[..., object],
    inputs: Sequence[Component],
    outputs: Sequence[Component],
    *,
    streams: bool = False,
) -> None:
    """Let a handler answer an event.

    Gradio's queue lets everyone in at once: who waits for a model waits in `waiting.Line`.

    Args:
        event: The method of a component that names the event, such as ``button.click``.
        handler: A function, or a generator where ``streams`` is set.
        inputs: What it reads.
        outputs: What it may change.
        streams: It yields more than once; only such handlers need the queue.
    """
    event(
        handler,
        list(inputs),
        list(outputs),
        queue=streams,
        show_progress="hidden",
        api_visibility="private",
        concurrency_limit=None,
    )
