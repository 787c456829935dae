"""Ctrl-C and SIGTERM as a wish, so that a stage can save before it stops.

```python
with StopRequest() as stopping:
    while not done and not stopping.asked:
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
    """Notes the first Ctrl-C or SIGTERM of a `with` block; the second one stops at once, as ever.

    What a signal did before is put back at the end of the block, so that the next stage of a recipe
    can be stopped as well. Only the main thread can hear signals; elsewhere nothing is noted.
    """

    def __init__(self) -> None:
        self.asked = False
        """Whether the person wants the work to stop."""
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
