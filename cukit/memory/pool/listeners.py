"""Who is told what happens in a pool."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Protocol

from cukit.memory.bookkeeping.blocks import Action, Event, Frame
from cukit.memory.bookkeeping.spans import Span

LOG = logging.getLogger(__name__)

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


def call_site(depth: int) -> tuple[Frame, ...]:
    """Up to `depth` frames of the code that called this package, innermost first."""
    frame = sys._getframe(1)
    found: list[Frame] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if found or not code.co_filename.startswith(_OWN_FOLDER):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


class Emit(Protocol):
    """The signature of Listeners.emit."""

    def __call__(
        self,
        action: Action,
        address: int,
        size: int,
        stream: Hashable,
        call_site: tuple[Frame, ...] = (),
    ) -> None: ...


class Listeners:
    """Collects events while the pool works and hands them out when its books are in order."""

    def __init__(self, call_site_depth: int) -> None:
        self._depth = call_site_depth
        self._listeners: list[Callable[[Event], None]] = []
        self._events: list[Event] = []
        self.active = call_site_depth > 0
        """Whether allocations and frees have to be told one by one."""

    def add(self, listener: Callable[[Event], None]) -> None:
        """From now on it is told."""
        self._listeners = [*self._listeners, listener]
        self.active = True

    def remove(self, listener: Callable[[Event], None]) -> None:
        """Not any more. Raises ValueError if it was not."""
        listeners = list(self._listeners)
        listeners.remove(listener)
        self._listeners = listeners
        self.active = bool(listeners) or self._depth > 0

    def emit(
        self,
        action: Action,
        address: int,
        size: int,
        stream: Hashable,
        call_site: tuple[Frame, ...] = (),
    ) -> None:
        """Notes an event of the pool itself."""
        if self._listeners:
            self._note(action, address, size, stream, call_site)

    def allocated(self, span: Span) -> None:
        """Notes an allocation, and who made it; then tells."""
        span.call_site = call_site(self._depth) if self._depth else ()
        if self._listeners:
            self._note("alloc", span.address, span.size, span.stream, span.call_site)
            self.deliver()

    def freed(self, span: Span, *, completed: bool) -> None:
        """Notes a free, and that it is complete unless other streams still work; then tells."""
        if self._listeners:
            self._note("free", span.address, span.size, span.stream, span.call_site)
            if completed:
                self._note("free_completed", span.address, span.size, span.stream, span.call_site)
            self.deliver()
        if completed:
            span.call_site = ()

    def moved_away(self, span: Span) -> None:
        """Notes that a live span leaves its place, as a free."""
        for action in ("free", "free_completed"):
            self.emit(action, span.address, span.size, span.stream, span.call_site)

    def moved_here(self, span: Span) -> None:
        """Notes that it is in its new place, as an allocation."""
        self.emit("alloc", span.address, span.size, span.stream, span.call_site)

    def _note(
        self, action: Action, address: int, size: int, stream: Hashable, site: tuple[Frame, ...]
    ) -> None:
        thread = threading.get_ident()
        self._events.append(Event(time.perf_counter(), action, address, size, stream, thread, site))

    def deliver(self) -> None:
        """Tells everybody what was noted."""
        events = self._events
        if not events:
            return
        self._events = []
        for event in events:
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    LOG.exception("memory pool: a listener failed on %s", event.action)
