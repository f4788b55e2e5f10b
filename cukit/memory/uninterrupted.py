"""Ctrl-C while the pool's books are open: it takes effect when they are in order again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

_Handler = Callable[[int, "FrameType | None"], Any]

_SIGINT = int(signal.SIGINT)
# The functions in C: around them `signal` makes enums of numbers, which takes ten times as long.
_in_c: Any = import_module("_signal")
_get_handler: Callable[[int], Any] = _in_c.getsignal
_set_handler: Callable[[int, Any], Any] = _in_c.signal


class Uninterrupted:
    """`with Uninterrupted():` an interrupt takes effect at the end of the block.

    That is, the handler of SIGINT (which raises KeyboardInterrupt, unless the program has set
    another one) is called then. Python runs handlers in the main thread only, so in other threads
    this does nothing; nor inside another such block, whose end is the later one.
    """

    _handler: _Handler | None = None
    _interrupted = False
    _frame: FrameType | None = None

    def __enter__(self) -> None:
        handler = _get_handler(_SIGINT)
        # Not callable: ignored, or the end of the process, or not Python's.
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
                self.pass_on()

    def pass_on(self) -> None:
        """Lets an interrupt that came meanwhile take effect."""
        if self._interrupted and self._handler is not None:
            frame, self._interrupted, self._frame = self._frame, False, None
            self._handler(_SIGINT, frame)

    def lift(self) -> bool:
        """Puts the handler back that was there, if this is the thread that runs it."""
        try:
            _set_handler(_SIGINT, self._handler)
        except ValueError:
            return False
        return True

    def lower(self) -> None:
        """Undoes `lift`."""
        _set_handler(_SIGINT, self._note)


class InterruptedAsUsual:
    """Lifts what Uninterrupted does, for code of somebody else in the middle of such a block."""

    _shield: Uninterrupted | None = None

    def __enter__(self) -> None:
        # No generator: one that is interrupted on its way into the block ends at some later time.
        shield = _owner_of(_get_handler(_SIGINT))
        if isinstance(shield, Uninterrupted) and shield.lift():
            self._shield = shield
            try:
                shield.pass_on()
            except BaseException:
                shield.lower()
                raise

    def __exit__(self, *_: object) -> None:
        if self._shield is not None:
            self._shield.lower()


def _owner_of(handler: Any) -> Any:
    return getattr(handler, "__self__", None)
