"""Ctrl-C while the pool's books are open: it takes effect when they are in order again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

_Handler = Callable[[int, "FrameType | None"], Any]

_SIGINT = int(signal.SIGINT)
# The functions in C: around them `signal` makes enums of numbers, which takes ten times as long.
_in_c: Any = import_module("_signal")
_get_handler: Callable[[int], Any] = _in_c.getsignal
_set_handler: Callable[[int, Any], Any] = _in_c.signal


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class Uninterrupted:
    """`with Uninterrupted():` an interrupt takes effect at the end of the block.

    That is, the handler of SIGINT (which raises KeyboardInterrupt, unless the program has set
    another one) is called then. Python runs handlers in the main thread only, so in other threads
    this does nothing. Blocks nest.
    """

    __slots__ = ("_frame", "_handler", "_interrupted")

    def __init__(self) -> None:
        self._handler: _Handler | None = None
        self._interrupted = False
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        if _in_main_thread():
            handler = _get_handler(_SIGINT)
            if callable(handler):
                self._handler = handler
                _set_handler(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted, self._frame = True, frame

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is not None:
            _set_handler(_SIGINT, handler)
            self._handler = None
            self._pass_on(handler)

    def _pass_on(self, handler: _Handler) -> None:
        if self._interrupted:
            frame, self._interrupted, self._frame = self._frame, False, None
            handler(_SIGINT, frame)


@contextmanager
def interrupted_as_usual() -> Iterator[None]:
    """Lifts what Uninterrupted does, for code of somebody else in the middle of such a block."""
    shield = _get_handler(_SIGINT)
    holder = getattr(shield, "__self__", None)
    if not isinstance(holder, Uninterrupted) or holder._handler is None:
        yield
        return
    if not _in_main_thread():
        yield
        return
    handler = holder._handler
    _set_handler(_SIGINT, handler)
    try:
        holder._pass_on(handler)
        yield
    finally:
        _set_handler(_SIGINT, shield)
