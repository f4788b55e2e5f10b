"""What a walk over all spans tells: for statistics, for decisions, and for the text of an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cukit.memory.arena import Arena
from cukit.memory.blocks import Frame
from cukit.memory.compact import FREE as FREE_BYTES
from cukit.memory.compact import MOVABLE, WALL, Pieces, cut_at_pages
from cukit.memory.spans import CACHED, FREE, LIVE, PENDING, UNMAPPED, Span
from cukit.memory.statistics import StreamStatistics
from cukit.memory.streams import CaptureKey


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


class Holes(NamedTuple):
    """Free memory, whoever freed it. Bytes."""

    free: int
    largest: int
    whole_pages: int
    """What remapping can gather."""

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes; 0 when nothing is free."""
        return 1 - self.largest / self.free if self.free else 0.0


def measure_holes(arena: Arena, in_hand_bytes: int, *, remap: bool) -> Holes:
    """A quick walk over all spans. `in_hand_bytes`: pages that are mapped nowhere."""
    page = arena.page_bytes
    free = whole = in_hand_bytes
    largest = 0
    for part in arena.ranges():
        bounds = [
            (span.address, span.address + span.size)
            for span in part.spans()
            if span.state in (FREE, CACHED) and span.stream.__class__ is not CaptureKey
        ]
        if bounds:
            start, end = np.array(bounds, np.int64).T
            breaks = np.flatnonzero(end[:-1] != start[1:])
            start, end = start[np.append(0, breaks + 1)], end[np.append(breaks, -1)]
            free += int((end - start).sum())
            largest = max(largest, int((end - start).max()))
            if remap:
                pages = np.maximum(end // page - -(-start // page), 0)
                whole += int(pages.sum()) * page
    return Holes(free, largest, whole)


def pieces(arena: Arena) -> Pieces:
    """All mapped bytes as the planner of compaction wants them."""
    return Pieces.of(
        [
            (span.address, span.size, _kind(span), number)
            for number, part in enumerate(arena.ranges())
            for span in part.spans()
            if span.state != UNMAPPED
        ]
    )


def _kind(span: Span) -> int:
    if span.state == LIVE:
        return WALL if span.holder is None or span.holder.pins else MOVABLE
    return FREE_BYTES if span.state == FREE and span.stream is None else WALL


def survey(arena: Arena, in_hand_bytes: int, *, remap: bool) -> Survey:
    """Walks over all spans. `in_hand_bytes`: pages that are mapped nowhere."""
    result = Survey(free=in_hand_bytes)
    streams: dict[Hashable, list[int]] = defaultdict(lambda: [0, 0, 0])
    for span in arena.spans():
        if span.state == UNMAPPED:
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
    holes = measure_holes(arena, in_hand_bytes, remap=remap)
    result.largest_free, result.whole_pages = holes.largest, holes.whole_pages
    if result.movable:
        result.freed_by_moving = _freed_by_moving(pieces(arena), arena.page_bytes)
    result.per_stream = {key: StreamStatistics(*numbers) for key, numbers in streams.items()}
    return result


def _freed_by_moving(layout: Pieces, page_bytes: int) -> int:
    """Free bytes on pages that hold a movable byte and nothing that stays."""
    cut = cut_at_pages(layout, page_bytes)
    kind = layout.kind[cut.piece]
    pages = np.setdiff1d(cut.page[kind == MOVABLE], cut.page[kind == WALL])
    return int(cut.size[(kind == FREE_BYTES) & np.isin(cut.page, pages)].sum())
