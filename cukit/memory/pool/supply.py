"""Finds memory for a request after a miss in the lists of exact sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from cukit.memory.bookkeeping.arena import Arena, Fit
from cukit.memory.bookkeeping.blocks import Action
from cukit.memory.bookkeeping.spans import PENDING, Span
from cukit.memory.bookkeeping.streams import CaptureKey, Streams, StreamState
from cukit.memory.pool.listeners import Emit
from cukit.memory.pool.pager import Pager
from cukit.memory.pool.stitch import Stitcher
from cukit.memory.providers.provider import Provider

FEW_PAGES = 16
"""For requests of more pages, saving one page is not worth remapping pages."""

LARGE_BYTES = 4 << 20
"""Freed blocks of at least this size are merged at the next miss of at least this size: they form
the holes that large requests need. Smaller blocks stay in the lists of exact sizes as long as
anything else fits: merging them all would make every size that a program repeats miss once."""

STITCHED_SHARE = 8
"""Blocks of at most 1/8 of a page are not worth two mappings."""

WASTED_SHARE = 16
"""Wasting at most 1/16 of a page is not worth stitching."""


class Supply:
    """Searches the sources of memory in the order of their cost:

    1. free memory of the stream, and free memory that any stream may use;
    2. memory freed on other streams whose work is known to be complete;
    3. memory freed on other streams, after an event: the stream waits, not the host. Small requests
       take a new page instead;
    4. wholly free pages and new pages (Pager.grow).

    When a pool has grown nearly to its limit, its free memory is mostly on partly used pages. A
    request of few pages is then placed where it takes the fewest wholly free pages, even if that
    needs driver calls to map pages next to a hole (Pager.grow) or to map partly used pages a second
    time (Stitcher). In a pool with a limit, small blocks are kept on separate pages from the start,
    because they would split those partly used pages into unusable pieces.
    """

    def __init__(
        self,
        provider: Provider,
        arena: Arena,
        pager: Pager,
        stitcher: Stitcher,
        streams: Streams,
        emit: Emit,
    ) -> None:
        self._provider = provider
        self._arena = arena
        self._pager = pager
        self._stitcher = stitcher
        self._streams = streams
        self._emit = emit
        self.pending: list[tuple[Span, list[Any]]] = []
        """Freed spans that other streams may still use, with the events to wait for."""
        self.pending_bytes = 0
        self.before_growing: Callable[[int, StreamState], bool] = lambda size, state: False
        """Called before the pool takes pages for a request; returns True if it made a hole."""

    def obtain(self, size: int, state: StreamState, *, under_pressure: bool = False) -> Span | None:
        """A live span of `size` bytes, or None. `under_pressure`: small requests may also take
        memory for which their stream must wait."""
        arena, streams = self._arena, self._streams
        nearly_full = self._pager.nearly_full and not state.private
        span = self._page_saving(size, state) if nearly_full else self._own(size, state)
        if span is None and not state.private:
            self.settle()
            span = self._fit(size, state)
            if span is None and not streams.single:
                arena.unify(state)
                span = self._fit(size, state)
            if span is None and (under_pressure or size >= self._arena.page_bytes):
                span = self._behind_others(size, state)
        if span is None and not state.private and self.before_growing(size, state):
            span = arena.best_fit(size, state)
        cheap = span is not None
        if span is None:
            span = self._pager.grow(size, state.key, alone=self._apart(size, state))
        if span is None:
            span = arena.best_fit(size, state) or self._stitcher.stitch(size, state)
        if span is None:
            return None
        if cheap and not state.private:
            self._pager.shed(excluded=span)
        start = arena.page_saving_start(span, size) if nearly_full else span.address
        if self._pager.large_mapped:
            split = self._split_partly_used(span, start, size, state)
            if split is None:
                return self.obtain(size, state, under_pressure=under_pressure)
            span = split
        return arena.take(span, start, size, state.key)

    def _split_partly_used(
        self, span: Span, start: int, size: int, state: StreamState
    ) -> Span | None:
        """Splits large pages that the block would fill only in part; returns the free span for the
        block, or None if the span no longer exists."""
        if span.stream is not None and not state.private and not self._provider.capturing():
            self._streams.poll(state)
            if span.epoch <= state.done:
                span = self._arena.assign_stream(span, None, 0)
        return self._pager.split_partly_used(span, start, size)

    def _apart(self, size: int, state: StreamState) -> bool:
        """Whether small blocks and larger ones are kept on different pages."""
        return self._pager.limited and size < self._arena.page_bytes and not state.private

    def _fit(self, size: int, state: StreamState) -> Span | None:
        """The best fit that the stream may use without waiting, on pages of its kind, or None."""
        if not self._apart(size, state):
            return self._arena.best_fit(size, state)
        fit = self._arena.page_saving_fit(size, state)
        return None if fit.mixed else fit.span

    def _own(self, size: int, state: StreamState) -> Span | None:
        """The best fit, with as little merging as possible, or None."""
        if size >= LARGE_BYTES:
            self._arena.flush(state, LARGE_BYTES)
        span = self._fit(size, state)
        if span is None:
            self._arena.flush(state)
            span = self._fit(size, state)
        return span

    def _page_saving(self, size: int, state: StreamState) -> Span | None:
        """The place that takes the fewest wholly free pages, or None."""
        self._arena.flush(state)
        least = size // self._arena.page_bytes
        if least > FEW_PAGES:
            return self._arena.page_saving_fit(size, state).span
        self.settle()
        fit = self._arena.page_saving_fit(size, state)
        if not least:
            return self._within_pages(size, state, fit)
        if fit.span is None:
            return self._stitcher.stitch(size, state, fewer_than=least + 1)
        if fit.pages > least:
            return (
                self._stitcher.stitch(size, state, fewer_than=fit.pages)
                or self._pager.grow(size, state.key, fewer_than=fit.pages)
                or fit.span
            )
        waste = _waste(fit.span, size, self._arena.page_bytes)
        if waste * WASTED_SHARE <= self._arena.page_bytes:
            return fit.span
        less = self._stitcher.stitch(size, state, fewer_than=fit.pages + 1, waste_below=waste)
        return less or fit.span

    def _within_pages(self, size: int, state: StreamState, fit: Fit) -> Span | None:
        """`_page_saving` for less than a page: prefers a new page to one with larger blocks."""
        if fit.span is not None and not fit.mixed:
            return fit.span
        alone = self._pager.grow(size, state.key, alone=True)
        if alone is None and size * STITCHED_SHARE > self._arena.page_bytes:
            alone = self._stitcher.stitch(size, state)
        return alone or fit.span

    def settle(self) -> None:
        """Merges all freed memory; memory whose last use is complete becomes available to all
        streams."""
        self.poll_pending()
        for state in self._streams.public():
            self._arena.flush(state)
            if state.index:
                self._streams.poll(state)
                self._arena.settle(state)
        self._stitcher.undo()

    def settle_waiting(self) -> None:
        """Like `settle`, after waiting for the streams."""
        self.wait_for_pending()
        for state in self._streams.public():
            self._arena.flush(state)
            if state.index:
                self._streams.wait_for(state)
                self._arena.settle(state)
        self._stitcher.undo()

    def synchronize(self) -> None:
        """Synchronises the device: any stream may then use all free memory."""
        self._provider.synchronize_device()
        self._streams.mark_all_done()
        self.wait_for_pending()

    def capturing(self) -> bool:
        """Whether a stream of the pool is being captured: the host must not wait then."""
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

    # Memory that several streams use ------------------------------------------------------------

    def hold(self, span: Span, uses: Sequence[Hashable]) -> None:
        """Defers the release of a freed span until the work now on the streams `uses` is done."""
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
        """Frees the spans whose events are complete."""
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
        """Waits for all events, then frees the spans."""
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


def _waste(span: Span, size: int, page: int) -> int:
    """The smallest remainder that a block leaves on the partly used page at either end of a span;
    0 if it fits on neither."""
    rest = size % page
    edges = [-span.address % page, span.end % page]
    return min((edge - rest for edge in edges if edge >= rest), default=0)
