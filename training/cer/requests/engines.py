"""Where the work of a step runs: in this process, or on Ray Data.

Both make the same records in the same order: a `RayEngine` cuts the stream into blocks, applies the
function to each block in some worker, and hands the results back in the blocks' order. So it is for
functions that make something of each item by itself. What needs the order of the rows or all of them
(counts, rows that were there before, what is drawn) is left to the step that hands out the items
and takes the results; what a function needs to know beside its item is small, since each worker
gets it: settings, and counts or a vocabulary that were made before.

Ray is the extra `ray`, and is started here unless it runs: on this machine, or where the variable
RAY_ADDRESS says. Workers get keys of endpoints from their own environment, which on one machine is
that of this process at the time Ray was started; on a cluster, set them on its nodes. They are never
part of what is sent to a worker, and not handed to Ray as a runtime environment, which Ray writes to
its logs.
"""

import contextlib
import functools
import logging
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from compeer_core.errors import ConfigError

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


LOCAL = LocalEngine()
"""What a step uses unless it is told otherwise."""


@dataclass(frozen=True)
class RayEngine:
    """The workers of Ray Data.

    All items are read before the first result comes. They lie in Ray's object store, which moves to
    the disk what its memory cannot hold.
    """

    workers: int = 2
    """Processes that work at the same time; each takes one CPU."""
    block: int = 256
    """Items that a worker gets at a time."""

    def map(
        self, function: Callable[[Iterator[In]], Iterator[Out]], items: Iterable[In]
    ) -> Iterator[Out]:
        """See `Engine.map`.

        Raises:
            ConfigError: Ray is not installed.
            Exception: What the function raised, with the worker's traceback as its cause.
        """
        ray = _started(self.workers)
        places = [ray.put(_table(block)) for block in _blocks(items, self.block)]
        if not places:
            return
        data = ray.data.from_arrow_refs(places)
        data.context.execution_options.preserve_order = True
        data.context.enable_progress_bars = False
        # Tasks, not actors: Ray keeps their processes for the next map, and with them whatever
        # generator is open there.
        made = data.map_batches(
            functools.partial(_applied, function),
            compute=ray.data.TaskPoolStrategy(size=min(self.workers, len(places))),
            num_cpus=1,
            batch_size=None,
            batch_format="pyarrow",
        )
        for batch in made.iter_batches(batch_size=None, batch_format="pyarrow"):
            for packed in batch["block"]:
                result = pickle.loads(packed.as_py())
                if isinstance(result, _Failure):
                    raise result.error from WorkerFailedError(result.where)
                yield from result

    @contextlib.contextmanager
    def allowance(self, limit: int | None) -> "Iterator[SharedAllowance]":
        """Hand out a count of requests that all workers share; None is without end."""
        ray = _started(self.workers)
        counter = ray.remote(num_cpus=0)(_Counter).remote(limit)
        try:
            yield SharedAllowance(counter, limit)
        finally:
            ray.kill(counter)


class WorkerFailedError(Exception):
    """Where in a worker an error came from."""


@dataclass(frozen=True)
class _Failure:
    error: Exception
    where: str


def _applied(function: Callable[[Iterator[Any]], Iterator[Any]], batch: Any) -> Any:
    """Apply a function to blocks, in a process of Ray's."""
    return _packed([_result(function, packed.as_py()) for packed in batch["block"]])


def _result(function: Callable[[Iterator[Any]], Iterator[Any]], packed: bytes) -> Any:
    try:
        return list(function(iter(pickle.loads(packed))))
    except Exception as error:  # noqa: BLE001  whatever it is, it is raised again at home
        return _Failure(error, traceback.format_exc())


class _Counter:
    """How many requests are left; None is without end."""

    def __init__(self, left: int | None) -> None:
        self._left = left

    def take(self, count: int) -> bool:
        if self._left is None:
            return True
        if count > self._left:
            return False
        self._left -= count
        return True

    def close(self) -> None:
        self._left = 0


@dataclass(frozen=True)
class SharedAllowance:
    """An allowance that all workers draw from (`training.cer.requests.request_dispatch.Allowance`)."""

    counter: Any
    limit: int | None

    def take(self, count: int = 1) -> None:
        import ray

        from training.cer.requests.request_dispatch import BudgetSpentError

        if not ray.get(self.counter.take.remote(count)):
            raise BudgetSpentError(
                f"the budget is spent ({self.limit} requests were left of it at the start); what "
                "was answered is kept, and the next start goes on from there"
            )

    def close(self) -> None:
        """Allow no more, whatever was left."""
        import ray

        ray.get(self.counter.close.remote())


def _started(workers: int) -> Any:
    try:
        import ray.data
    except ImportError as error:
        raise ConfigError(
            'engine = "ray" needs the extra ray: pip install "compeer[ray]"'
        ) from error
    # What Ray says of its own doings is no business of a run's log.
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not ray.is_initialized():
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
    if (there := int(ray.cluster_resources().get("CPU", 0))) < workers:
        raise ConfigError(f"{workers} workers take a CPU each, and Ray has {there}")
    return ray


def _blocks(items: Iterable[In], size: int) -> Iterator[list[In]]:
    block: list[In] = []
    for item in items:
        block.append(item)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def _table(block: list[Any]) -> Any:
    return _packed([block])


def _packed(objects: list[Any]) -> Any:
    """Objects as a column of bytes: what they are is nobody's business but ours."""
    import pyarrow as pa

    return pa.table({"block": pa.array([pickle.dumps(one) for one in objects], pa.large_binary())})
