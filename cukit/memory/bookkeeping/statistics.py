"""Numbers about a pool."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cukit.memory.bookkeeping.survey import Survey
    from cukit.memory.pool.pager import Pager


@dataclass(frozen=True)
class StreamStatistics:
    """What one stream holds. Bytes."""

    live_bytes: int = 0
    pending_bytes: int = 0
    free_bytes: int = 0
    """Free, and reusable by this stream at once."""


@dataclass(frozen=True)
class PoolStatistics:
    """A pool at one moment, or over one scope. Bytes; peaks and counts are of the scope."""

    live_bytes: int
    requested_bytes: int
    """What callers asked for, before rounding."""
    pending_bytes: int
    free_bytes: int
    reserved_bytes: int
    """Taken from the device: live + pending + free."""
    limit_bytes: int | None
    peak_live_bytes: int
    """Through CuPy an upper bound: what an array has given up counts until the pool looks for
    memory that it has not at hand (handover.py)."""
    peak_reserved_bytes: int
    num_live: int
    num_allocations: int
    num_frees: int
    num_hits: int
    """Allocations served by a block of exactly the right size, freed before on the same stream."""
    num_out_of_memory: int
    num_defragments: int
    bytes_moved: int
    pages_remapped: int
    largest_free_bytes: int
    reclaimable_by_remap_bytes: int
    """Wholly free pages: what remapping can gather behind new addresses."""
    per_stream: dict[Hashable, StreamStatistics] = field(default_factory=dict)

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes; 0 when nothing is free."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the allocations served by an exact fit."""
        return self.num_hits / self.num_allocations if self.num_allocations else 0.0


@dataclass(frozen=True)
class DefragmentReport:
    """What one defragmentation did."""

    bytes_moved: int
    pages_remapped: int
    fragmentation_before: float
    fragmentation_after: float
    largest_free_before: int
    largest_free_after: int
    seconds: float


class _Start(NamedTuple):
    """How things stood when a scope was opened."""

    peak_live_bytes: int = 0
    peak_reserved_bytes: int = 0
    facts: tuple[int, ...] = (0,) * 7


class Counters:
    """What the pool counts as it goes. Scopes remember where the counts stood when they began."""

    __slots__ = ("_opened", "hits", "live_bytes", "misses", "peak_live_bytes")

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.live_bytes = 0
        self.peak_live_bytes = 0
        self._opened = [_Start()]

    @property
    def allocations(self) -> int:
        """All that succeeded."""
        return self.hits + self.misses

    def open_scope(self, pager: Pager, facts: tuple[int, ...]) -> None:
        """Peaks start again from what is there now; `facts` as `statistics` takes them."""
        self._opened.append(_Start(self.peak_live_bytes, pager.peak_reserved_bytes, facts))
        self.peak_live_bytes = self.live_bytes
        pager.peak_reserved_bytes = pager.reserved_bytes

    def close_scope(self, pager: Pager) -> None:
        """The scope around gets its peaks back, raised by those of the inner one."""
        outer = self._opened.pop()
        self.peak_live_bytes = max(self.peak_live_bytes, outer.peak_live_bytes)
        pager.peak_reserved_bytes = max(pager.peak_reserved_bytes, outer.peak_reserved_bytes)

    def statistics(
        self,
        survey: Survey,
        pager: Pager,
        facts: tuple[int, ...],
        num_live: int,
        limit: int | None,
    ) -> PoolStatistics:
        """`facts`: allocations, hits, frees, failures, defragmentations, bytes moved, pages
        remapped, since the pool was made."""
        start = self._opened[-1].facts
        counts = [now - before for now, before in zip(facts, start, strict=True)]
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
