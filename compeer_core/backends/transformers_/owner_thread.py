"""The one thread that runs a set of weights, so that visitors can share them.

Everything that touches torch is a job on this thread, in the order of arrival: a model's adapter,
its cache and its position offsets are changed by one job at a time. The thread also knows whether
somebody waits, which is when the turns that are being written give way (see `rounds`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from compeer_core.errors import BackendError

Result = TypeVar("Result")


class OwnerThread:
    """The one thread that runs a set of weights: jobs in the order in which they came."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._lock = threading.Lock()
        self._waiting = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def somebody_waits(self) -> bool:
        """Whether a job has come that has not been begun."""
        return self._waiting > 0

    def submit(self, job: Callable[[], Result]) -> "Future[Result]":
        """Queue a job.

        Raises:
            BackendError: The model was closed.
        """
        with self._lock:
            self._waiting += 1
        try:
            return self._executor.submit(self._run, job)
        except RuntimeError as error:
            with self._lock:
                self._waiting -= 1
            raise BackendError("the model was closed") from error

    def call(self, job: Callable[[], Result]) -> Result:
        """Queue a job and wait for its result."""
        return self.submit(job).result()

    def close(self) -> None:
        """End the turns that are being written, and the thread with them. May be called twice."""
        self.closed = True
        self._executor.shutdown(wait=False)

    def _run(self, job: Callable[[], Result]) -> Result:
        with self._lock:
            self._waiting -= 1
        return job()
