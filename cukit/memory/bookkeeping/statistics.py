"""The numbers that a pool reports."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StreamStatistics:
    """Memory of one stream, in bytes."""

    live_bytes: int = 0
    pending_bytes: int = 0
    free_bytes: int = 0
    """Free, and reusable by this stream immediately."""


@dataclass(frozen=True)
class PoolStatistics:
    """A pool at one moment. Sizes are in bytes. Peaks and counts are those of the innermost open
    `MemoryPool.scope`; outside of any, those since the pool was created."""

    live_bytes: int
    requested_bytes: int
    """Requested by callers, before rounding."""
    pending_bytes: int
    free_bytes: int
    reserved_bytes: int
    """Taken from the device: live + pending + free."""
    limit_bytes: int | None
    peak_live_bytes: int
    """An upper bound for CuPy arrays: the memory of a destroyed array counts as live until
    the pool's next miss (pool/cupy_allocator.py)."""
    peak_reserved_bytes: int
    num_live: int
    num_allocations: int
    num_frees: int
    num_hits: int
    """Allocations served by a block of exactly that size, freed earlier on the same stream."""
    num_out_of_memory: int
    num_defragments: int
    bytes_moved: int
    pages_remapped: int
    largest_free_bytes: int
    reclaimable_by_remap_bytes: int
    """Wholly free pages, which remapping can gather at new addresses."""
    per_stream: dict[Hashable, StreamStatistics] = field(default_factory=dict)

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes; 0 when nothing is free."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of the allocations served by an exact fit."""
        return self.num_hits / self.num_allocations if self.num_allocations else 0.0


@dataclass(frozen=True)
class DefragmentReport:
    """The result of one defragmentation."""

    bytes_moved: int
    pages_remapped: int
    fragmentation_before: float
    fragmentation_after: float
    largest_free_before: int
    largest_free_after: int
    seconds: float
