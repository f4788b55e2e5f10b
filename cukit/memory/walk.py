"""All spans of an arena as arrays: what defragmentation reads, in one walk over linked objects.

There may be a hundred thousand spans, and moving them takes the device less time than Python needs
to look at each of them a few times. So they are looked at once, in C where that is possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from cukit.memory.compact import FREE as FREE_BYTES
from cukit.memory.compact import MOVABLE, WALL, Ints, Pieces
from cukit.memory.spans import CACHED, ELSEWHERE, FREE, LIVE, PENDING, UNMAPPED, Span
from cukit.memory.streams import CaptureKey

if TYPE_CHECKING:
    from cukit.memory.arena import Arena

_NO_BYTES = 3
"""The kind of addresses without memory; the others are those of compact.py."""

_KINDS = np.zeros(7, np.int64)
_KINDS[[LIVE, PENDING, ELSEWHERE]] = WALL
_KINDS[[CACHED, FREE]] = FREE_BYTES
_KINDS[UNMAPPED] = _NO_BYTES

_address, _size, _state = map(attrgetter, ("address", "size", "state"))


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


@dataclass(frozen=True, eq=False)
class Walk:
    """Every span, in address order; all arrays are [number]."""

    FREE: ClassVar[int] = FREE_BYTES

    spans: list[Span]
    address: Ints
    size: Ints
    kind: Ints
    """Free: of whatever stream, but not what is kept for a captured graph."""
    part: Ints
    """Of which reservation."""
    starts: Ints
    """[reservations + 1] the first span of each, then the number of all."""

    @classmethod
    def over(cls, arena: Arena) -> Walk:
        """The arena as it is now."""
        spans: list[Span] = []
        starts = []
        for reservation in arena.ranges():
            starts.append(len(spans))
            span: Span | None = reservation.first
            while span is not None:
                spans.append(span)
                span = span.next
        count = len(spans)
        address = np.fromiter(map(_address, spans), np.int64, count)
        size = np.fromiter(map(_size, spans), np.int64, count)
        state = np.fromiter(map(_state, spans), np.int64, count)
        kind = _KINDS[state]
        movable = [
            number
            for number in np.flatnonzero(state == LIVE).tolist()
            if (holder := spans[number].holder) is not None and not holder.pins
        ]
        kind[movable] = MOVABLE
        if any(one.private for one in arena.streams.states.values()):
            for number in np.flatnonzero(kind == FREE_BYTES).tolist():
                if isinstance(spans[number].stream, CaptureKey):
                    kind[number] = WALL
        bounds = np.array([*starts, count], np.int64)
        part = np.repeat(np.arange(len(starts)), np.diff(bounds))
        return cls(spans, address, size, kind, part, bounds)

    def pieces(self) -> Pieces:
        """The mapped bytes as the planner of compaction wants them: free neighbours are one."""
        free = self.kind == FREE_BYTES
        joined = np.zeros(len(free), bool)
        joined[1:] = free[1:] & free[:-1] & (self.part[1:] == self.part[:-1])
        first = np.flatnonzero(~joined)
        size = np.add.reduceat(self.size, first) if len(first) else self.size
        table = self.address[first], size, self.kind[first], self.part[first]
        return Pieces(*(column[self.kind[first] != _NO_BYTES] for column in table))

    def holes(self, paging: Paging) -> Holes:
        """What is free, whoever freed it."""
        pieces = self.pieces()
        free = pieces.kind == FREE_BYTES
        return measure(pieces.address[free], pieces.size[free], paging)


@dataclass(frozen=True, eq=False)
class Paging:
    """How the memory behind an arena is mapped."""

    page_bytes: int
    in_hand_bytes: int
    """Pages that are mapped nowhere."""
    remap: bool
    large_pages: int
    """How many pages a large one has."""
    large_at: Ints
    """Where large ones are mapped."""


def measure(address: Ints, size: Ints, paging: Paging) -> Holes:
    """Of free memory, merged as far as it goes, in address order."""
    page = paging.page_bytes
    first = -(-address // page)
    pages = np.maximum((address + size) // page - first, 0)
    whole = int(pages.sum())
    if len(paging.large_at) and len(pages):
        # Free pages of a large one that is not free as a whole are of no use elsewhere.
        before = np.cumsum(pages) - pages

        def below(number: Ints) -> Ints:
            """How many whole free pages lie below a page."""
            hole = np.maximum(np.searchsorted(first, number, "right") - 1, 0)
            found: Ints = before[hole] + np.clip(number - first[hole], 0, pages[hole])
            return found

        start = paging.large_at // page
        free = below(start + paging.large_pages) - below(start)
        whole -= int(free[free < paging.large_pages].sum())
    return Holes(
        paging.in_hand_bytes + int(size.sum()),
        int(size.max(initial=0)),
        paging.in_hand_bytes + (whole * page if paging.remap else 0),
    )
