"""Worker processes that are killed when their parent process ends, for any reason."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from cukit.errors import CukitError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run_in_workers(
    function: Callable[[_Task], _Result], tasks: Sequence[_Task], count: int
) -> Iterator[_Result]:
    """Runs `function(task)` for all tasks in at most `count` processes; yields results as they
    complete.

    The processes are spawned, because CUDA does not work in forked processes. They are killed when
    the iterator is closed or this process ends. Exceptions raised by `function` are re-raised here.
    Raises CukitError if a worker is killed.
    """
    spawn = multiprocessing.get_context("spawn")
    left = list(reversed(tasks))
    workers: dict[Any, BaseProcess] = {}  # by connection
    try:
        with _sigint_blocked():
            for _ in range(min(count, len(left))):
                ours, theirs = spawn.Pipe()
                worker = spawn.Process(target=_serve, args=(function, theirs, os.getpid()))
                worker.start()
                theirs.close()
                workers[ours] = worker
        for connection in workers:
            connection.send(left.pop())
        while workers:
            wait(workers)
            for connection in [each for each in workers if each.poll()]:
                result, error = _receive(connection)
                if error is not None:
                    raise error
                if left:
                    connection.send(left.pop())
                else:
                    connection.close()  # ends the worker
                    workers.pop(connection).join()
                yield result
    finally:
        for process in workers.values():
            process.kill()


def _receive(connection: Any) -> tuple[Any, Exception | None]:
    try:
        answer: tuple[Any, Exception | None] = connection.recv()
    except (EOFError, ConnectionResetError):
        raise CukitError(
            "a worker process was killed, perhaps for lack of memory; try fewer workers"
        ) from None
    return answer


def _serve(function: Callable[[Any], Any], connection: Any, parent: int) -> None:
    """Main loop of a worker: receives tasks and sends results until the connection closes."""
    end_with_parent(parent)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, Exception | None] = function(task), None
        except Exception as error:
            answer = None, error
        try:
            connection.send(answer)
        except Exception as error:
            what = "result" if answer[1] is None else type(answer[1]).__name__
            connection.send((None, CukitError(f"a worker's {what} cannot be sent: {error}")))


def end_with_parent(parent: int) -> None:
    """Makes Linux kill this process when `parent`, the process that started it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had already ended
        os._exit(1)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started within the block ignore Ctrl-C; their parent ends them."""
    # Starting the resource tracker unblocks SIGINT, so it is started before SIGINT is blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
