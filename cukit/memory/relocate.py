"""Defragmentation: moves what may move, then gathers the pages that are wholly free."""

from __future__ import annotations

import time
from collections.abc import Hashable

from cukit.memory.arena import Arena
from cukit.memory.compact import Plan, plan_compaction
from cukit.memory.listeners import Listeners
from cukit.memory.pager import Pager
from cukit.memory.provider import Moves, Provider
from cukit.memory.spans import Span
from cukit.memory.statistics import DefragmentReport
from cukit.memory.supply import Supply
from cukit.memory.survey import Holes, Survey, measure_holes, pieces, survey


class Defragmenter:
    """Knows how to make free memory whole. The pool is locked while it does."""

    def __init__(
        self,
        provider: Provider,
        arena: Arena,
        pager: Pager,
        supply: Supply,
        live: dict[int, Span],
        listeners: Listeners,
    ) -> None:
        self._provider = provider
        self._arena = arena
        self._pager = pager
        self._supply = supply
        self._live = live
        self._listeners = listeners
        self.count = 0
        self.bytes_moved = 0

    def survey(self) -> Survey:
        """Everything about the pool that takes a walk to know."""
        return survey(self._arena, self._in_hand(), remap=self._provider.can_remap)

    def holes(self) -> Holes:
        """What there is of free memory, quickly."""
        return measure_holes(self._arena, self._in_hand(), remap=self._provider.can_remap)

    def _in_hand(self) -> int:
        return len(self._pager.in_hand) * self._pager.page_bytes

    def run(self, stream: Hashable) -> DefragmentReport:
        """Waits for the device, moves, remaps."""
        start = time.perf_counter()
        before = self.holes()
        self._supply.stop_the_world()
        moved = self.compact(stream)
        remapped = self._pager.consolidate()
        after = self.holes()
        self.count += 1
        self._listeners.emit("defragment", 0, moved, stream)
        return DefragmentReport(
            bytes_moved=moved,
            pages_remapped=remapped,
            fragmentation_before=before.fragmentation,
            fragmentation_after=after.fragmentation,
            largest_free_before=before.largest,
            largest_free_after=after.largest,
            seconds=time.perf_counter() - start,
        )

    def compact(self, stream: Hashable) -> int:
        """Moves unpinned buffers; returns the bytes. The device is idle before and after."""
        plan = plan_compaction(
            pieces(self._arena), self._pager.page_bytes, remap=self._provider.can_remap
        )
        if not plan.relocations:
            return 0
        self._copy(plan, stream)
        self._commit(plan)
        self.bytes_moved += plan.bytes_moved
        return plan.bytes_moved

    def _copy(self, plan: Plan, stream: Hashable) -> None:
        done: list[Moves] = []
        try:
            for step in plan.steps:
                self._provider.copy(step, stream)
                done.append(step)
            event = self._provider.record(stream)
            try:
                self._provider.synchronize(event)
            finally:
                self._provider.discard(event)
        except BaseException:
            # Later steps may have overwritten what earlier ones read: take them back in turn.
            for step in reversed(done):
                self._provider.copy(step[:, [1, 0, 2]], stream)
            self._provider.synchronize_device()
            raise

    def _commit(self, plan: Plan) -> None:
        """Brings the books in line with where the bytes are now.

        Listeners see a move as a free of the old place and an allocation of the new one.
        """
        told = self._listeners.active
        arrivals = {}
        for old, new in plan.relocations.items():
            span = arrivals[new] = self._live.pop(old)
            if told:
                self._listeners.moved_away(span)
            span.uses = ()
        self._arena.place(arrivals)
        for address in sorted(arrivals):
            self._live[address] = span = arrivals[address]
            if told:
                self._listeners.moved_here(span)
