"""What a pool holds as arrays: what defragmentation reads.

There may be a hundred thousand blocks, and moving them takes the device less time than Python needs
to look at each of them a few times. So each is looked at once, in C, and of free memory nothing is
looked at: it is what all else leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, not_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cukit.memory.compact import Ints, Pieces
from cukit.memory.spans import UNMAPPED, Span

if TYPE_CHECKING:
    from cukit.memory.arena import AddressRange

_address, _size, _pins = map(attrgetter, ("address", "size", "pins"))


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


@dataclass(frozen=True)
class Walk:
    """Every span that is not free."""

    spans: list[Span]
    address: Ints
    size: Ints
    """Of each span."""
    movable: Ints
    """Numbers of the spans that may move, in address order."""
    pieces: Pieces
    """The same as the planner of compaction wants it."""

    @classmethod
    def over(
        cls, live: Iterable[Span], others: Sequence[Span], ranges: Sequence[AddressRange]
    ) -> Walk:
        """Of the ranges all that is live, and the `others`: pending, used elsewhere, kept for a
        captured graph, unmapped."""
        spans = list(live)
        live_count = len(spans)
        spans += others
        count = len(spans)
        address = np.fromiter(map(_address, spans), np.int64, count)
        size = np.fromiter(map(_size, spans), np.int64, count)
        moves = np.zeros(count, bool)
        moves[:live_count] = np.fromiter(map(not_, map(_pins, spans)), bool, live_count)
        mapped = np.ones(count, bool)
        mapped[live_count:] = [span.state != UNMAPPED for span in others]
        movable, walls, holes = (
            _ascending(np.flatnonzero(chosen), address)
            for chosen in (moves, mapped & ~moves, ~mapped)
        )
        start = np.array([part.address for part in ranges], np.int64)
        end = start + np.array([part.size for part in ranges], np.int64)
        begin = np.sort(np.concatenate((start, address[holes] + size[holes])))
        end = np.sort(np.concatenate((end, address[holes])))
        some = end > begin
        groups = address[movable], size[movable], address[walls], size[walls]
        return cls(spans, address, size, movable, Pieces(begin[some], end[some], *groups))

    def holes(self, paging: Paging) -> Holes:
        """What is free, whoever freed it."""
        return measure(*self.pieces.free, paging)


def _ascending(numbers: Ints, address: Ints) -> Ints:
    """Numbers of spans in address order, as they often are already."""
    found = address[numbers]
    if (found[1:] < found[:-1]).any():
        numbers = numbers[np.argsort(found)]
    return numbers


@dataclass(frozen=True)
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
