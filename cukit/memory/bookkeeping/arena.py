"""Address ranges as spans: cutting, freeing, merging and searching. No driver calls.

A free span carries the key of the stream that freed it, and merges with spans of the same stream.
A free span that no stream still uses carries None: any stream may take it, and it merges with other
spans that carry None. If a single stream uses the pool, the distinction costs more than it gains,
so spans with and without a key merge.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cukit.memory.bookkeeping.blocks import Range
from cukit.memory.bookkeeping.compaction import Ints
from cukit.memory.bookkeeping.spans import FREE, LIVE, UNMAPPED, SizeIndex, Span
from cukit.memory.bookkeeping.streams import CaptureKey, Streams, StreamState

FITS_COMPARED = 8
"""Candidates per index in `page_saving_fit`."""
FITS_COMPARED_WITHIN_PAGES = 64
"""The same for a block smaller than a page."""

SMALL_SHARE = 16
"""A block of at most 1/16 of a page is small."""


class Fit(NamedTuple):
    """A free span for a block, or None if there is none."""

    span: Span | None
    pages: int
    """Wholly free pages that the block would take."""
    mixed: bool
    """The block would share a page with blocks of the other kind (small or not)."""


class AddressRange:
    """One reservation, covered by a list of spans that begins with `first`."""

    __slots__ = ("address", "first", "size")

    def __init__(self, address: int, size: int, state: int) -> None:
        self.address = address
        self.size = size
        self.first = Span(address, size, state)

    def spans(self) -> Iterator[Span]:
        """All spans in address order."""
        span: Span | None = self.first
        while span is not None:
            yield span
            span = span.next


class Arena:
    """Every span of a pool, and the free ones by stream and size."""

    def __init__(self, streams: Streams, page_bytes: int) -> None:
        self.streams = streams
        self.page_bytes = page_bytes
        self._ranges: dict[int, AddressRange] = {}
        self._small_pages: set[int] = set()
        """Page numbers (address / page_bytes) of the pages whose first block was small."""
        self.unmapped: dict[int, Span] = {}

    # Ranges -----------------------------------------------------------------------------------

    def add_range(self, address: int, size: int, *, mapped: bool) -> Span:
        """Adds a reservation; returns the single span that covers it."""
        added = AddressRange(address, size, FREE if mapped else UNMAPPED)
        self._ranges[address] = added
        if mapped:
            return self.put_free(added.first)
        self.unmapped[address] = added.first
        return added.first

    def replace_first(self, old: Span, new: Span) -> None:
        """Makes a span the first of its range in place of another with the same address."""
        self._ranges[old.address].first = new

    def drop_range(self, span: Span) -> None:
        """Removes the range that `span`, unmapped or free, covers alone."""
        assert span.prev is None
        assert span.next is None
        if span.state == UNMAPPED:
            del self.unmapped[span.address]
        else:
            self.index(span).remove(span)
        del self._ranges[span.address]

    def ranges(self) -> list[AddressRange]:
        """All reservations in address order."""
        return [self._ranges[address] for address in sorted(self._ranges)]

    def spans(self) -> Iterator[Span]:
        """Every span, in address order."""
        for part in self.ranges():
            yield from part.spans()

    def locate(self, address: int) -> Span | None:
        """The span that contains an address, or None."""
        for part in self._ranges.values():
            if part.address <= address < part.address + part.size:
                return next(span for span in part.spans() if address < span.end)
        return None

    def public_ranges(self) -> list[Range]:
        """The public description of all ranges."""
        return [
            Range(
                part.address,
                part.size,
                self.page_bytes,
                tuple(span.block() for span in part.spans()),
            )
            for part in self.ranges()
        ]

    # Spans ------------------------------------------------------------------------------------

    def index(self, span: Span) -> SizeIndex:
        """The index of a free span's stream."""
        return self.streams.states[span.stream].index

    def take(self, span: Span, start: int, size: int, stream: Hashable) -> Span:
        """Makes `size` bytes at `start`, inside a FREE span, live on a stream."""
        self._note_first(span, start, size)
        span = self.carve(span, start, size)
        span.state = LIVE
        span.stream = stream
        return span

    def _note_first(self, span: Span, start: int, size: int) -> None:
        """For each page on which this block is the first, records whether the block is small."""
        page = self.page_bytes
        low = max(start // page, -(-span.address // page))
        high = min(-(-(start + size) // page), span.end // page)
        if size * SMALL_SHARE <= page:
            self._small_pages.update(range(low, high))
        elif self._small_pages:
            self._small_pages.difference_update(range(low, high))

    def page_saving_start(self, span: Span, size: int) -> int:
        """The address at which a block starts in a free span when the pool is nearly full.

        A block of a page or more starts at the span's start, or so that it begins or ends at a page
        boundary. The start that takes the fewest wholly free pages is chosen, then the one that
        leaves the fewest bytes of these pages unused. A page with a live byte cannot be remapped:
        each end of a block that is inside a page prevents the remapping of that page, even after
        the neighbouring blocks are freed.

        A smaller block starts so that the rest of the span still begins or ends at a page boundary,
        where a larger block can use it.
        """
        page, begin, end = self.page_bytes, span.address, span.end
        if size < page:
            at_end = begin % page == 0 and end % page and span.size < page
            return end - size if at_end else begin
        first, last = -(-begin // page), end // page
        best, found = None, begin
        for start in (begin, first * page, -(-(begin + size) // page) * page - size):
            if start + size > end:
                continue
            low, high = max(start // page, first), min(-(-(start + size) // page), last)
            pages = max(high - low, 0)
            inside = min(start + size, last * page) - max(start, first * page)
            rank = (pages, pages * page - inside, start)
            if best is None or rank < best:
                best, found = rank, start
        return found

    def carve(self, span: Span, address: int, size: int) -> Span:
        """Cuts `size` bytes at `address` out of a FREE span and its index. The rest of the span
        stays free; the caller must set the state of the returned span."""
        index, end = self.index(span), span.end
        index.remove(span)
        cut = span.isolate(address, size)
        if cut is not span:
            index.add(span)
        if cut.end < end:
            assert cut.next is not None
            index.add(cut.next)
        return cut

    def put_free(self, span: Span) -> Span:
        """Makes a span that is in no index FREE, and merges it; returns the merged span."""
        span.state = FREE
        before, behind = span.prev, span.next
        if behind is not None and self._can_merge(span, behind):
            self.index(behind).remove(behind)
            self._share_stream(span, behind)
            span.swallow_next()
        if before is not None and self._can_merge(before, span):
            self.index(before).remove(before)
            self._share_stream(before, span)
            before.swallow_next()
            span = before
        self.index(span).add(span)
        return span

    def _can_merge(self, a: Span, b: Span) -> bool:
        if a.state != FREE or b.state != FREE:
            return False
        if a.stream == b.stream:
            return True
        if not self.streams.single or (a.stream is not None and b.stream is not None):
            return False
        return not isinstance(a.stream or b.stream, CaptureKey)

    @staticmethod
    def _share_stream(kept: Span, other: Span) -> None:
        if kept.stream == other.stream:
            kept.epoch = max(kept.epoch, other.epoch)
        elif kept.stream is None:
            kept.stream, kept.epoch = other.stream, other.epoch

    def assign_stream(self, span: Span, stream: Hashable, epoch: int) -> Span:
        """Assigns a FREE span to another stream (None: any stream) and merges it there."""
        self.index(span).remove(span)
        span.stream, span.epoch = stream, epoch
        return self.put_free(span)

    def put_unmapped(self, span: Span) -> None:
        """Makes a span that is in no index UNMAPPED, and merges it."""
        span.state, span.stream, span.epoch = UNMAPPED, None, 0
        if self._small_pages:
            page = self.page_bytes
            self._small_pages.difference_update(range(span.address // page, span.end // page))
        behind, before = span.next, span.prev
        if behind is not None and behind.state == UNMAPPED:
            del self.unmapped[behind.address]
            span.swallow_next()
        if before is not None and before.state == UNMAPPED:
            before.swallow_next()
        else:
            self.unmapped[span.address] = span

    def cut_unmapped(self, span: Span, address: int, size: int) -> Span:
        """Cuts `size` bytes out of an UNMAPPED span; the caller must set the result's state."""
        del self.unmapped[span.address]
        end = span.end
        cut = span.isolate(address, size)
        if cut is not span:
            self.unmapped[span.address] = span
        if cut.end < end:
            assert cut.next is not None
            self.unmapped[cut.next.address] = cut.next
        return cut

    def place(self, spans: Sequence[Span], address: Ints, size: Ints) -> tuple[Ints, Ints]:
        """Rebuilds all ranges from these spans; the memory between them is free and merged.
        Returns the addresses and sizes of the free spans, in address order.

        Requires that all streams are idle (Streams.mark_all_done) or only the moves are queued:
        all free memory, including the old addresses of moved spans, becomes available to every
        stream.

        Args:
            spans: all spans except the free ones; free spans of a captured graph are included.
            address: of each span.
            size: of each span.
        """
        order = np.argsort(address)
        begin = address[order]
        end = begin + size[order]
        ranges = self.ranges()
        firsts = np.searchsorted(begin, [part.address for part in ranges]).tolist()
        free: list[Span] = []
        holes: list[Ints] = []
        for part, first, last in zip(ranges, firsts, [*firsts, len(order)][1:], strict=True):
            # The gaps before each span and after the last.
            low = np.concatenate(((part.address,), end[first:last]))
            length = np.concatenate((begin[first:last], (part.address + part.size,)))
            length -= low
            gaps = length.nonzero()[0]
            low, length = low[gaps], length[gaps]
            holes += low, length
            kept = [spans[number] for number in order[first:last].tolist()]
            line: list[Span] = []
            done = 0
            for gap, at, size_of in zip(gaps.tolist(), low.tolist(), length.tolist(), strict=True):
                line += kept[done:gap]
                line.append(hole := Span(at, size_of, FREE))
                free.append(hole)
                done = gap
            line += kept[done:]
            before = None
            for span in line:
                span.prev = before
                if before is not None:
                    before.next = span
                before = span
            line[-1].next = None
            part.first = line[0]
        for state in self.streams.public():
            state.bins.clear()
            state.index.replace(())
            state.settled = state.done
        self.streams.shared.index.replace(free)
        if len(ranges) == 1:
            return holes[0], holes[1]
        none = np.empty(0, np.int64)
        return np.concatenate((none, *holes[::2])), np.concatenate((none, *holes[1::2]))

    # Streams ----------------------------------------------------------------------------------

    def flush(self, state: StreamState, least: int = 0) -> None:
        """Makes the CACHED spans of at least `least` bytes FREE, and merges them."""
        waiting = [state.bins.pop(size) for size in list(state.bins) if size >= least]
        for span in (span for spans in waiting for span in spans):
            if span.epoch <= state.done:
                span.stream = None
            self.put_free(span)

    def settle(self, state: StreamState) -> None:
        """Makes memory that the stream no longer uses available to all streams."""
        if state.private or state.settled == state.done:
            return
        state.settled = state.done
        for span in state.index:
            # An earlier iteration may have merged the span into another.
            if span.state == FREE and span.stream == state.key and span.epoch <= state.done:
                self.assign_stream(span, None, 0)

    def unify(self, state: StreamState) -> None:
        """Merges free memory of the stream with shared neighbours; the stream gets the result."""
        for span in state.index:
            if span.state != FREE or span.stream != state.key:
                continue
            for neighbour in (span.prev, span.next):
                if neighbour and neighbour.state == FREE and neighbour.stream is None:
                    span = self.assign_stream(neighbour, state.key, span.epoch)

    def best_fit(self, size: int, state: StreamState) -> Span | None:
        """The smallest free span that fits and that the stream may use without waiting."""
        own = state.index.best_fit(size)
        common = self.streams.shared.index.best_fit(size)
        if own is None or common is None:
            return own or common
        return own if (own.size, own.address) <= (common.size, common.address) else common

    def page_saving_fit(self, size: int, state: StreamState) -> Fit:
        """Of the best fits, the one in which the block takes the fewest wholly free pages.

        A block that starts on a partly used page may need one page less. Small blocks and others
        share a page only if there is no other place: a page of small blocks is hardly ever wholly
        free, and its free memory is in many pieces.
        """
        page = self.page_bytes
        most = FITS_COMPARED if size >= page else FITS_COMPARED_WITHIN_PAGES
        found, best = Fit(None, 0, False), None
        for index in (state.index, self.streams.shared.index):
            for span in index.at_least(size, most):
                first = -(-span.address // page)
                last = min(-(-(span.address + size) // page), span.end // page)
                pages, used = (
                    (last - first, first * page - span.address) if last > first else (0, 0)
                )
                mixed = size < page and self._mixes(span, size)
                rank = (mixed, pages, used, span.size)
                if best is None or rank < best:
                    found, best = Fit(span, pages, mixed), rank
        return found

    def _mixes(self, span: Span, size: int) -> bool:
        """Whether a block smaller than a page may share a page with blocks of the other kind (small
        or not) if it is placed in this span."""
        page = self.page_bytes
        ends = [
            end // page
            for end, whole in (
                (span.address, span.address % page == 0),
                (span.end - 1, span.end % page == 0),
            )
            if not (whole and span.size >= page)
        ]
        small = [number in self._small_pages for number in ends]
        return bool(small) and (not any(small) if size * SMALL_SHARE <= page else any(small))
