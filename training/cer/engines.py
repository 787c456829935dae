"""Where the work of a step runs: in this process, or on Ray Data."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


class Engine(Protocol):
    """Applies a function to a stream."""

    def map(
        self, function: Callable[[Iterator[In]], Iterator[Out]], items: Iterable[In]
    ) -> Iterator[Out]:
        """Yield what the function makes of the items, in their order.

        An engine may cut the stream and apply the function to each piece, so what it makes of an
        item must not depend on the others. Function and items are picklable.
        """
        ...


class LocalEngine:
    """This process: the function sees the whole stream."""

    def map(
        self, function: Callable[[Iterator[In]], Iterator[Out]], items: Iterable[In]
    ) -> Iterator[Out]:
        return function(iter(items))
