"""Handles Ctrl-C: in the `cukit` command, in work that saves its state, and during compilation.

The command ends with one line on stderr and exit code 130, within about a second. KeyboardInterrupt
alone does not ensure this: during imports it prints a traceback, or is swallowed by an import that
catches it; and it is delayed until C code returns, which takes a compiler or an emulated kernel up
to a minute.
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
"""The exit code that shells report for a program terminated by SIGINT."""

GRACE_SECONDS = 0.7
"""Time that a command has after Ctrl-C to end normally."""

_SIGACTION_BYTES = 256
"""At least sizeof(struct sigaction)."""

_SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"


def end_on_interrupt_while_starting() -> None:
    """In the `cukit` command, makes Ctrl-C exit immediately until `interruptible` is entered."""
    if _is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _is_the_command() -> bool:
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program != "-m":  # the value until Python has located the module
        return program == "cukit"
    return ["-m", "cukit"] in (sys.orig_argv[i : i + 2] for i in range(len(sys.orig_argv)))


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt and, after GRACE_SECONDS, ends the process;
    after the block it ends the process immediately. For the main thread of a command."""
    if signal.getsignal(signal.SIGINT) not in (_end, signal.default_int_handler):
        yield  # SIGINT is ignored, e.g. in a background job
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    # Python's C-level signal handler writes to the pipe, even while the main thread runs C code.
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def _watch(interrupts: int) -> None:
    """Ends the process GRACE_SECONDS after a SIGINT that no StopRequest handles."""
    while True:
        for number in os.read(interrupts, 64):
            if number == signal.SIGINT and not StopRequest.claims_interrupt():
                time.sleep(GRACE_SECONDS)
                _end()


def _end(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Exits without cleanup of threads, imports and libraries."""
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
    os.write(2, b"cukit: interrupted\n")
    os._exit(INTERRUPTED)


class StopRequest:
    """Within `with StopRequest() as stop:` the first Ctrl-C sets `stop.requested`, so that work can
    save its state before it ends; the second raises KeyboardInterrupt.

    Only the main thread handles signals; in other threads the flag stays False.
    """

    _current: StopRequest | None = None
    _claimed = False
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
    def claims_interrupt(cls) -> bool:
        """True for the first interrupt within a block."""
        current = cls._current
        if current is None or current._claimed:
            return False
        current._claimed = True
        return True


class _PythonHandler:
    """`with python_handles_interrupts:` keeps Python's SIGINT handler while NVRTC compiles.

    NVRTC installs its own handler, which ends the process with code 4; if two threads compile
    at once, the last one leaves it installed. The previous handler is therefore restored every
    millisecond, and at the end. May be entered by several threads.
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


python_handles_interrupts = _PythonHandler()
