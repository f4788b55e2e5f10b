"""Work in processes of its own, which end with the process that started them, however it ends."""

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
    """`function(task)` of every task, as results come, from at most `count` processes.

    The processes are started anew: a forked one may not touch CUDA. They are killed when the
    iterator is closed, and by whatever ends this process. What `function` raises is raised here;
    CukitError if a process dies.
    """
    spawn = multiprocessing.get_context("spawn")
    left = list(reversed(tasks))
    workers: dict[Any, BaseProcess] = {}  # by connection
    try:
        with _deaf_children():
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
                    connection.close()  # which ends the worker
                    workers.pop(connection).join()
                yield result
    finally:
        for left_over in workers.values():
            left_over.kill()


def _receive(connection: Any) -> tuple[Any, Exception | None]:
    try:
        answer: tuple[Any, Exception | None] = connection.recv()
    except (EOFError, ConnectionResetError):
        raise CukitError(
            "a worker process was killed, perhaps for lack of memory; fewer at once take less"
        ) from None
    return answer


def _serve(function: Callable[[Any], Any], connection: Any, parent: int) -> None:
    """A worker's life: tasks come and results go until the other side closes."""
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
        connection.send(answer)


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when `parent`, which started it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that are started within the block never see Ctrl-C: their parent ends them."""
    # Python starts it with the first process, and lets signals through again when it has.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
