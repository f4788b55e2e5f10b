"""Creates, maps, unmaps and destroys the physical pages of a pool.

The pool grows in three ways, cheapest first: spare pages (created but not mapped), wholly free
pages (remapped: unmapped at the old address and mapped at the new one, without copying bytes or
changing the address of a live block), and new pages from the driver. If one of the steps fails,
the pages of the steps before it stay spare, so a failure needs no rollback.

Each driver call costs a fixed time per handle, whatever the handle's size. A request of many pages
therefore gets large pages, if the provider has them: several pages behind one handle, mapped,
unmapped and destroyed as one. Below the limit, new large pages are created; the scattered single
pages that would have been remapped stay free where they are, and the same number of pages is
returned to the device during later requests (`shed`). At the limit, single pages are destroyed and
created again as large ones, which takes less time than mapping them one by one. A large page with a
live byte cannot be remapped, so a free one is split into single pages before a block takes part of
it (`split_partly_used`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from cukit.memory.bookkeeping.arena import Arena
from cukit.memory.bookkeeping.spans import FREE, UNMAPPED, Span
from cukit.memory.bookkeeping.survey import Paging
from cukit.memory.pool.config import MemoryPoolConfig
from cukit.memory.pool.listeners import Emit
from cukit.memory.providers.provider import DeviceOutOfMemory, Provider

MANY_LARGE = 2
"""Requests that fill at least this many large pages get large pages."""

WORTH_SPLITTING = 8
"""A large page is split if the part that a block leaves unused is at least 1/8 of the block."""

SHED_AT_ONCE = 32
"""Maximum number of pages returned to the device after a request that needed no driver call; this
takes about a millisecond."""

NEARLY_FULL = 0.9
"""Fraction of the limit. In a pool that holds at least this much, blocks are placed where they take
the fewest wholly free pages."""


class Place(NamedTuple):
    """Unmapped addresses where new pages complete a hole that is large enough."""

    hole: Span
    """An unmapped span."""
    address: int
    pages: int
    neighbours: tuple[Span, ...]
    """Free spans that the new pages are merged with."""


class Run(NamedTuple):
    """Contiguous pages, wholly inside one free span."""

    span: Span
    address: int
    pages: int


class Pager:
    """Maps and unmaps the memory of an arena."""

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
        """Mapped single pages by address."""
        self.spare: list[Any] = []
        """Single pages that are not mapped."""
        self.large_spare: list[tuple[Any, ...]] = []
        """Large pages that are not mapped: the pages of each."""
        self.large_mapped: dict[int, tuple[Any, ...]] = {}
        """Mapped large pages by address: the pages of each."""
        self._large_starts: list[int] = []
        """The addresses of `large_mapped`, ascending."""
        self.large_pages = provider.large_pages if self._remaps else 1
        self.large_from = MANY_LARGE * self.large_pages
        """Requests of this many pages or more get large ones."""
        self.excess = 0
        """Pages to return to the device (`shed`)."""
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.pages_remapped = 0

    @property
    def num_spare(self) -> int:
        """Spare pages, those of large pages included."""
        return len(self.spare) + len(self.large_spare) * self.large_pages

    def paging(self) -> Paging:
        """How memory is mapped, for computing the holes that remapping can create."""
        firsts = np.array(self._large_starts, np.int64)
        spare = self.num_spare * self.page_bytes
        return Paging(self.page_bytes, spare, self._remaps, self.large_pages, firsts)

    @property
    def limited(self) -> bool:
        """Whether the pool can run out of pages before the device does."""
        return self._config.max_pool_size is not None and self._remaps

    @property
    def nearly_full(self) -> bool:
        """Whether the pool has grown nearly to its limit."""
        limit = self._config.max_pool_size
        return limit is not None and self._remaps and self.reserved_bytes >= NEARLY_FULL * limit

    def grow(
        self,
        size: int,
        stream: Hashable,
        *,
        fewer_than: int | None = None,
        alone: bool = False,
    ) -> Span | None:
        """Maps pages so that the stream has a hole of at least `size` bytes; returns the hole.

        `fewer_than`: only if a free neighbour lets fewer pages than this suffice.
        `alone`: without merging with a free neighbour.
        Returns None if the limit or the device forbids it, or if there is no such place.
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
        return self._map(place, stream) if self.convert_spare(place.pages) else None

    def find_pages(self, count: int, excluded: Sequence[Span]) -> list[Run] | None:
        """Creates missing pages, as far as the limit and the device allow, and returns the runs to
        unmap so that `count` pages are spare. None: there are too few."""
        missing = count - self.num_spare
        runs = self._whole_pages(missing, excluded) if missing > 0 else []
        found = sum(run.pages for run in runs)
        large = count >= self.large_from
        if large and runs and self.large_pages > 1:
            kept = self._create_instead(runs, max(missing - found, 0))
            if kept:
                missing -= kept
                runs = self._whole_pages(missing, excluded, large_first=True) if missing > 0 else []
                found = sum(run.pages for run in runs)
        missing -= found
        return runs if missing <= 0 or self._create(missing, large=large) else None

    def _create_instead(self, runs: Sequence[Run], others: int) -> int:
        """In a pool with a limit, creates large pages instead of remapping the single pages of
        `runs`, which takes several times as long. The limit must also admit `others` new pages.

        Returns the number of single pages that need not be remapped, 0 if the device lacks memory.
        `shed` returns the same number to the device later.
        """
        step, room = self.large_pages, self.room()
        if room is None:
            return 0
        single = sum(run.pages - self._large_in(run) * step for run in runs)
        single = min(single, room // self.page_bytes - others)
        if single < step:
            return 0
        try:
            self._create_large(single // step)
        except DeviceOutOfMemory:
            return 0
        self.excess += single // step * step
        return single // step * step

    def _large_in(self, run: Run) -> int:
        """The number of large pages in a run."""
        starts, end = self._large_starts, run.address + run.pages * self.page_bytes
        return bisect_left(starts, end) - bisect_left(starts, run.address)

    def shed(self, most: int = SHED_AT_ONCE, excluded: Span | None = None) -> int:
        """Returns to the device up to `most` of the pages that `_create_instead` left in place, or
        others that are wholly free; returns their number. `excluded`: a free span that stays as it
        is."""
        most = min(most, self.excess)
        if not most:
            return 0
        runs: list[Run] = []
        found = 0
        for span in self._arena.streams.shared.index.at_least(self.page_bytes, most + 1):
            if span is excluded:
                continue
            for run in self._runs(span, most - found, False if self.large_mapped else None):
                runs.append(run)
                found += run.pages
            if found >= most:
                break
        before = len(self.spare)
        for run in self._joined(runs):
            self.unmap(run, remapped=False)
        pages = self.spare[before:]
        if pages:
            self._provider.destroy_pages(pages)
            del self.spare[before:]
            self.reserved_bytes -= len(pages) * self.page_bytes
        self.excess -= found
        return len(pages)

    def convert_spare(self, count: int) -> bool:
        """Converts spare pages so that they can be mapped as `count` pages: single pages to large
        ones if `count` is large, large pages to single ones if those are too few.

        Returns False if another process took a page from the device meanwhile.
        """
        step = self.large_pages
        if step == 1:
            return len(self.spare) >= count
        if count >= self.large_from:
            wanted = count // step - len(self.large_spare)
            self._make_large(min(wanted, len(self.spare) // step))
        while self._missing_single(count) > 0 and self.large_spare:
            self._split_large()
        return self._missing_single(count) <= 0

    def _missing_single(self, count: int) -> int:
        """Missing single pages, if `count` pages contain as many spare large pages as fit."""
        large = min(len(self.large_spare), count // self.large_pages)
        return count - large * self.large_pages - len(self.spare)

    def split_partly_used(self, span: Span, start: int, size: int) -> Span | None:
        """Splits the large pages of a free span that a block of `size` bytes at `start` would fill
        only in part, if any stream may use the span. Returns the span.

        Returns None if another process took a page from the device meanwhile; the span is then
        no longer valid.
        """
        page, step = self.page_bytes, self.large_pages * self.page_bytes
        for at in (start // page * page, (start + size - 1) // page * page):
            first = self.large_around(at)
            if first is None or (start <= first and first + step <= start + size):
                continue
            if span.address > first or first + step > span.end or span.stream is not None:
                continue  # the large page is partly in use, or reserved for one stream
            used = min(first + step, start + size) - max(first, start)
            if (step - used) * WORTH_SPLITTING < size:
                continue
            self.unmap(Run(span, first, self.large_pages), remapped=False)
            self._split_large()
            if len(self.spare) < self.large_pages:
                return None
            place = Place(self.hole_at(first), first, self.large_pages, ())
            span = self._map(place, None, single=True)
        return span

    def large_around(self, address: int) -> int | None:
        """The address of the mapped large page that contains an address."""
        number = bisect_right(self._large_starts, address) - 1
        if number < 0:
            return None
        first = self._large_starts[number]
        return first if address < first + self.large_pages * self.page_bytes else None

    def find_addresses(self, pages: int) -> Place | None:
        """Unmapped addresses for `pages` pages, wherever they are; reserved if needed."""
        size = pages * self.page_bytes
        return self._place(size, None, alone=True) or self._reserve(size)

    def hole_at(self, address: int) -> Span:
        """The unmapped span that contains an address; unmapping may have merged it with others."""
        return next(
            span for span in self._arena.unmapped.values() if span.address <= address < span.end
        )

    def prepare(self, size: int) -> bool:
        """Creates and maps pages of at least `size` bytes before any request."""
        return self.grow(size, None) is not None

    def scattered(self) -> bool:
        """Whether `consolidate` may find something to remap."""
        largest = self._arena.streams.shared.index.largest()
        if not self._remaps or largest is None:
            return False
        return bool(self.num_spare or self._whole_pages(1, (largest,)))

    def consolidate(self) -> int:
        """Remaps all wholly free pages into one hole; returns how many were remapped.

        No stream may still use free memory (Streams.mark_all_done).
        """
        largest = self._arena.streams.shared.index.largest()
        if not self._remaps or largest is None:
            return 0
        runs = self._whole_pages(1 << 62, (largest,))
        pages = self.num_spare + sum(run.pages for run in runs)
        if not pages:
            return 0
        place = self._beside(largest, pages)
        if place is None:
            runs = self._whole_pages(1 << 62, ())
            pages = self.num_spare + sum(run.pages for run in runs)
            if pages * self.page_bytes <= largest.size:
                return 0
            place = self._place(pages * self.page_bytes, None, alone=True)
            if place is None:
                place = self._reserve(pages * self.page_bytes)
            if place is None:
                return 0
        for run in runs:
            self.unmap(run)
        if not self.convert_spare(pages):
            place = place._replace(pages=self.num_spare)
        if place.pages:  # another process may have taken all of the memory
            self._map(place, None)
        return sum(run.pages for run in runs)

    def trim(self) -> int:
        """Returns every wholly free page, or segment, and every empty range to the device."""
        before = self.reserved_bytes
        self.excess = 0
        if self._remaps:
            for run in self._whole_pages(1 << 62, ()):
                self.unmap(run, remapped=False)
            spare = [*self.spare, *chain.from_iterable(self.large_spare)]
            if spare:
                self._provider.destroy_pages(spare)
                self.reserved_bytes -= len(spare) * self.page_bytes
                self.spare.clear()
                self.large_spare.clear()
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
        """Returns everything to the device, live memory included."""
        provider, page = self._provider, self.page_bytes
        addresses = sorted(self.mapped)
        while addresses:
            count = 1
            while count < len(addresses) and addresses[count] == addresses[0] + count * page:
                count += 1
            provider.unmap_pages(addresses[0], count)
            self.spare.extend(self.mapped.pop(address) for address in addresses[:count])
            del addresses[:count]
        for address, pages in self.large_mapped.items():
            provider.unmap_pages(address, self.large_pages)
            self.spare.extend(pages)
        self.large_mapped.clear()
        self._large_starts.clear()
        self.spare.extend(chain.from_iterable(self.large_spare))
        self.large_spare.clear()
        if self.spare:
            provider.destroy_pages(list(dict.fromkeys(self.spare)))  # aliased pages appear twice
            self.spare.clear()
        for part in self._arena.ranges():
            provider.release(part.address, part.size)

    def room(self) -> int | None:
        """Bytes left below the limit; None: no limit."""
        limit = self._config.max_pool_size
        return None if limit is None else max(0, limit - self.reserved_bytes)

    # Finding a place --------------------------------------------------------------------------

    def _pages(self, size: int) -> int:
        return -(-size // self.page_bytes)

    def _place(self, size: int, stream: Hashable, *, alone: bool = False) -> Place | None:
        """The unmapped addresses that need the fewest pages to become a hole of `size` bytes. Ties
        go to the smallest free neighbours: large ones can save a later request a page."""
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
        """The span, if it is free and the stream may use it without waiting."""
        if span is None or span.state != FREE or span.stream not in (None, stream):
            return None
        return span

    def _beside(self, span: Span, pages: int) -> Place | None:
        """Unmapped addresses for `pages` pages right after or right before a span."""
        size = pages * self.page_bytes
        if span.next and span.next.state == UNMAPPED and span.next.size >= size:
            return Place(span.next, span.next.address, pages, (span,))
        if span.prev and span.prev.state == UNMAPPED and span.prev.size >= size:
            return Place(span.prev, span.prev.end - size, pages, (span,))
        return None

    def _reserve(self, size: int) -> Place | None:
        """Reserves addresses for all of the device's memory, because addresses cost nothing; for
        `size` bytes if that fails or `size` is larger."""
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

    def _whole_pages(
        self, most: int, excluded: Sequence[Span], *, large_first: bool = False
    ) -> list[Run]:
        """`most` wholly free pages that any stream may use (more if the last is a large page), or
        all there are, from the smallest holes first, so that large holes stay large.

        Large pages are taken first if `most` fills several or with `large_first`; otherwise after
        all single ones.
        """
        spans = [
            span
            for span in self._arena.streams.shared.index.at_least(self.page_bytes)
            if span not in excluded
        ]
        runs: list[Run] = []
        many = large_first or most >= self.large_from
        for large in (many, not many) if self.large_mapped else (None,):
            for span in spans:
                if most <= 0:
                    break
                found = list(self._runs(span, most, large))
                most -= sum(run.pages for run in found)
                runs += found
        return self._joined(runs) if self.large_mapped else runs

    def _joined(self, runs: Sequence[Run]) -> list[Run]:
        """Joins adjacent runs. The result is in descending order of address, because `unmap` leaves
        the run's Span with the bytes below the run."""
        joined: list[Run] = []
        for run in sorted(runs, key=attrgetter("address"), reverse=True):
            last = joined[-1] if joined else None
            end = run.address + run.pages * self.page_bytes
            if last is not None and last.span is run.span and last.address == end:
                joined[-1] = Run(run.span, run.address, run.pages + last.pages)
            else:
                joined.append(run)
        return joined

    def _runs(self, span: Span, most: int, large: bool | None) -> Iterator[Run]:
        """The wholly free pages of a free span: only large ones, only single ones, or, if the pool
        has no large ones, all (`large=None`). At most `most` single ones."""
        page = self.page_bytes
        at, end = -(-span.address // page) * page, span.end // page * page
        if large is None:
            if at < end:
                yield Run(span, at, min(most, (end - at) // page))
            return
        step, starts = self.large_pages * page, self._large_starts
        around = self.large_around(at)
        if around is not None and around < at:  # its start is in use
            at = around + step
        number = bisect_left(starts, at)
        while at < end and most > 0:
            first = min(starts[number], end) if number < len(starts) else end
            if not large and first > at:
                pages = min((first - at) // page, most)
                most -= pages
                yield Run(span, at, pages)
            at, number = first + step, number + 1
            if large and at <= end:
                most -= self.large_pages
                yield Run(span, first, self.large_pages)

    # Creating and mapping ---------------------------------------------------------------------

    def _extra_pages(self, missing: int) -> int:
        """Pages beyond the missing ones that `block_size` and `growth_factor` require."""
        held = self.reserved_bytes // self.page_bytes
        wanted = max(missing, int(held * (self._config.growth_factor - 1)))
        step = self._pages(self._config.block_size)
        wanted = -(-wanted // step) * step
        return wanted - missing

    def _create(self, missing: int, *, large: bool) -> bool:
        """Creates the missing pages, and those of `_extra_pages` if possible. `large`: as large
        pages as far as possible. False: the limit or the device forbids it."""
        room = self.room()
        most = missing + self._extra_pages(missing)
        if room is not None:
            most = min(most, room // self.page_bytes)
        together = most // self.large_pages if large and self.large_pages > 1 else 0
        if together and most >= missing:
            with suppress(DeviceOutOfMemory):
                self._create_large(together)
                most -= together * self.large_pages
                missing = max(missing - together * self.large_pages, 0)
        for count in dict.fromkeys((most, missing)):
            if count < missing:
                return False
            try:
                self._create_single(count)
            except DeviceOutOfMemory:
                continue
            return True
        return False

    def _create_single(self, count: int) -> None:
        if count:
            self.spare.extend(self._provider.create_pages(count))
            self._hold_more(count * self.page_bytes)

    def _create_large(self, count: int) -> None:
        self.large_spare.extend(self._provider.create_large_pages(count))
        self._hold_more(count * self.large_pages * self.page_bytes)

    def _make_large(self, count: int) -> None:
        """Converts spare single pages to `count` large ones."""
        if count <= 0:
            return
        single = count * self.large_pages
        self._provider.destroy_pages(self.spare[-single:])
        del self.spare[-single:]
        self.reserved_bytes -= single * self.page_bytes
        try:
            self._create_large(count)
        except DeviceOutOfMemory:
            with suppress(DeviceOutOfMemory):
                self._create_single(single)

    def _split_large(self) -> None:
        """Converts one spare large page to single pages. If another process takes the memory
        between the two driver calls, none are created."""
        self._provider.destroy_pages(self.large_spare[-1])
        del self.large_spare[-1]
        self.reserved_bytes -= self.large_pages * self.page_bytes
        with suppress(DeviceOutOfMemory):
            self._create_single(self.large_pages)

    def _hold_more(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def unmap(self, run: Run, *, remapped: bool = True) -> None:
        """Unmaps a free run; its pages become spare. `remapped`: they will be mapped elsewhere."""
        size = run.pages * self.page_bytes
        self._provider.unmap_pages(run.address, run.pages)
        cut = self._arena.carve(run.span, run.address, size)
        self._arena.put_unmapped(cut)
        self._add_spare(run)
        self.pages_remapped += run.pages if remapped else 0
        self._emit("segment_unmap", run.address, size, None)

    def _add_spare(self, run: Run) -> None:
        """Records the pages of an unmapped run as spare."""
        page, starts = self.page_bytes, self._large_starts
        at, end = run.address, run.address + run.pages * page
        low, high = bisect_left(starts, at), bisect_left(starts, end)
        for first in starts[low:high]:
            self.spare.extend(map(self.mapped.pop, range(at, first, page)))
            self.large_spare.append(self.large_mapped.pop(first))
            at = first + self.large_pages * page
        self.spare.extend(map(self.mapped.pop, range(at, end, page)))
        del starts[low:high]

    def choose(self, count: int, *, single: bool = False) -> tuple[list[Any], int]:
        """The spare pages to map next, large pages first, and the number of large pages among them.
        `single`: no large pages."""
        large = 0 if single else min(len(self.large_spare), count // self.large_pages)
        rest = count - large * self.large_pages
        pages = list(chain.from_iterable(self.large_spare[len(self.large_spare) - large :]))
        return pages + self.spare[len(self.spare) - rest :], large

    def note_mapped(self, address: int, pages: Sequence[Any], large: int) -> None:
        """Records that the pages from `choose` are mapped at `address`."""
        page, step = self.page_bytes, self.large_pages
        single = pages[large * step :]
        firsts = range(address, address + large * step * page, step * page)
        self.large_mapped.update(
            zip(firsts, self.large_spare[len(self.large_spare) - large :], strict=True)
        )
        at = bisect_left(self._large_starts, address)
        self._large_starts[at:at] = firsts
        self.mapped.update(
            zip(range(firsts.stop, address + len(pages) * page, page), single, strict=True)
        )
        del self.spare[len(self.spare) - len(single) :]
        del self.large_spare[len(self.large_spare) - large :]

    def _map(self, place: Place, stream: Hashable, *, single: bool = False) -> Span:
        """Maps spare pages at a place; returns the resulting hole."""
        size = place.pages * self.page_bytes
        pages, large = self.choose(place.pages, single=single)
        self._provider.map_pages(place.address, pages)
        span = self._arena.cut_unmapped(self.hole_at(place.address), place.address, size)
        self.note_mapped(place.address, pages, large)
        self._emit("segment_map", place.address, size, None)
        span.stream, span.epoch = None, 0
        owned = [one for one in place.neighbours if one.stream is not None]
        if owned:
            span.stream, span.epoch = stream, max(one.epoch for one in owned)
            for one in place.neighbours:
                if one.stream is None:
                    self._arena.assign_stream(one, stream, span.epoch)
        return self._arena.put_free(span)

    def _grow_by_segment(self, size: int) -> Span | None:
        """Adds a segment, for providers that cannot map pages."""
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
