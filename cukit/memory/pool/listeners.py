"""Delivers the events of a pool to its listeners."""

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
    """Up to `depth` frames of the code that called cukit.memory, innermost first."""
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
    """Collects events while the pool changes; delivers them when its state is consistent."""

    def __init__(self, call_site_depth: int) -> None:
        self._depth = call_site_depth
        self._listeners: list[Callable[[Event], None]] = []
        self._events: list[Event] = []
        self.active = call_site_depth > 0
        """Whether every allocation and free must be reported."""

    def add(self, listener: Callable[[Event], None]) -> None:
        """Adds a listener."""
        self._listeners = [*self._listeners, listener]
        self.active = True

    def remove(self, listener: Callable[[Event], None]) -> None:
        """Removes a listener. Raises ValueError if it was not added."""
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
        """Collects an event."""
        if self._listeners:
            self._note(action, address, size, stream, call_site)

    def allocated(self, span: Span) -> None:
        """Records the call site of an allocation and delivers its event."""
        span.call_site = call_site(self._depth) if self._depth else ()
        if self._listeners:
            self._note("alloc", span.address, span.size, span.stream, span.call_site)
            self.deliver()

    def freed(self, span: Span, *, completed: bool) -> None:
        """Delivers the events of a free. `completed`: no other stream still uses the memory."""
        if self._listeners:
            self._note("free", span.address, span.size, span.stream, span.call_site)
            if completed:
                self._note("free_completed", span.address, span.size, span.stream, span.call_site)
            self.deliver()
        if completed:
            span.call_site = ()

    def moved_away(self, span: Span, address: int, after: int) -> None:
        """Collects the events of a free, for a live span that moves to the address `after`."""
        if self._listeners:
            for action in ("free", "free_completed"):
                self._note(action, address, span.size, span.stream, span.call_site, after)

    def moved_here(self, span: Span, address: int, before: int) -> None:
        """Collects the event of an allocation, for a live span that moved from address `before`."""
        if self._listeners:
            self._note("alloc", address, span.size, span.stream, span.call_site, before)

    def _note(
        self,
        action: Action,
        address: int,
        size: int,
        stream: Hashable,
        site: tuple[Frame, ...],
        moved: int | None = None,
    ) -> None:
        now, thread = time.perf_counter(), threading.get_ident()
        self._events.append(Event(now, action, address, size, stream, thread, site, moved))

    def deliver(self) -> None:
        """Calls all listeners for all collected events."""
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
