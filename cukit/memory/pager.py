"""Physical memory: where it comes from, where it is mapped, when it goes back.

The pool grows in three ways, cheapest first: pages in hand, pages that are wholly free somewhere
else (gathered: unmapped there and mapped here; no bytes move, nobody's address changes), and new
pages of the driver. Every step that the driver can refuse leaves the pages it had already in hand,
so a failure in the middle needs no undoing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from cukit.memory.arena import Arena
from cukit.memory.blocks import Action, Frame
from cukit.memory.config import MemoryPoolConfig
from cukit.memory.provider import DeviceOutOfMemory, Provider
from cukit.memory.spans import FREE, UNMAPPED, Span

CROWDED = 0.9
"""Of its limit: a pool that holds more puts blocks where they take the fewest wholly free pages."""


class Emit(Protocol):
    """Notes an event (blocks.py): what, where, how many bytes, on which stream, who asked."""

    def __call__(
        self,
        action: Action,
        address: int,
        size: int,
        stream: Hashable,
        call_site: tuple[Frame, ...] = (),
    ) -> None: ...


class Place(NamedTuple):
    """Where new pages make a hole that is large enough."""

    hole: Span
    """An unmapped span."""
    address: int
    pages: int
    neighbours: tuple[Span, ...]
    """Free spans that the hole is joined with."""


class Run(NamedTuple):
    """Neighbouring pages, wholly inside one free span."""

    span: Span
    address: int
    pages: int


class Pager:
    """Maps and unmaps the memory behind an arena."""

    def __init__(
        self, config: MemoryPoolConfig, provider: Provider, arena: Arena, emit: Emit
    ) -> None:
        self._config = config
        self._provider = provider
        self._arena = arena
        self._emit = emit
        self.page_bytes = provider.page_bytes
        self._remaps = provider.can_remap
        self.mapped: dict[int, Any] = {}
        """Page by the address it is mapped at."""
        self.in_hand: list[Any] = []
        """Pages mapped nowhere."""
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.pages_remapped = 0

    @property
    def limited(self) -> bool:
        """Whether pages may become short before the device has no more."""
        return self._config.max_pool_size is not None and self._remaps

    @property
    def crowded(self) -> bool:
        """Whether the pool holds nearly what its limit allows."""
        limit = self._config.max_pool_size
        return limit is not None and self._remaps and self.reserved_bytes >= CROWDED * limit

    def grow(
        self,
        size: int,
        stream: Hashable,
        *,
        fewer_than: int | None = None,
        alone: bool = False,
    ) -> Span | None:
        """Makes a hole of at least `size` bytes that the stream may use, and returns it.

        `fewer_than`: only where that takes fewer pages than this, which a neighbour has to allow.
        `alone`: not as part of a free neighbour.
        None: the limit or the device forbid it, or there is no such place; nothing has changed.
        """
        if not self._remaps:
            return self._grow_by_segment(size)
        place = self._place(size, stream, alone=alone)
        if fewer_than is not None and (place is None or place.pages >= fewer_than):
            return None
        needed = self._pages(size) if place is None else place.pages
        runs = self.find_pages(needed, () if place is None else place.neighbours)
        if runs is None:
            return None
        if place is None:
            place = self._reserve(size)
            if place is None:
                return None
        for run in runs:
            self.unmap(run)
        return self._map(place, stream)

    def find_pages(self, count: int, spared: Sequence[Span]) -> list[Run] | None:
        """What to unmap so that `count` pages are in hand, new ones among them where the limit and
        the device allow it. None: there are not as many."""
        missing = count - len(self.in_hand)
        runs = self._whole_pages(missing, spared) if missing > 0 else []
        missing -= sum(run.pages for run in runs)
        return runs if missing <= 0 or self._create(missing) else None

    def find_addresses(self, pages: int) -> Place | None:
        """Unmapped addresses for `pages` pages, beside whatever it is; fresh ones if need be."""
        size = pages * self.page_bytes
        return self._place(size, None, alone=True) or self._reserve(size)

    def hole_at(self, address: int) -> Span:
        """The unmapped span around an address; unmapping may have merged it with others."""
        return next(
            span for span in self._arena.unmapped.values() if span.address <= address < span.end
        )

    def prepare(self, size: int) -> bool:
        """Takes at least `size` bytes from the device ahead of any request."""
        return self.grow(size, None) is not None

    def consolidate(self) -> int:
        """Gathers all wholly free pages into one hole; returns how many were remapped.

        Nothing free may be in use any more (Streams.all_done).
        """
        if not self._remaps:
            return 0
        largest = max(self._arena.streams.anyone.index, key=lambda span: span.size, default=None)
        if largest is None:
            return 0
        runs = self._whole_pages(1 << 62, (largest,))
        pages = len(self.in_hand) + sum(run.pages for run in runs)
        if not pages:
            return 0
        place = self._beside(largest, pages)
        if place is None:
            runs = self._whole_pages(1 << 62, ())
            pages = len(self.in_hand) + sum(run.pages for run in runs)
            if pages * self.page_bytes <= largest.size:
                return 0
            place = self._place(pages * self.page_bytes, None, alone=True)
            if place is None:
                place = self._reserve(pages * self.page_bytes)
            if place is None:
                return 0
        for run in runs:
            self.unmap(run)
        self._map(place, None)
        return sum(run.pages for run in runs)

    def trim(self) -> int:
        """Hands back every wholly free page, or segment, and every empty range."""
        before = self.reserved_bytes
        if self._remaps:
            for run in self._whole_pages(1 << 62, ()):
                self.unmap(run, remapped=False)
            if self.in_hand:
                self._provider.destroy_pages(self.in_hand)
                self.reserved_bytes -= len(self.in_hand) * self.page_bytes
                self.in_hand.clear()
        for part in self._arena.ranges():
            span = part.first
            if span.next is None and (
                span.state == UNMAPPED
                or (span.state == FREE and span.stream is None and not self._remaps)
            ):
                self._provider.release(part.address, part.size)
                self._arena.drop_range(span)
                if not self._remaps:
                    self.reserved_bytes -= part.size
                self._emit("segment_free", part.address, part.size, None)
        return before - self.reserved_bytes

    def abandon(self) -> None:
        """Gives everything back to the device, whatever it is used for."""
        provider, page = self._provider, self.page_bytes
        addresses = sorted(self.mapped)
        while addresses:
            count = 1
            while count < len(addresses) and addresses[count] == addresses[0] + count * page:
                count += 1
            provider.unmap_pages(addresses[0], count)
            self.in_hand.extend(self.mapped.pop(address) for address in addresses[:count])
            del addresses[:count]
        if self.in_hand:
            provider.destroy_pages(list(dict.fromkeys(self.in_hand)))  # some were mapped twice
            self.in_hand.clear()
        for part in self._arena.ranges():
            provider.release(part.address, part.size)

    def room(self) -> int | None:
        """Bytes that the limit still allows; None: no limit."""
        limit = self._config.max_pool_size
        return None if limit is None else max(0, limit - self.reserved_bytes)

    # Finding a place --------------------------------------------------------------------------

    def _pages(self, size: int) -> int:
        return -(-size // self.page_bytes)

    def _place(self, size: int, stream: Hashable, *, alone: bool = False) -> Place | None:
        """The unmapped addresses that need the fewest pages to become a hole of `size` bytes; of
        those the ones beside the smallest free neighbours, for larger ones save others a page."""
        best: tuple[int, int, int, int] | None = None
        found = None
        page = self.page_bytes
        for hole in self._arena.unmapped.values():
            before = None if alone else self._usable(hole.prev, stream)
            behind = None if alone else self._usable(hole.next, stream)
            beside = (before.size if before else 0) + (behind.size if behind else 0)
            if best is not None and -(-(size - beside) // page) > best[0]:
                continue
            for place in self._fillings(size, hole, before, behind):
                used = sum(neighbour.size for neighbour in place.neighbours)
                rank = (place.pages, used, hole.size, place.address)
                if best is None or rank < best:
                    best, found = rank, place
        return found

    def _fillings(
        self, size: int, hole: Span, before: Span | None, behind: Span | None
    ) -> list[Place]:
        places = []
        page = self.page_bytes
        free_before = before.size if before else 0
        free_behind = behind.size if behind else 0
        if max(free_before, free_behind) >= size:
            return []
        pages = self._pages(size - free_before)
        if pages * page <= hole.size:
            places.append(Place(hole, hole.address, pages, (before,) if before else ()))
        pages = self._pages(size - free_behind)
        if behind and pages * page <= hole.size:
            places.append(Place(hole, hole.end - pages * page, pages, (behind,)))
        if not places and before and behind and free_before + hole.size + free_behind >= size:
            places.append(Place(hole, hole.address, hole.size // page, (before, behind)))
        return places

    @staticmethod
    def _usable(span: Span | None, stream: Hashable) -> Span | None:
        """The span, if it is free and the stream may use it at once."""
        if span is None or span.state != FREE or span.stream not in (None, stream):
            return None
        return span

    def _beside(self, span: Span, pages: int) -> Place | None:
        """Room for `pages` pages behind or before a span."""
        size = pages * self.page_bytes
        if span.next and span.next.state == UNMAPPED and span.next.size >= size:
            return Place(span.next, span.next.address, pages, (span,))
        if span.prev and span.prev.state == UNMAPPED and span.prev.size >= size:
            return Place(span.prev, span.prev.end - size, pages, (span,))
        return None

    def _reserve(self, size: int) -> Place | None:
        """Fresh addresses: as many as the pool may ever fill, for they cost nothing."""
        _, total = self._provider.memory_info()
        pages = self._pages(size)
        for wanted in (max(pages, self._pages(total)), pages):
            try:
                address = self._provider.reserve(wanted * self.page_bytes)
            except DeviceOutOfMemory:
                continue
            span = self._arena.add_range(address, wanted * self.page_bytes, mapped=False)
            self._emit("segment_alloc", address, span.size, None)
            return Place(span, address, pages, ())
        return None

    def _whole_pages(self, most: int, spared: Sequence[Span]) -> list[Run]:
        """Up to `most` pages that are wholly free and done with, out of the smallest holes first,
        so that large holes stay large."""
        runs = []
        for span in self._arena.streams.anyone.index.at_least(self.page_bytes):
            if most <= 0:
                break
            if span in spared:
                continue
            first = -(-span.address // self.page_bytes) * self.page_bytes
            pages = min(most, (span.end - first) // self.page_bytes)
            if pages > 0:
                runs.append(Run(span, first, pages))
                most -= pages
        return runs

    # Doing it ---------------------------------------------------------------------------------

    def _extra_pages(self, missing: int) -> int:
        """Pages beyond the missing ones that `block_size` and `growth_factor` ask for."""
        held = self.reserved_bytes // self.page_bytes
        wanted = max(missing, int(held * (self._config.growth_factor - 1)))
        step = self._pages(self._config.block_size)
        wanted = -(-wanted // step) * step
        return wanted - missing

    def _create(self, missing: int) -> bool:
        """Gets new pages in hand: the missing ones, and more if growth is to be generous."""
        room = self.room()
        most = missing + self._extra_pages(missing)
        if room is not None:
            most = min(most, room // self.page_bytes)
        for count in dict.fromkeys((most, missing)):
            if count < missing:
                return False
            try:
                self.in_hand.extend(self._provider.create_pages(count))
            except DeviceOutOfMemory:
                continue
            self._hold_more(count * self.page_bytes)
            return True
        return False

    def _hold_more(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def unmap(self, run: Run, *, remapped: bool = True) -> None:
        """Takes the pages of a free run in hand. `remapped`: to map them elsewhere."""
        size = run.pages * self.page_bytes
        self._provider.unmap_pages(run.address, run.pages)
        cut = self._arena.carve(run.span, run.address, size)
        self._arena.put_unmapped(cut)
        addresses = range(run.address, run.address + size, self.page_bytes)
        self.in_hand.extend(self.mapped.pop(address) for address in addresses)
        self.pages_remapped += run.pages if remapped else 0
        self._emit("segment_unmap", run.address, size, None)

    def _map(self, place: Place, stream: Hashable) -> Span:
        """Maps pages in hand where they make the hole, and returns that."""
        size = place.pages * self.page_bytes
        pages = self.in_hand[-place.pages :]
        self._provider.map_pages(place.address, pages)
        del self.in_hand[-place.pages :]
        span = self._arena.cut_unmapped(self.hole_at(place.address), place.address, size)
        for offset, page in enumerate(pages):
            self.mapped[place.address + offset * self.page_bytes] = page
        self._emit("segment_map", place.address, size, None)
        span.stream, span.epoch = None, 0
        owned = [one for one in place.neighbours if one.stream is not None]
        if owned:
            span.stream, span.epoch = stream, max(one.epoch for one in owned)
            for one in place.neighbours:
                if one.stream is None:
                    self._arena.retag(one, stream, span.epoch)
        return self._arena.put_free(span)

    def _grow_by_segment(self, size: int) -> Span | None:
        """One more segment of the driver, for providers that cannot map pages."""
        least = self._pages(size)
        most = least + self._extra_pages(least)
        room = self.room()
        if room is not None:
            most = min(most, room // self.page_bytes)
        for count in dict.fromkeys((most, least)):
            if count < least:
                return None
            segment = count * self.page_bytes
            try:
                address = self._provider.reserve(segment)
            except DeviceOutOfMemory:
                continue
            self._hold_more(segment)
            self._emit("segment_alloc", address, segment, None)
            return self._arena.add_range(address, segment, mapped=True)
        return None
