"""Ctrl-C: of the `cukit` command, of work that saves its state first, and while NVRTC compiles.

The command ends with one line on stderr and exit code 130, within about a second. KeyboardInterrupt
alone does not do that: while modules are imported it ends in a traceback, or is lost in an import
that catches it; and it waits until C code returns, which a compiler or a kernel in the emulator may
not do for a minute.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit code, as shells have it for a program that SIGINT ended."""

GRACE_SECONDS = 0.7
"""What a command has, after Ctrl-C, to end by itself."""

_SIGACTION_BYTES = 256
"""More than struct sigaction has."""

_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"


def end_on_interrupt_while_starting() -> None:
    """Where this process is the `cukit` command, Ctrl-C ends it at once until `in_time` begins."""
    if _is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _is_the_command() -> bool:
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program != "-m":  # what it is until Python has found the module
        return program == "cukit"
    return ["-m", "cukit"] in (sys.orig_argv[i : i + 2] for i in range(len(sys.orig_argv)))


@contextmanager
def in_time() -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt, and ends the process if that takes longer
    than GRACE_SECONDS; behind it, at once. For the main thread of a command."""
    if signal.getsignal(signal.SIGINT) not in (_end, signal.default_int_handler):
        yield  # ignored, as for a job in the background
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    # Written by the signal itself, whatever the main thread is doing.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def _watch(interrupts: int) -> None:
    """Ends the process some time after a signal that nothing is said to wait for."""
    while True:
        for number in os.read(interrupts, 64):
            if number == signal.SIGINT and not StopRequest.takes():
                time.sleep(GRACE_SECONDS)
                _end()


def _end(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """No cleanup: threads, imports and libraries are left where they are."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
    os.write(2, b"cukit: interrupted\n")
    os._exit(INTERRUPTED)


class StopRequest:
    """Within `with StopRequest() as stop:` the first Ctrl-C sets `stop.requested`, for work that
    saves its state before it ends; the second raises KeyboardInterrupt.

    Only the main thread handles signals; elsewhere the flag stays False.
    """

    _current: StopRequest | None = None
    _taken = False
    requested = False

    def __enter__(self) -> StopRequest:
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            StopRequest._current = self
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *exc_info: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            StopRequest._current = None

    @classmethod
    def takes(cls) -> bool:
        """Whether an interrupt was the first one within a block."""
        current = cls._current
        if current is None or current._taken:
            return False
        current._taken = True
        return True


class _PythonsHandler:
    """`with python_handles_interrupts:` SIGINT stays with Python while NVRTC compiles.

    NVRTC handles the signal itself and ends the process with code 4; of two threads that compile at
    once, the last one leaves its handler behind. So the handler that was there is put back each
    millisecond, and at the end. For any number of threads.
    """

    _PERIOD_SECONDS = 0.001

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._done = threading.Event()
        self._action = ctypes.create_string_buffer(_SIGACTION_BYTES)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                ctypes.CDLL(None).sigaction(signal.SIGINT, None, self._action)
                self._done = threading.Event()
                threading.Thread(target=self._keep, args=(self._done,), daemon=True).start()

    def _keep(self, done: threading.Event) -> None:
        while not done.wait(self._PERIOD_SECONDS):
            self._put_back()

    def _put_back(self) -> None:
        with self._lock:
            if self._users:
                ctypes.CDLL(None).sigaction(signal.SIGINT, self._action, None)

    def __exit__(self, *exc_info: object) -> None:
        self._put_back()
        with self._lock:
            self._users -= 1
            if not self._users:
                self._done.set()


python_handles_interrupts = _PythonsHandler()
