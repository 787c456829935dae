"""Turns Ctrl-C and SIGTERM into a request to stop, so that a stage can save its state first.

```python
with StopRequest() as stop:
    while not done and not stop.requested:
        ...
```
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

Handler = Callable[[int, FrameType | None], Any] | int | None


class StopRequest:
    """Records the first Ctrl-C or SIGTERM within a `with` block; a second one stops immediately.

    The previous signal handlers are restored at the end of the block. Python handles signals in the
    main thread only; in other threads this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether a signal has arrived."""
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
