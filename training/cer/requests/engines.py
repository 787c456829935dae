"""Where the work of a step runs: in this process, or on Ray Data.

Both engines yield the same records in the same order. A `RayEngine` cuts the stream into blocks,
applies the function to each block in a worker, and yields the results in the order of the blocks.
It is for functions that treat each item by itself. What needs the order of the rows, or all of them
(counts, duplicates, sampling), belongs in the step that feeds the engine and takes its results. The
state of a function is sent to each worker, so it must be small: settings, counts, a vocabulary.

Ray is the extra `ray`. It is started here unless it runs: on this machine, or at the address in
RAY_ADDRESS. Workers read the keys of endpoints from their own environment, which on one machine is
that of this process when Ray was started; on a cluster, set the keys on its nodes. Keys are neither
sent to workers nor put into a runtime environment of Ray, which is written to its logs.
"""

import contextlib
import functools
import itertools
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
        """Yield the results of the function, in the order of the items.

        An engine may apply the function to pieces of the stream, so the results of an item must not
        depend on the others. Function and items are picklable.
        """
        ...


class LocalEngine:
    """This process: the function gets the whole stream."""

    def map(
        self, function: Callable[[Iterator[In]], Iterator[Out]], items: Iterable[In]
    ) -> Iterator[Out]:
        return function(iter(items))


LOCAL = LocalEngine()
"""The default engine of all steps."""


@dataclass(frozen=True)
class RayEngine:
    """The workers of Ray Data.

    All items are read before the first result is yielded. They are kept in Ray's object store, which
    spills to disk.
    """

    workers: int = 2
    """Processes at a time; each takes one CPU."""
    block: int = 256
    """Items that a worker gets at a time."""

    def map(
        self, function: Callable[[Iterator[In]], Iterator[Out]], items: Iterable[In]
    ) -> Iterator[Out]:
        """See `Engine.map`.

        Raises:
            ConfigError: Ray is not installed.
            Exception: Whatever the function raised, with the worker's traceback as its cause.
        """
        ray = _started(self.workers)
        references = [ray.put(_packed([block])) for block in cut(items, self.block)]
        if not references:
            return
        data = ray.data.from_arrow_refs(references)
        data.context.execution_options.preserve_order = True
        data.context.enable_progress_bars = False
        # Tasks, not actors: Ray reuses their processes for the next map, with any open generator.
        results = data.map_batches(
            functools.partial(_applied, function),
            compute=ray.data.TaskPoolStrategy(size=min(self.workers, len(references))),
            num_cpus=1,
            batch_size=None,
            batch_format="pyarrow",
        )
        for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
            for result in _unpacked(batch):
                if isinstance(result, _Failure):
                    raise result.error from WorkerFailedError(result.where)
                yield from result

    @contextlib.contextmanager
    def allowance(self, limit: int | None) -> "Iterator[SharedAllowance]":
        """Hand out an allowance of requests that all workers share; None is unlimited."""
        ray = _started(self.workers)
        counter = ray.remote(num_cpus=0)(_Counter).remote(limit)
        try:
            yield SharedAllowance(counter, limit)
        finally:
            ray.kill(counter)


class WorkerFailedError(Exception):
    """The traceback of an error in a worker."""


@dataclass(frozen=True)
class _Failure:
    error: Exception
    where: str


def _applied(function: Callable[[Iterator[Any]], Iterator[Any]], batch: Any) -> Any:
    """Apply a function to blocks, in a worker."""
    return _packed([_result(function, block) for block in _unpacked(batch)])


def _result(function: Callable[[Iterator[Any]], Iterator[Any]], block: list[Any]) -> Any:
    try:
        return list(function(iter(block)))
    except Exception as error:  # noqa: BLE001  any error is raised again in the caller's process
        return _Failure(error, traceback.format_exc())


class _Counter:
    """How many requests are left; None is unlimited."""

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
    """A `training.cer.requests.request_dispatch.Allowance` that all workers draw from."""

    counter: Any
    limit: int | None

    def take(self, count: int = 1) -> None:
        import ray

        from training.cer.requests.request_dispatch import BudgetSpentError

        if not ray.get(self.counter.take.remote(count)):
            raise BudgetSpentError(
                f"the budget is spent ({self.limit} requests were left at the start); answers so "
                "far are stored, start again to resume"
            )

    def close(self) -> None:
        """Allow no more."""
        import ray

        ray.get(self.counter.close.remote())


def _started(workers: int) -> Any:
    try:
        import ray.data
    except ImportError as error:
        raise ConfigError(
            'engine = "ray" needs the extra ray: pip install "compeer[ray]"'
        ) from error
    for name in ("ray", "ray.data"):  # Ray's internals do not belong in a run's log
        logging.getLogger(name).setLevel(logging.ERROR)
    if not ray.is_initialized():
        ray.init(
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
    if (available := int(ray.cluster_resources().get("CPU", 0))) < workers:
        raise ConfigError(f"{workers} workers take one CPU each, but Ray has {available}")
    return ray


def cut(items: Iterable[In], size: int) -> Iterator[list[In]]:
    """Yield blocks of `size` items; the last one may be shorter."""
    unread = iter(items)
    while block := list(itertools.islice(unread, size)):
        yield block


def _packed(objects: list[Any]) -> Any:
    """Return objects as a table with one column of bytes."""
    import pyarrow as pa

    column = pa.array([pickle.dumps(each) for each in objects], pa.large_binary())
    return pa.table({"block": column})


def _unpacked(table: Any) -> Iterator[Any]:
    return (pickle.loads(each.as_py()) for each in table["block"])
