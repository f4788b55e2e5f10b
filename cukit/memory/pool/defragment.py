"""Defragmentation: moves unpinned buffers, then remaps wholly free pages into one hole."""

from __future__ import annotations

import time
from collections.abc import Hashable
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from cukit.memory.batched_copy import Moves
from cukit.memory.bookkeeping.arena import Arena
from cukit.memory.bookkeeping.compaction import Ints, Plan, plan_compaction
from cukit.memory.bookkeeping.movables import Movables
from cukit.memory.bookkeeping.slots import plan_slots
from cukit.memory.bookkeeping.spans import NO_ROW, Span
from cukit.memory.bookkeeping.statistics import DefragmentReport
from cukit.memory.bookkeeping.survey import (
    FixedSpans,
    Holes,
    Survey,
    UsedSpans,
    measure,
    measure_slots,
    survey,
)
from cukit.memory.pool.listeners import Listeners
from cukit.memory.pool.pager import Pager
from cukit.memory.pool.stitch import Stitcher
from cukit.memory.pool.supply import Supply
from cukit.memory.providers.provider import Provider
from cukit.memory.slot_grid import Grid

ALL = 1 << 62
"""More pages than a pool can have."""

_NO_EVENT = object()


class _Compaction(NamedTuple):
    """A compaction whose moves are enqueued and recorded."""

    before: Holes
    after: Holes
    moved: int
    """Bytes; 0: there is no event."""
    scattered: bool
    """Whether wholly free pages are in several places."""
    event: Any
    """Recorded after the copies."""


class Defragmenter:
    """Compacts and remaps. All methods require the pool's lock."""

    def __init__(
        self,
        provider: Provider,
        arena: Arena,
        pager: Pager,
        stitcher: Stitcher,
        supply: Supply,
        live: dict[int, Span],
        movables: Movables,
        listeners: Listeners,
    ) -> None:
        self._provider = provider
        self._arena = arena
        self._pager = pager
        self._stitcher = stitcher
        self._supply = supply
        self._live = live
        self._movables = movables
        self._listeners = listeners
        self.count = 0
        self.bytes_moved = 0

    def survey(self) -> Survey:
        """Totals over all spans; visits every span."""
        self._movables.unpack_all()
        return survey(self._arena, self._used_spans(), self._pager.paging())

    def holes(self) -> Holes:
        """Measures free memory without visiting each span in Python."""
        return self._used_spans().holes(self._pager.paging())

    def _used_spans(self) -> UsedSpans:
        fixed = self._fixed_spans()
        return UsedSpans.of(self._movables.columns(), fixed)

    def _fixed_spans(self) -> FixedSpans:
        """The used spans that cannot move. The movable spans are the rows of Movables until
        Movables is settled again.

        The copies start only after this function returns, and with cold caches its code takes ten
        times as long, so empty containers are skipped.
        """
        arena, live, movables = self._arena, self._live, self._movables
        movables.settle()
        fixed: list[Span] = []
        unavailable: list[Span] = []
        if len(live) > movables.num_alone:
            fixed = [
                span for span in live.values() if span.holder is None or span.holder.row == NO_ROW
            ]
        if self._supply.pending:
            unavailable += [span for span, _ in self._supply.pending]
        if self._stitcher.stitched:
            unavailable += self._stitcher.aliased()
        for state in arena.streams.states.values():
            if state.private:  # a launch of the captured graph uses them again
                unavailable += [*chain.from_iterable(state.bins.values()), *state.index]
        unmapped = list(arena.unmapped.values())
        if len(unmapped) > 1:
            unmapped.sort(key=attrgetter("address"))
        return FixedSpans(fixed, unavailable, unmapped, arena.ranges())

    def run(self, stream: Hashable) -> DefragmentReport:
        """Synchronises the device, moves buffers, remaps pages."""
        start = time.perf_counter()
        copied = self._compact(stream)
        before, after, remapped = copied.before, copied.after, 0
        fragmentation, left = before.fragmentation, after.fragmentation
        more = copied.scattered or self._stitcher.stitched or self._pager.excess
        self.count += 1
        self._listeners.emit("defragment", 0, copied.moved, stream)
        self._finish(copied)
        if more:
            remapped, after = self._gather(after, scattered=copied.scattered)
            left = after.fragmentation
        return DefragmentReport(
            bytes_moved=copied.moved,
            pages_remapped=remapped,
            fragmentation_before=fragmentation,
            fragmentation_after=left,
            largest_free_before=before.largest,
            largest_free_after=after.largest,
            seconds=time.perf_counter() - start,
        )

    def _gather(self, after: Holes, *, scattered: bool) -> tuple[int, Holes]:
        """Remaps wholly free pages; returns their number and the holes."""
        spare = self._pager.num_spare
        undone = self._stitcher.undo()
        shed = self._pager.shed(ALL)
        remapped = self._pager.consolidate() if undone or shed or scattered else 0
        if undone or shed or remapped or spare != self._pager.num_spare:
            after = self._merged_holes()
        return remapped, after

    def _merged_holes(self) -> Holes:
        """`holes` after a compaction, when all free memory is merged and in the shared index."""
        spans = list(self._arena.streams.shared.index)
        address = np.array([span.address for span in spans], np.int64)
        size = np.array([span.size for span in spans], np.int64)
        order = np.argsort(address)
        return measure(address[order], size[order], self._pager.paging())

    def compact(self, stream: Hashable) -> int:
        """Synchronises the device and moves unpinned buffers; returns the bytes moved."""
        copied = self._compact(stream)
        self._finish(copied)
        self._stitcher.undo()
        return copied.moved

    def _compact(self, stream: Hashable) -> _Compaction:
        """Moves buffers. The copies start on an idle device, overlap host work that does not
        affect them, and may still be running on return; `_finish` waits for them."""
        if self._supply.pending:  # the plan depends on whether these frees are complete
            self._supply.synchronize()
        fixed = self._fixed_spans()
        grid, size = None, self._movables.only_size
        if size and self._provider.can_remap:
            grid = fixed.grid(size, len(self._movables), self._pager.page_bytes)
        found = None
        if grid is not None and self._provider.plans_slots:
            found = self._compact_on_device(fixed, grid, stream)
        return found or self._compact_from_host(fixed, grid, stream)

    def _finish(self, copied: _Compaction) -> None:
        """Waits for the copies."""
        if not copied.moved:
            return
        try:
            self._provider.synchronize(copied.event)
        except BaseException:
            self._provider.synchronize_device()
            raise
        finally:
            self._provider.discard(copied.event)

    def _compact_on_device(
        self, fixed: FixedSpans, grid: Grid, stream: Hashable
    ) -> _Compaction | None:
        """`_compact` with a plan computed by the device; None if the plan moves nothing."""
        provider, movables = self._provider, self._movables
        walls = fixed.walls(grid)
        provider.synchronize_device()
        event: Any = _NO_EVENT
        try:
            started = provider.move_slots(grid, movables.addresses, walls, stream)
            if started is None:
                return None
            event = provider.record(stream)
            self._arena.streams.mark_all_done()
            used = UsedSpans.of(movables.columns(), fixed)
            paging = self._pager.paging()
            if walls or len(paging.large_at):
                before = used.holes(paging)
            else:
                before = measure_slots(grid, used.movable, paging)
            moves = started.wait()
            if moves is None:
                provider.discard(event)
                return None
            rows, slots = moves
            target = used.movable.copy()
            target[used.rows.searchsorted(rows)] = (slots << grid.slot_shift) + grid.begin
            moved = len(rows) << grid.slot_shift
            return self._committed(used, Plan(used.movable, target), moved, before, event)
        except BaseException:
            # Before the commit nothing is lost: the copies only write to free memory.
            provider.synchronize_device()
            if event is not _NO_EVENT:
                provider.discard(event)
            raise

    def _compact_from_host(
        self, fixed: FixedSpans, grid: Grid | None, stream: Hashable
    ) -> _Compaction:
        """`_compact` with a plan computed by the host while the device finishes earlier work."""
        used = UsedSpans.of(self._movables.columns(), fixed)
        plan = None
        if grid is not None:
            inside = used.others_at < grid.end
            walls, wall_size = used.others_at[inside], used.others_size[inside]
            plan = plan_slots(grid, used.movable, walls, wall_size)
        if plan is None:
            used = used.in_address_order()
            page, remap = self._pager.page_bytes, self._provider.can_remap
            plan = plan_compaction(used.pieces, page, remap=remap)
        self._supply.synchronize()
        if not plan.steps:
            return self._committed(used, plan, 0, used.holes(self._pager.paging()), _NO_EVENT)
        event = self._copy(plan, stream)
        try:
            before = used.holes(self._pager.paging())
            return self._committed(used, plan, plan.bytes_moved, before, event)
        except BaseException:
            self._provider.synchronize_device()
            self._provider.discard(event)
            raise

    def _committed(
        self, used: UsedSpans, plan: Plan, moved: int, before: Holes, event: Any
    ) -> _Compaction:
        after = self._commit(used, plan)
        self.bytes_moved += moved
        return _Compaction(before, after, moved, self._pager.scattered(), event)

    def _copy(self, plan: Plan, stream: Hashable) -> Any:
        """Enqueues the copies; returns an event recorded after them."""
        done: list[Moves] = []
        try:
            for step in plan.steps:
                self._provider.copy(step, stream)
                done.append(step)
            return self._provider.record(stream)
        except BaseException:
            # Later steps may have overwritten sources of earlier ones: undo in reverse order.
            for step in reversed(done):
                self._provider.copy(step[:, [1, 0, 2]], stream)
            self._provider.synchronize_device()
            raise

    def _commit(self, used: UsedSpans, plan: Plan) -> Holes:
        """Records the moves and packs all buffers; returns the holes.

        Listeners receive a move as a free at the old address and an allocation at the new one.
        """
        bounds = [part.address for part in self._arena.ranges()]
        packed, at, size = self._movables.pack(used.rows, plan.target, used.movable_size, bounds)
        live = self._live
        live.clear()
        live.update((span.address, span) for span in used.live)
        if self._listeners.active:
            self._report(used.rows[plan.moved], plan)
        free = self._arena.place(
            packed + used.others,
            np.concatenate((at, used.others_at)),
            np.concatenate((size, used.others_size)),
        )
        return measure(*free, self._pager.paging())

    def _report(self, rows: Ints, plan: Plan) -> None:
        """Sends the moves to the listeners."""
        spans = [holder.span for holder in self._movables.holders(rows)]
        source, target = plan.source[plan.moved].tolist(), plan.target[plan.moved]
        for span, before, after in zip(spans, source, target.tolist(), strict=True):
            self._listeners.moved_away(span, before, after)
        for number in target.argsort().tolist():
            self._listeners.moved_here(spans[number], int(target[number]), source[number])
