"""Makes holes from the free ends of partly used pages, by mapping those pages a second time.

A page with a live byte cannot be remapped, because the block would change its address. But a page
can be mapped at several addresses if each byte is in use at only one of them. So the free end of
one page, whole pages, and the free start of another page become one hole at new addresses:

    page A  [ live | aliased ]                       page B  [ aliased | live ]
    new     [ aliased |  hole   ...  whole pages  ...   hole | aliased ]

At each address, the bytes in use at the page's other address are a span of state ALIASED. When the
hole's part of the page is free again, the second mapping is removed, and the bytes are free at the
first address.

No byte is accessed through both addresses at once: an access through the other address belongs to a
later block, hence to a later kernel, and CUDA orders the two. Pages in use are neither unmapped nor
moved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from cukit.memory.bookkeeping.arena import Arena
from cukit.memory.bookkeeping.spans import ALIASED, FREE, Span
from cukit.memory.bookkeeping.streams import StreamState
from cukit.memory.pool.config import ALIGNMENT
from cukit.memory.pool.listeners import Emit
from cukit.memory.pool.pager import Pager
from cukit.memory.providers.provider import Provider

MIN_EDGE_SHARE = 1 / 32
"""Minimum size of a free span whose ends are mapped a second time, as a share of a page."""
NO_LIMIT = 1 << 62
MAX_SPANS_EXAMINED = 128
"""Maximum number of free spans examined per index for one hole."""


class Edge(NamedTuple):
    """Free bytes at one end of a partly used page."""

    size: int
    address: int
    span: Span
    """The free span that contains them."""


class Stitch(NamedTuple):
    """The parts of a hole."""

    pages: int
    """Wholly free pages in the middle."""
    tail: Edge | None
    """The end of a page, at the start of the hole."""
    head: Edge | None
    """The start of a page, at the end of the hole."""
    waste: int
    """Bytes of the edges that stay unused."""


class _Alias(NamedTuple):
    """A second mapping of a page."""

    address: int
    at_second: Span
    """At the second address: the bytes in use at the first."""
    at_first: Span
    """At the first address: the bytes in use at the second."""


class Stitcher:
    """Maps pages of an arena a second time, and removes those mappings."""

    def __init__(self, provider: Provider, arena: Arena, pager: Pager, emit: Emit) -> None:
        self._provider = provider
        self._arena = arena
        self._pager = pager
        self._emit = emit
        self._page_bytes = provider.page_bytes
        self._aliases: list[_Alias] = []

    @property
    def stitched(self) -> bool:
        """Whether any page is mapped twice."""
        return bool(self._aliases)

    def stitch(
        self,
        size: int,
        state: StreamState,
        *,
        fewer_than: int = NO_LIMIT,
        waste_below: int = NO_LIMIT,
    ) -> Span | None:
        """Makes a hole of at least `size` bytes that the stream may use; returns the hole.

        `fewer_than`: only if the hole takes fewer wholly free pages than this.
        `waste_below`: only if the unused part of the edges is smaller than this many bytes.
        Returns None if no such hole can be made.
        """
        if not self._provider.can_remap or state.private:
            return None
        plan = self._plan(size, state)
        if plan is None or plan.pages >= fewer_than or plan.waste >= waste_below:
            return None
        edges = [edge for edge in (plan.tail, plan.head) if edge is not None]
        runs = self._pager.find_pages(plan.pages, tuple(edge.span for edge in edges))
        place = None if runs is None else self._pager.find_addresses(plan.pages + len(edges))
        if runs is None or place is None:
            return None
        for run in runs:
            self._pager.unmap(run)
        if not self._pager.convert_spare(plan.pages):
            return None
        hole = self._map(plan, place.address)
        hole.stream, hole.epoch = None, 0
        owned = [edge.span for edge in edges if edge.span.stream is not None]
        if owned:
            hole.stream, hole.epoch = state.key, max(span.epoch for span in owned)
        for edge in edges:
            self._aliases.append(self._mark_aliased(edge, hole))
        self._emit("segment_map", hole.address, hole.size, None)
        return self._arena.put_free(hole)

    def undo(self) -> int:
        """Removes second mappings that are no longer used; returns their number."""
        count = 0
        # Newest first: free bytes of a second mapping may have been mapped a third time.
        for second in self._aliases[::-1]:
            span = self._free_part(second)
            if span is not None:
                self._undo(second, span)
                count += 1
        return count

    def aliased(self) -> Iterator[Span]:
        """Spans of bytes in use at another address of their page."""
        for second in self._aliases:
            yield second.at_second
            yield second.at_first

    # Planning ---------------------------------------------------------------------------------

    def _plan(self, size: int, state: StreamState) -> Stitch | None:
        """The plan with the fewest whole pages, then the fewest edges, then the least waste."""
        page = self._page_bytes
        pages, rest = divmod(size, page)
        tails, heads = self._edges(state)
        candidates: list[tuple[int, int, int, Edge | None, Edge | None]] = []
        for edges, is_tail in ((tails, True), (heads, False)) if rest else ():
            found = bisect_left(edges, rest, key=_size)
            if found < len(edges):
                edge = edges[found]
                pair = (edge, None) if is_tail else (None, edge)
                candidates.append((pages, 1, edge.size - rest, *pair))
        for number in range(max(pages - 1, 0), pages + (rest > 0)):
            needed = size - number * page
            for tail in tails:
                found = bisect_left(heads, max(needed - tail.size, ALIGNMENT), key=_size)
                for head in heads[found : found + 2]:
                    if head.span is not tail.span:
                        candidates.append((number, 2, tail.size + head.size - needed, tail, head))
                        break
        if not candidates:
            return None
        number, _, waste, first, last = min(candidates, key=lambda candidate: candidate[:3])
        return _trimmed(size - number * page, Stitch(number, first, last, waste))

    def _edges(self, state: StreamState) -> tuple[list[Edge], list[Edge]]:
        """Free ends and free starts of pages, each sorted by size."""
        page, large = self._page_bytes, self._pager.large_around
        tails, heads = [], []
        least = int(page * MIN_EDGE_SHARE)
        for index in (state.index, self._arena.streams.shared.index):
            for span in index.at_least(least, MAX_SPANS_EXAMINED):
                first, last = -(-span.address // page) * page, span.end // page * page
                # Part of a large page cannot be mapped a second time.
                if span.address < first <= span.end and large(first - page) is None:
                    tails.append(Edge(first - span.address, span.address, span))
                if span.address <= last < span.end and large(last) is None:
                    heads.append(Edge(span.end - last, last, span))
        return sorted(tails, key=_size), sorted(heads, key=_size)

    # Mapping and unmapping --------------------------------------------------------------------

    def _map(self, plan: Stitch, address: int) -> Span:
        """Maps the pages; returns the hole, not yet indexed, with ALIASED spans next to it."""
        pager, page = self._pager, self._page_bytes
        pages, large = pager.choose(plan.pages)
        start, size, behind = address, plan.pages * page, address
        mapped = list(pages)
        if plan.tail:
            mapped.insert(0, pager.mapped[plan.tail.address // page * page])
            behind += page
            start += page - plan.tail.size
            size += plan.tail.size
        if plan.head:
            mapped.append(pager.mapped[plan.head.address])
            size += plan.head.size
        self._provider.map_pages(address, mapped)
        if plan.tail:
            pager.mapped[address] = mapped[0]
        if plan.head:
            pager.mapped[address + (len(mapped) - 1) * page] = mapped[-1]
        pager.note_mapped(behind, pages, large)
        whole = self._arena.cut_unmapped(pager.hole_at(address), address, len(mapped) * page)
        hole = whole.isolate(start, size)
        for span in (hole.prev if plan.tail else None, hole.next if plan.head else None):
            if span is not None:
                span.state = ALIASED
        return hole

    def _mark_aliased(self, edge: Edge, hole: Span) -> _Alias:
        """Marks an edge as in use by the hole."""
        at_first = self._arena.carve(edge.span, edge.address, edge.size)
        at_first.state, at_first.stream, at_first.epoch = ALIASED, None, 0
        self._emit("segment_unmap", at_first.address, at_first.size, None)
        page = self._page_bytes
        is_tail = edge.address % page != 0
        at_second = hole.prev if is_tail else hole.next
        assert at_second is not None
        return _Alias(at_second.address if is_tail else at_second.end - page, at_second, at_first)

    def _free_part(self, second: _Alias) -> Span | None:
        """The free span that contains the page's part of the hole; None unless that part is free
        and any stream may use it."""
        aliased = second.at_second
        is_tail = aliased.address == second.address
        span = aliased.next if is_tail else aliased.prev
        if span is None or span.state != FREE or span.stream is not None:
            return None
        reaches = span.end >= second.address + self._page_bytes
        return span if (reaches if is_tail else span.address <= second.address) else None

    def _undo(self, second: _Alias, span: Span) -> None:
        arena, page = self._arena, self._page_bytes
        self._provider.unmap_pages(second.address, 1)
        start = max(second.address, span.address)
        size = min(second.address + page, span.end) - start
        part = arena.carve(span, start, size)
        arena.put_unmapped(part)
        arena.put_unmapped(second.at_second)
        del self._pager.mapped[second.address]
        self._aliases.remove(second)
        self._emit("segment_unmap", start, size, None)
        self._emit("segment_map", second.at_first.address, second.at_first.size, None)
        arena.put_free(second.at_first)


def _size(edge: Edge) -> int:
    return edge.size


def _trimmed(needed: int, plan: Stitch) -> Stitch:
    """Shortens the larger edge to the size needed; the smaller edge is used completely."""
    tail, head = plan.tail, plan.head
    if tail and (not head or head.size <= tail.size):
        size = needed - (head.size if head else 0)
        tail = Edge(size, tail.address + tail.size - size, tail.span)
    elif head:
        head = head._replace(size=needed - (tail.size if tail else 0))
    return Stitch(plan.pages, tail, head, plan.waste)
