"""Finding memory for a request that no list of exact sizes could serve."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from cukit.memory.arena import Arena
from cukit.memory.blocks import Action
from cukit.memory.pager import Emit, Pager
from cukit.memory.provider import Provider
from cukit.memory.spans import PENDING, Span
from cukit.memory.streams import CaptureKey, Streams, StreamState

FEW_PAGES = 16
"""A request of more is not worth moving pages for to save one."""


LARGE_BYTES = 4 << 20
"""Freed blocks of this size are merged by the next miss of this size, for they make the holes that
large requests need. Smaller ones wait for a request of their own size as long as anything else
fits: a program that repeats its sizes would miss with all of them after one miss with one."""


class Supply:
    """Arena, pages and streams, asked in the order of what costs least.

    1. the stream's own free memory and everybody's;
    2. what other streams freed and are known to be done with;
    3. what other streams freed, behind an event: no host waits, but work does, so small requests
       rather take a new page;
    4. whole free pages and new ones (Pager.grow).

    When nearly all that the limit allows is held, what is left of pages beside live blocks is what
    the pool runs out of. Then a request of few pages goes where it takes the fewest wholly free
    ones, though it costs driver calls to bring pages there.
    """

    def __init__(
        self, provider: Provider, arena: Arena, pager: Pager, streams: Streams, emit: Emit
    ) -> None:
        self._provider = provider
        self._arena = arena
        self._pager = pager
        self._streams = streams
        self._emit = emit
        self.pending: list[tuple[Span, list[Any]]] = []
        """Freed spans that other streams work on, with what has to happen first."""
        self.pending_bytes = 0
        self.before_growing: Callable[[int, StreamState], bool] = lambda size, state: False
        """Called when only pages could serve a request; True if it made a hole instead."""

    def obtain(self, size: int, state: StreamState, *, pressed: bool = False) -> Span | None:
        """A live span of `size` bytes, or None. `pressed`: wait for other streams in any case."""
        arena, streams = self._arena, self._streams
        if self._pager.crowded and not state.private:
            arena.flush(state)
            span = self._thrifty(size, state)
        else:
            span = self._own(size, state)
        if span is None and not state.private:
            self.settle()
            span = arena.best_fit(size, state)
            if span is None and not streams.single:
                arena.unify(state)
                span = arena.best_fit(size, state)
            if span is None and (pressed or size >= self._arena.page_bytes):
                span = self._behind_others(size, state)
        if span is None and not state.private and self.before_growing(size, state):
            span = arena.best_fit(size, state)
        if span is None:
            span = self._pager.grow(size, state.key)
        if span is None:
            return None
        return arena.take(span, size, state.key, saving_pages=self._pager.full)

    def _own(self, size: int, state: StreamState) -> Span | None:
        """The best fit that the stream may use at once, or None."""
        if size >= LARGE_BYTES:
            self._arena.flush(state, LARGE_BYTES)
        span = self._arena.best_fit(size, state)
        if span is None:
            self._arena.flush(state)
            span = self._arena.best_fit(size, state)
        return span

    def _thrifty(self, size: int, state: StreamState) -> Span | None:
        """A fit that takes as few wholly free pages as any place would, or None."""
        least = size // self._arena.page_bytes
        if 0 < least <= FEW_PAGES:
            self.settle()
        span, pages = self._arena.thrifty_fit(size, state)
        if span is None or pages <= least or least > FEW_PAGES:
            return span
        return self._pager.grow(size, state.key, fewer_than=pages) or span

    def settle(self) -> None:
        """Merges all that is freed, and gives to everybody what streams are done with."""
        self.poll_pending()
        for state in self._streams.public():
            self._arena.flush(state)
            if state.index:
                self._streams.poll(state)
                self._arena.settle(state)

    def settle_waiting(self) -> None:
        """The same, after waiting for the streams."""
        self.wait_for_pending()
        for state in self._streams.public():
            self._arena.flush(state)
            if state.index:
                self._streams.wait_for(state)
                self._arena.settle(state)

    def stop_the_world(self) -> None:
        """Waits until the device is idle: everything free may be used by everybody."""
        self._provider.synchronize_device()
        self._streams.all_done()
        self.wait_for_pending()

    def capturing(self) -> bool:
        """Whether a stream of the pool takes part in a capture: the host must not wait then."""
        keys = {
            key.stream if isinstance(key, CaptureKey) else key
            for key in self._streams.states
            if key is not None
        }
        return any(self._provider.capture_id(key) is not None for key in keys)

    def _behind_others(self, size: int, state: StreamState) -> Span | None:
        """The best fit among other streams' memory, after making the stream wait for it."""
        found = None
        for other in self._streams.public():
            span = None if other is state else other.index.best_fit(size)
            if span is None or self._provider.capture_id(other.key) is not None:
                continue
            if found is None or (span.size, span.address) < (found.size, found.address):
                found = span
        if found is not None:
            owner = self._streams.states[found.stream]
            self._streams.order_behind(state.key, owner, found.epoch)
        return found

    # Memory that several streams work on --------------------------------------------------------

    def hold(self, span: Span, uses: Sequence[Hashable]) -> None:
        """Takes a freed span that other streams than its own may still work on."""
        events: list[Any] = []
        try:
            for stream in uses:
                events.append(self._provider.record(stream))
        except BaseException:
            for event in events:
                self._provider.discard(event)
            raise
        span.state = PENDING
        self.pending.append((span, events))
        self.pending_bytes += span.size

    def poll_pending(self) -> None:
        """Puts back what is done with."""
        if not self.pending:
            return
        waiting = self.pending
        self.pending = []
        for position, (span, events) in enumerate(waiting):
            try:
                while events and self._provider.is_done(events[-1]):
                    self._provider.discard(events.pop())
            except BaseException:
                self.pending.extend(waiting[position:])
                raise
            if events:
                self.pending.append((span, events))
            else:
                self._complete(span)

    def wait_for_pending(self) -> None:
        """Waits, then puts everything back."""
        while self.pending:
            span, events = self.pending[-1]
            while events:
                self._provider.synchronize(events[-1])
                self._provider.discard(events.pop())
            self.pending.pop()
            self._complete(span)

    def _complete(self, span: Span) -> None:
        self.pending_bytes -= span.size
        action: Action = "free_completed"
        self._emit(action, span.address, span.size, span.stream)
        span.uses, span.call_site = (), ()
        self._arena.put_free(span)
