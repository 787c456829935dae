"""What tests of migrations do in processes of their own; it imports no more than that takes.

A process is forked from one that has imported the store already, so that it starts in milliseconds.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import alembic.op

from compeer_core.votes.database import Database
from compeer_core.votes.store import VoteStore


def started(function: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Start a process that runs a function of this module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def open_and_close(url: str) -> None:
    VoteStore(url).close()


def open_and_die(url: str, operation: str, times: int) -> None:
    """Open the database and die when a migration is about to do something for the nth time."""
    original, left = getattr(alembic.op, operation), times

    def killing(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(alembic.op, operation, killing)
    Database(url)
