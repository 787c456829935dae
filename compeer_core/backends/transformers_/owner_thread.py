"""The one thread that runs a set of weights, so that visitors can share them.

Everything that uses torch is a job on this thread, in order of arrival: one job at a time changes a
model's adapter, cache and position offsets. Turns that are being generated give way when another
job waits (see `scheduler`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from compeer_core.errors import BackendError

Result = TypeVar("Result")


class OwnerThread:
    """Runs jobs one after another, in order of arrival."""

    def __init__(self, name: str) -> None:
        self.closed = False
        self._lock = threading.Lock()
        self._waiting = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def has_waiting_job(self) -> bool:
        """Whether a job is queued that has not begun."""
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
        """End running turns and the thread. May be called twice."""
        self.closed = True
        self._executor.shutdown(wait=False)

    def _run(self, job: Callable[[], Result]) -> Result:
        with self._lock:
            self._waiting -= 1
        return job()
