"""Counts and peaks of a pool, with nested scopes."""

from __future__ import annotations

from typing import NamedTuple

from cukit.memory.bookkeeping.statistics import PoolStatistics
from cukit.memory.bookkeeping.survey import Survey
from cukit.memory.pool.pager import Pager


class _Start(NamedTuple):
    """State of the counters when a scope was opened."""

    peak_live_bytes: int = 0
    peak_reserved_bytes: int = 0
    totals: tuple[int, ...] = (0,) * 7


class Counters:
    """Running counts of a pool. A scope stores the counts at its start and reports differences."""

    __slots__ = ("_opened", "hits", "live_bytes", "misses", "peak_live_bytes")

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.live_bytes = 0
        self.peak_live_bytes = 0
        self._opened = [_Start()]

    @property
    def allocations(self) -> int:
        """Successful allocations."""
        return self.hits + self.misses

    def open_scope(self, pager: Pager, totals: tuple[int, ...]) -> None:
        """Restarts the peaks from the current values; `totals` as for `statistics`."""
        self._opened.append(_Start(self.peak_live_bytes, pager.peak_reserved_bytes, totals))
        self.peak_live_bytes = self.live_bytes
        pager.peak_reserved_bytes = pager.reserved_bytes

    def close_scope(self, pager: Pager) -> None:
        """Restores the outer scope's peaks, raised to those of the inner scope."""
        outer = self._opened.pop()
        self.peak_live_bytes = max(self.peak_live_bytes, outer.peak_live_bytes)
        pager.peak_reserved_bytes = max(pager.peak_reserved_bytes, outer.peak_reserved_bytes)

    def statistics(
        self,
        survey: Survey,
        pager: Pager,
        totals: tuple[int, ...],
        num_live: int,
        limit: int | None,
    ) -> PoolStatistics:
        """`totals`: allocations, hits, frees, failures, defragmentations, bytes moved and pages
        remapped since the pool was created."""
        start = self._opened[-1].totals
        counts = [now - before for now, before in zip(totals, start, strict=True)]
        return PoolStatistics(
            live_bytes=survey.live,
            requested_bytes=survey.requested,
            pending_bytes=survey.pending,
            free_bytes=survey.free,
            reserved_bytes=pager.reserved_bytes,
            limit_bytes=limit,
            peak_live_bytes=self.peak_live_bytes,
            peak_reserved_bytes=pager.peak_reserved_bytes,
            num_live=num_live,
            num_allocations=counts[0],
            num_hits=counts[1],
            num_frees=counts[2],
            num_out_of_memory=counts[3],
            num_defragments=counts[4],
            bytes_moved=counts[5],
            pages_remapped=counts[6],
            largest_free_bytes=survey.largest_free,
            reclaimable_by_remap_bytes=survey.whole_pages,
            per_stream=survey.per_stream,
        )
