"""The contents of a pool at one moment: as arrays for defragmentation, as totals for statistics.

A pool may hold a hundred thousand blocks, and a Python loop over them takes longer than the GPU
takes to move them. UsedSpans therefore reads the attributes of each span once, through C iterators,
and never visits free spans: free memory is computed as the complement.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from cukit.memory.bookkeeping.arena import AddressRange, Arena
from cukit.memory.bookkeeping.blocks import Frame
from cukit.memory.bookkeeping.compaction import Ints, Pages, Pieces
from cukit.memory.bookkeeping.spans import ALIASED, LIVE, PENDING, UNMAPPED, Span
from cukit.memory.bookkeeping.statistics import StreamStatistics
from cukit.memory.bookkeeping.streams import CaptureKey
from cukit.memory.slot_grid import Grid, make_grid

_address, _size = attrgetter("address"), attrgetter("size")


@dataclass(frozen=True)
class Paging:
    """The page sizes of an arena and the state of its mappings."""

    page_bytes: int
    spare_bytes: int
    """Bytes of the pages that are not mapped."""
    remap: bool
    large_pages: int
    """Pages per large page."""
    large_at: Ints
    """Addresses of the mapped large pages."""


class Holes(NamedTuple):
    """Free memory of all streams, in bytes."""

    free: int
    largest: int
    whole_pages: int
    """Bytes of wholly free pages, which remapping can make contiguous."""

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes; 0 when nothing is free."""
        return 1 - self.largest / self.free if self.free else 0.0


class FixedSpans(NamedTuple):
    """Everything that is not free and cannot move."""

    live: list[Span]
    unavailable: list[Span]
    """In use by other streams, at a second mapping, or reserved for a captured graph."""
    unmapped: list[Span]
    """In address order."""
    ranges: Sequence[AddressRange]

    def grid(self, length: int, count: int, page_bytes: int) -> Grid | None:
        """The grid for `count` buffers of `length` bytes, without the unmapped addresses above the
        last mapped page; None if `make_grid` has none or there are several reservations."""
        if len(self.ranges) != 1:
            return None
        (part,) = self.ranges
        end = part.address + part.size
        if self.unmapped and self.unmapped[-1].end == end:
            end = self.unmapped[-1].address
        return make_grid(part.address, end, length, count, page_bytes)

    def walls(self, grid: Grid) -> array[int]:
        """Addresses and sizes, alternating, of all fixed spans in the grid."""
        found, end = array("q"), grid.end
        for spans in (self.live, self.unavailable, self.unmapped):
            for span in spans:
                if span.address < end:
                    found.append(span.address)
                    found.append(span.size)
        return found


@dataclass(frozen=True)
class UsedSpans:
    """Everything that is not free."""

    rows: Ints
    """Rows of Movables."""
    movable: Ints
    """The addresses of these rows."""
    movable_size: Ints
    live: list[Span]
    """Live spans that cannot move."""
    others: list[Span]
    """Spans that cannot move, unordered, then unmapped ones."""
    others_at: Ints
    others_size: Ints
    unmapped: list[Span]
    """In address order."""
    ranges: Sequence[AddressRange]

    @classmethod
    def of(cls, columns: tuple[Ints, Ints, Ints], fixed: FixedSpans) -> UsedSpans:
        """`columns`: rows, addresses and sizes from Movables."""
        live, unavailable, unmapped, ranges = fixed
        others = live + unavailable + unmapped
        at = np.array(list(map(_address, others)), np.int64)
        size = np.array(list(map(_size, others)), np.int64)
        return cls(*columns, live, others, at, size, unmapped, ranges)

    def in_address_order(self) -> UsedSpans:
        """The same with the rows in the order of their addresses."""
        if (self.movable[1:] >= self.movable[:-1]).all():
            return self
        order = self.movable.argsort()
        columns = self.rows[order], self.movable[order], self.movable_size[order]
        return replace(self, rows=columns[0], movable=columns[1], movable_size=columns[2])

    @cached_property
    def pieces(self) -> Pieces:
        """The same spans as input of the compaction planner."""
        used = self.in_address_order()
        fixed = len(self.others) - len(self.unmapped)
        immovable, immovable_size = self.others_at[:fixed], self.others_size[:fixed]
        if (immovable[1:] < immovable[:-1]).any():
            order = np.argsort(immovable)
            immovable, immovable_size = immovable[order], immovable_size[order]
        begins = [part.address for part in self.ranges] + [span.end for span in self.unmapped]
        ends = [part.address + part.size for part in self.ranges]
        ends += [span.address for span in self.unmapped]
        mapped = [
            pair for pair in zip(sorted(begins), sorted(ends), strict=True) if pair[0] < pair[1]
        ]
        begin, end = np.array(mapped, np.int64).reshape(-1, 2).T
        return Pieces(begin, end, used.movable, used.movable_size, immovable, immovable_size)

    def holes(self, paging: Paging) -> Holes:
        """The free memory between these spans."""
        return measure(*self.pieces.free, paging)


def measure(address: Ints, size: Ints, paging: Paging) -> Holes:
    """Measures free memory, given as maximal contiguous pieces in address order."""
    page = paging.page_bytes
    first = -(-address // page)
    pages = np.maximum((address + size) // page - first, 0)
    whole = int(pages.sum())
    if len(paging.large_at) and len(pages):
        # A large page is remapped as a whole: free pages of a partly used one do not count.
        before = np.cumsum(pages) - pages

        def below(number: Ints) -> Ints:
            """The number of wholly free pages below a page."""
            hole = np.maximum(np.searchsorted(first, number, "right") - 1, 0)
            found: Ints = before[hole] + np.clip(number - first[hole], 0, pages[hole])
            return found

        start = paging.large_at // page
        free = below(start + paging.large_pages) - below(start)
        whole -= int(free[free < paging.large_pages].sum())
    return Holes(
        paging.spare_bytes + int(size.sum()),
        int(size.max(initial=0)),
        paging.spare_bytes + (whole * page if paging.remap else 0),
    )


def measure_slots(grid: Grid, address: Ints, paging: Paging) -> Holes:
    """`measure` for buffers at these addresses, in any order, in a grid without walls or large
    pages; takes half the NumPy calls."""
    slot = (address - grid.begin) >> grid.slot_shift
    pages = grid.num_pages - np.count_nonzero(np.bincount(slot >> grid.page_shift))
    slot.sort()
    gap = int((slot[1:] - slot[:-1]).max(initial=1)) - 1
    most = max(gap, int(slot[0]), grid.num_slots - 1 - int(slot[-1]))
    free = grid.num_slots - grid.num_buffers << grid.slot_shift
    whole = pages << grid.page_shift + grid.slot_shift
    spare = paging.spare_bytes
    return Holes(spare + free, most << grid.slot_shift, spare + (whole if paging.remap else 0))


@dataclass
class Survey:
    """Totals over all spans, in bytes."""

    live: int = 0
    requested: int = 0
    pending: int = 0
    free: int = 0
    private_free: int = 0
    """Part of `free`: reserved for captured graphs."""
    largest_free: int = 0
    whole_pages: int = 0
    """Part of `free`: on wholly free pages, which remapping can make contiguous."""
    movable: int = 0
    freed_by_moving: int = 0
    """Free bytes on pages that hold movable buffers and nothing that is fixed."""
    per_stream: dict[Hashable, StreamStatistics] = field(default_factory=dict)
    call_sites: dict[tuple[Frame, ...], tuple[int, int]] = field(default_factory=dict)
    """Bytes and count of live allocations by call site."""


def survey(arena: Arena, used: UsedSpans, paging: Paging) -> Survey:
    """Visits every span of the arena; `used` describes the same arena."""
    result = Survey(free=paging.spare_bytes)
    streams: dict[Hashable, list[int]] = defaultdict(lambda: [0, 0, 0])
    for span in arena.spans():
        if span.state in (UNMAPPED, ALIASED):
            continue
        if span.state == LIVE:
            result.live += span.size
            result.requested += span.requested
            streams[span.stream][0] += span.size
            if span.movable:
                result.movable += span.size
            size, count = result.call_sites.get(span.call_site, (0, 0))
            result.call_sites[span.call_site] = size + span.size, count + 1
        elif span.state == PENDING:
            result.pending += span.size
            streams[span.stream][1] += span.size
        else:
            result.free += span.size
            streams[span.stream][2] += span.size
            if isinstance(span.stream, CaptureKey):
                result.private_free += span.size
    holes = used.holes(paging)
    result.largest_free, result.whole_pages = holes.largest, holes.whole_pages
    if result.movable:
        result.freed_by_moving = _freed_by_moving(used.pieces, arena.page_bytes)
    result.per_stream = {key: StreamStatistics(*numbers) for key, numbers in streams.items()}
    return result


def _freed_by_moving(pieces: Pieces, page_bytes: int) -> int:
    pages = Pages(pieces, page_bytes)
    movable = pages.bytes_of(pieces.movable, pieces.movable_size)
    immovable = pages.bytes_of(pieces.immovable, pieces.immovable_size)
    return int(pages.bytes_of(*pieces.free)[(movable > 0) & (immovable == 0)].sum())
