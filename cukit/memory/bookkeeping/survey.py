"""What a walk over all spans tells: for statistics, for decisions, and for the text of an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from cukit.memory.bookkeeping.arena import Arena
from cukit.memory.bookkeeping.blocks import Frame
from cukit.memory.bookkeeping.compaction import Pages, Pieces
from cukit.memory.bookkeeping.spans import ELSEWHERE, LIVE, PENDING, UNMAPPED
from cukit.memory.bookkeeping.statistics import StreamStatistics
from cukit.memory.bookkeeping.streams import CaptureKey
from cukit.memory.bookkeeping.walk import Paging, Walk


@dataclass
class Survey:
    """Bytes, at one moment."""

    live: int = 0
    requested: int = 0
    pending: int = 0
    free: int = 0
    private_free: int = 0
    """Part of `free`: kept for a captured graph."""
    largest_free: int = 0
    whole_pages: int = 0
    """Part of `free` that lies on pages without a live byte: what remapping can gather."""
    movable: int = 0
    freed_by_moving: int = 0
    """Free bytes beside movable buffers, on pages that hold nothing else."""
    per_stream: dict[Hashable, StreamStatistics] = field(default_factory=dict)
    call_sites: dict[tuple[Frame, ...], tuple[int, int]] = field(default_factory=dict)
    """Bytes and count of live allocations by call site."""


def survey(arena: Arena, walk: Walk, paging: Paging) -> Survey:
    """Walks over all spans; `walk` over those that are not free."""
    result = Survey(free=paging.in_hand_bytes)
    streams: dict[Hashable, list[int]] = defaultdict(lambda: [0, 0, 0])
    for span in arena.spans():
        if span.state in (UNMAPPED, ELSEWHERE):
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
    holes = walk.holes(paging)
    result.largest_free, result.whole_pages = holes.largest, holes.whole_pages
    if result.movable:
        result.freed_by_moving = _freed_by_moving(walk.pieces, arena.page_bytes)
    result.per_stream = {key: StreamStatistics(*numbers) for key, numbers in streams.items()}
    return result


def _freed_by_moving(pieces: Pieces, page_bytes: int) -> int:
    """Free bytes on pages that hold a movable byte and nothing that stays."""
    pages = Pages(pieces, page_bytes)
    movable = pages.bytes_of(pieces.movable, pieces.movable_size)
    walls = pages.bytes_of(pieces.wall, pieces.wall_size)
    return int(pages.bytes_of(*pieces.free)[(movable > 0) & (walls == 0)].sum())
