"""Ctrl-C while the pool's books are open: it takes effect when they are in order again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, "FrameType | None"], Any]


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
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted, self._frame = True, frame

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            self._handler = None
            self._pass_on(handler)

    def _pass_on(self, handler: _Handler) -> None:
        if self._interrupted:
            frame, self._interrupted, self._frame = self._frame, False, None
            handler(signal.SIGINT, frame)


@contextmanager
def interrupted_as_usual() -> Iterator[None]:
    """Lifts what Uninterrupted does, for code of somebody else in the middle of such a block."""
    shield = signal.getsignal(signal.SIGINT)
    holder = getattr(shield, "__self__", None)
    if not isinstance(holder, Uninterrupted) or holder._handler is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = holder._handler
    signal.signal(signal.SIGINT, handler)
    try:
        holder._pass_on(handler)
        yield
    finally:
        signal.signal(signal.SIGINT, shield)
