"""Defers Ctrl-C while the state of a pool is inconsistent."""

from __future__ import annotations

import signal
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

_Handler = Callable[[int, "FrameType | None"], Any]

_SIGINT = int(signal.SIGINT)
# The C functions: their wrappers in `signal` convert numbers to enums and take ten times as long.
_in_c: Any = import_module("_signal")
_get_handler: Callable[[int], Any] = _in_c.getsignal
_set_handler: Callable[[int, Any], Any] = _in_c.signal


class Uninterrupted:
    """`with Uninterrupted():` defers an interrupt to the end of the block.

    At the end, the handler of SIGINT is called, which raises KeyboardInterrupt unless the program
    has set another handler. Python runs signal handlers in the main thread only, so in other
    threads this class does nothing. A nested block does nothing either: the outermost block defers.
    """

    _handler: _Handler | None = None
    _interrupted = False
    _frame: FrameType | None = None

    def __enter__(self) -> None:
        handler = _get_handler(_SIGINT)
        # Not callable: SIGINT is ignored, ends the process, or was not installed by Python.
        if callable(handler) and not isinstance(_owner_of(handler), Uninterrupted):
            try:
                _set_handler(_SIGINT, self._note)
            except ValueError:  # not the main thread
                return
            self._handler = handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted, self._frame = True, frame

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _set_handler(_SIGINT, self._handler)
            if self._interrupted:
                self.deliver()

    def deliver(self) -> None:
        """Delivers a deferred interrupt."""
        if self._interrupted and self._handler is not None:
            frame, self._interrupted, self._frame = self._frame, False, None
            self._handler(_SIGINT, frame)

    def suspend(self) -> bool:
        """Restores the previous handler; returns False outside the main thread."""
        try:
            _set_handler(_SIGINT, self._handler)
        except ValueError:
            return False
        return True

    def resume(self) -> None:
        """Undoes `suspend`."""
        _set_handler(_SIGINT, self._note)


class InterruptedAsUsual:
    """Lifts an enclosing Uninterrupted inside this block: interrupts take effect immediately, while
    a callback of the program runs."""

    _block: Uninterrupted | None = None

    def __enter__(self) -> None:
        # A class, because a generator interrupted before the block begins would not restore the
        # handler until it is garbage-collected.
        block = _owner_of(_get_handler(_SIGINT))
        if isinstance(block, Uninterrupted) and block.suspend():
            self._block = block
            try:
                block.deliver()
            except BaseException:
                block.resume()
                raise

    def __exit__(self, *_: object) -> None:
        if self._block is not None:
            self._block.resume()


def _owner_of(handler: Any) -> Any:
    return getattr(handler, "__self__", None)
